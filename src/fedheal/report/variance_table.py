"""Tables of the variance components that crossed runs give: how much the split, the initial model and the batches matter."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedheal.analysis.variance import Component, Decomposition, estimate_components, get_sd_range
from fedheal.report.comparability import choose_reference, select_comparable
from fedheal.report.rows import FAIRNESS_COLUMNS, Row, Seeds
from fedheal.report.seed_levels import count_independent, count_levels, list_seeds

FEW_LEVELS = 5  # with fewer, a standard deviation is an order of magnitude


@dataclass(frozen=True)
class ComponentLine:
    """The variance components of one column of the table: of a method, or of its difference to another."""

    method: str
    reference: str  # that is subtracted; empty for the method's own values
    column: str
    found: Decomposition

    @property
    def title(self) -> str:
        """What the values are of."""
        return f"{self.method} less {self.reference}" if self.reference else self.method


def decompose_rows(rows: Sequence[Row], reference: str | None = None) -> list[ComponentLine]:
    """Return the variance components of every method with a complete crossed design, and of differences to the reference.

    Args:
        rows: The rows of one data set.
        reference: The method that is subtracted from the others; FedAvg or the first by default.

    Returns:
        Lines for AVG, STD, worst and each domain; none if no seeds are crossed. Runs on different data are not subtracted, and
        a method whose own runs of one split are on different data has no lines.
    """
    reference = choose_reference(rows, reference)
    comparable = {(row.method, row.seeds) for row in select_comparable(rows, reference)}
    same_data = {
        (row.method, row.seeds) for m in list_seeds(rows) for row in select_comparable(rows, m) if row.method == m
    }
    complete = {
        method: seeds
        for method, seeds in list_seeds(rows).items()
        if _is_complete(seeds) and {(method, key) for key in seeds} <= same_data
    }
    by_seeds = {(row.method, row.seeds): row for row in rows}
    lines = []
    for method, seeds in complete.items():
        pairs = {(name, key) for name in (method, reference) for key in seeds}
        is_paired = method != reference and set(complete.get(reference, ())) == set(seeds) and pairs <= comparable
        for other in ("", reference)[: 1 + is_paired]:
            for column in (*FAIRNESS_COLUMNS, *rows[0].domains):
                values = [by_seeds[method, key].get_value(column) for key in seeds]
                if other:
                    values = [x - by_seeds[other, key].get_value(column) for x, key in zip(values, seeds, strict=True)]
                lines.append(ComponentLine(method, other, column, _decompose(seeds, values)))
    return lines


def format_components(lines: Sequence[ComponentLine]) -> list[list[str]]:
    """Return the components as a table of words, the head first: standard deviations in points, and shares of the variance."""
    names = list(dict.fromkeys(c.name for line in lines for c in line.found.components))
    body = []
    for line in lines:
        cells = {c.name: _format_cell(line.found, c) for c in line.found.components}
        mean = f"{line.found.mean:{'+' if line.reference else ''}.2f} ± {line.found.error:.2f}"
        body.append([line.title, line.column, mean, *(cells.get(name, "") for name in names)])
    return [["method", "column", "mean", *names], *body]


def title_components(lines: Sequence[ComponentLine]) -> str:
    """Return the title of the table of components, with the numbers of levels."""
    designs = dict.fromkeys(" x ".join(f"{n} {source}" for source, n in x.found.levels.items()) for x in lines)
    return f"Variance components ({'; '.join(designs)}): standard deviation in points, share of the variance"


def explain_components(rows: Sequence[Row], lines: Sequence[ComponentLine]) -> list[str]:
    """Say how far the components can be trusted, and which methods have none."""
    sentences = []
    levels = {source: n for line in lines for source, n in line.found.levels.items()}
    for source, number in levels.items():
        low, high = get_sd_range(number - 1)
        freedom = f"{number - 1} degree{'s' if number > 2 else ''} of freedom"
        rough = " Too few levels for more than an order of magnitude." if number < FEW_LEVELS else ""
        if number == 2:
            rough = " Two levels say almost nothing of its size."
        sentences.append(
            f"{source}: {number} levels, {freedom}. The true standard deviation may be {low:.1f} to {high:.1f} times the "
            f"estimate (95 %, normal effects), or further off where other components are large.{rough}"
        )
    if lines:
        crossed = " The last component holds all that no other explains." if len(levels) > 1 else ""
        sentences.append(
            "± is the standard error of the mean over new levels of what was varied. An estimate below 0 is shown as 0: it is "
            f"no more than the other components explain.{crossed}"
        )
    for method, seeds in list_seeds(rows).items():
        wanted = math.prod(count_levels(seeds).values())
        if count_independent(seeds) < len(seeds) < wanted:
            sentences.append(
                f"{method} has {len(seeds)} of {wanted} combinations of its seeds: variance components need all of them."
            )
    return sentences


def flatten_components(lines: Sequence[ComponentLine]) -> list[dict[str, Any]]:
    """Return the components as plain records, for JSON."""
    return [
        {
            "method": line.method,
            "less": line.reference,
            "column": line.column,
            "mean": line.found.mean,
            "error": line.found.error,
            "components": [
                {"source": c.name, "variance": c.variance, "mean_square": c.mean_square, "df": c.df}
                for c in line.found.components
            ],
        }
        for line in lines
    ]


def _is_complete(seeds: Collection[Seeds]) -> bool:
    """Return whether the runs are all combinations of their seeds. n ordinary runs are n of n^3."""
    levels = count_levels(seeds)
    return bool(levels) and math.prod(levels.values()) == len(seeds)


def _decompose(seeds: Sequence[Seeds], values: Sequence[float]) -> Decomposition:
    """Return the components of values whose seeds are all combinations of their levels."""
    factors = list(count_levels(seeds))
    order = sorted(range(len(seeds)), key=seeds.__getitem__)  # the last source varies fastest, as in an array
    table = np.array([values[i] for i in order]).reshape([*count_levels(seeds).values()])
    return estimate_components(table, factors)


def _format_cell(found: Decomposition, component: Component) -> str:
    share = found.get_share(component)
    return f"{component.sd:.2f}" + ("" if share is None else f" ({100 * share:.0f} %)")
