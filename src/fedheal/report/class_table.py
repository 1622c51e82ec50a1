"""Tables of what happens within domains: the class that is served worst, and how well calibrated the model is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedheal.report.comparability import format_setting, list_methods
from fedheal.report.rows import Row
from fedheal.report.series import sum_by_class
from fedheal.report.tables import summarise_seeds

CALIBRATION = {
    "ece": "Expected calibration error in percent (15 bins): how far confidence is from accuracy",
    "brier": "Brier score (0 to 2): squared error of the probabilities",
    "nll": "Negative log-likelihood",
}


@dataclass(frozen=True)
class DomainTable:
    """A table of methods against domains, as lines of words, the head first."""

    title: str
    lines: Sequence[Sequence[str]]


def build_domain_tables(rows: Sequence[Row], measures: Sequence[str] = tuple(CALIBRATION)) -> list[DomainTable]:
    """Return the tables that the rows of one data set have numbers for: the worst class, and these measures of calibration."""
    tables = [_build_class_table(rows), *(_build_calibration_table(rows, measure) for measure in measures)]
    return [table for table in tables if len(table.lines) > 1]


def _build_class_table(rows: Sequence[Row]) -> DomainTable:
    domains, body = list(rows[0].domains), []
    for method in list_methods(rows):
        counts = sum_by_class([row.collect("by_class") for row in rows if row.method == method], domains)
        worst = {domain: find_worst_class(rows[0], numbers.tolist()) for domain, numbers in counts.items()}
        if any(worst.values()):
            cells = [f"{found[1]:.1f} ({found[0]})" if (found := worst.get(d)) else "-" for d in domains]
            body.append([method, *cells])
    title = "Accuracy of the class served worst in each domain, in the last round, over all seeds (class in brackets)"
    return DomainTable(title, [["method", *domains], *body])


def find_worst_class(row: Row, counts: Sequence[Sequence[float]]) -> tuple[str, float] | None:
    """Return the name and the accuracy in percent of the class with the lowest one; None without test examples."""
    shares = [(100 * correct / every, i) for i, (correct, every) in enumerate(counts) if every]
    if not shares:
        return None
    accuracy, i = min(shares)
    names = row.summaries[0].get("classes", [])
    return (format_setting(names[i]) if i < len(names) else str(i)), accuracy


def _build_calibration_table(rows: Sequence[Row], measure: str) -> DomainTable:
    domains, body = list(rows[0].domains), []
    for method in list_methods(rows):
        found = [row.collect("calibration") for row in rows if row.method == method]
        values = {d: [x for one in found if (x := one.get(d, {}).get(measure)) is not None] for d in domains}
        if any(values.values()):
            cells = [summarise_seeds(v).format() if v else "-" for v in values.values()]
            body.append([method, *cells])
    return DomainTable(f"{CALIBRATION[measure]}, in the last round", [["method", *domains], *body])
