"""Tables of methods against domains, AVG, STD and worst: mean and spread over seeds, the best of each column marked."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedheal.analysis.standard_error import sampling_error
from fedheal.core.errors import explain_install
from fedheal.core.metrics import LAST
from fedheal.core.rng import SEED_FIELDS
from fedheal.report.comparability import annotate_rows, choose_reference
from fedheal.report.plain_text import escape_controls, escape_markdown
from fedheal.report.rows import (
    BOUNDS,
    FAIRNESS_COLUMNS,
    UNSEEN,
    Row,
    Seeds,
    group_by_data,
    name_data_sets,
    read_settings,
)
from fedheal.report.seed_levels import count_independent
from fedheal.runs.folder import write_bytes
from fedheal.runs.schema import FREE

LOWER_IS_BETTER = frozenset({"STD"})
LEGEND = "* best of its column (STD: the lowest)"


@dataclass(frozen=True)
class Cell:
    """One number over seeds; `sd` (ddof=1) needs two. It is shown as "-" if it is not meaningful."""

    mean: float
    sd: float | None
    best: bool = False
    is_meaningful: bool = True

    def format(self, bold: str = "{}", spread: str = "± {}") -> str:
        """Return mean and spread as text, with templates for a best mean and for the spread."""
        if not self.is_meaningful:
            return "-"
        mean = bold.format(f"{self.mean:.2f}") if self.best else f"{self.mean:.2f}"
        return mean if self.sd is None else f"{mean} {spread.format(f'{self.sd:.2f}')}"


def summarise_seeds(values: Sequence[float], best: float | None = None) -> Cell:
    """Return mean and spread over seeds; the cell is the best of its column if its mean is `best`."""
    mean = float(np.mean(values))
    return Cell(mean, float(np.std(values, ddof=1)) if len(values) > 1 else None, mean == best)


@dataclass(frozen=True)
class ResultTable:
    """The results on one data set: `cells[method][column]`. Bounds come last and are never best."""

    data: str  # what the data set is called
    columns: tuple[str, ...]
    cells: Mapping[str, Mapping[str, Cell]]
    seeds: Mapping[str, tuple[Seeds, ...]]
    averaged: frozenset[int] = frozenset({LAST})  # how many last rounds the numbers are means of
    sizes: Mapping[str, float] = field(default_factory=dict)  # test images by domain
    is_unseen: bool = False  # whether each domain was left out of training

    def get_error(self, method: str, domain: str) -> float:
        """Return the standard error of a domain's mean: the spread over seeds and the drawing of the test images."""
        cell = self.cells[method][domain]
        images = float(sampling_error(cell.mean, self.sizes.get(domain, 0)))
        return float(np.hypot(images, (cell.sd or 0.0) / count_independent(self.seeds[method]) ** 0.5))

    @property
    def unit(self) -> str:
        """What the results are counted in: seeds, or runs where they share seeds of a source of chance."""
        is_crossed = any(count_independent(seeds) < len(seeds) for seeds in self.seeds.values())
        return "runs" if is_crossed else "seeds"

    @property
    def about(self) -> str:
        """What the numbers are."""
        spread = f", ± standard deviation over {self.unit}" if any(len(x) > 1 for x in self.seeds.values()) else ""
        what = "accuracy of a model that was trained without the domain" if self.is_unseen else "accuracy"
        return f"{what} in percent, {describe_averaging(self.averaged)}{spread}"


def describe_averaging(averaged: frozenset[int]) -> str:
    """Say which rounds a result is a mean of.

    >>> [describe_averaging(frozenset({number})) for number in (5, 1, 3)]
    ['mean of the last five rounds', 'in the last round', 'mean of the last 3 rounds']
    """
    if len(averaged) > 1:
        return f"mean of the last rounds ({min(averaged)} to {max(averaged)} of them)"
    (number,) = averaged
    return {1: "in the last round", 5: "mean of the last five rounds"}.get(number, f"mean of the last {number} rounds")


def build_tables(rows: Sequence[Row]) -> list[ResultTable]:
    """Return one table per data set. Raise ValueError if two rows are of the same method and seed."""
    names = name_data_sets(row.data for row in rows)
    return [_build_table(group[0].name_table(names[group[0].data]), group) for group in group_by_data(rows).values()]


def _build_table(data: str, rows: Sequence[Row]) -> ResultTable:
    _check_duplicates(rows)
    columns = (*rows[0].domains, *FAIRNESS_COLUMNS)
    methods = sorted({row.method: None for row in rows}, key=lambda name: name in BOUNDS)
    values = {m: {c: [row.get_value(c) for row in rows if row.method == m] for c in columns} for m in methods}
    rivals = [m for m in methods if m not in BOUNDS]
    best = {}
    if len(rivals) > 1:
        for column in columns:
            means = [float(np.mean(values[m][column])) for m in rivals]
            best[column] = min(means) if column in LOWER_IS_BETTER else max(means)
    cells = {
        m: {c: summarise_seeds(v, best.get(c) if m in rivals else None) for c, v in values[m].items()} for m in methods
    }
    if len(rows[0].domains) == 1:  # STD is 0 for all
        cells = {m: row | {"STD": replace(row["STD"], best=False, is_meaningful=False)} for m, row in cells.items()}
    seeds = {m: tuple(sorted(row.seeds for row in rows if row.method == m)) for m in methods}
    summaries = [s for row in rows for s in row.summaries]  # those of earlier versions lack `averaged`
    averaged = frozenset(int(s.get("averaged", min(LAST, int(s["rounds"])))) for s in summaries)
    sizes, is_unseen = rows[0].summaries[0]["test_sizes"], rows[0].evaluation == UNSEEN
    return ResultTable(data, columns, cells, seeds, averaged, sizes, is_unseen)


def _check_duplicates(rows: Sequence[Row]) -> None:
    seen: dict[tuple[str, Seeds], Row] = {}
    for row in rows:
        twin = seen.setdefault((row.method, row.seeds), row)
        if twin is not row:
            a, b = (read_settings(r.summaries[0])[0] for r in (twin, row))
            differing = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key) and key not in FREE)
            how = f", with other settings ({', '.join(differing)})" if differing else ""
            where = f"({twin.folder} and {row.folder})"
            raise ValueError(f"{row.method} with seed {row.seed} was run twice{how} {where}: report them separately")


def format_markdown(table: ResultTable) -> str:
    """Return a Markdown table."""
    return join_markdown(format_lines(table, "**{}**"))


def format_lines(table: ResultTable, bold: str) -> list[list[str]]:
    """Return the table as lines of words, the head first; `bold` is a template for the best of a column."""
    cells = {method: [cell.format(bold) for cell in row.values()] for method, row in table.cells.items()}
    body = [[method, *words, str(len(table.seeds[method]))] for method, words in cells.items()]
    return [["method", *table.columns, table.unit], *body]


def join_markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of words as a Markdown table; the first is its head."""
    head, *body = ["| " + " | ".join(map(escape_markdown, line)) + " |" for line in lines]
    return "\n".join([head, "|---" * len(lines[0]) + "|", *body])


def format_latex(table: ResultTable) -> str:
    """Return a LaTeX tabular with the rules of the package booktabs; bounds stand below a rule of their own."""
    head = " & ".join(["method", *map(_escape_latex, table.columns), table.unit]) + r" \\"
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(table.columns) + 1)}}}", r"\toprule", head, r"\midrule"]
    first_bound = next((method for method in table.cells if method in BOUNDS), None)
    for method, cells in table.cells.items():
        if method == first_bound:
            lines.append(r"\midrule")
        words = [cell.format(r"\textbf{{{}}}", r"{{\scriptsize$\pm${}}}") for cell in cells.values()]
        lines.append(" & ".join([_escape_latex(method), *words, str(len(table.seeds[method]))]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


LATEX = {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"} | {
    character: f"\\{character}" for character in "&%$#_{}"
}


def _escape_latex(words: str) -> str:
    return "".join(LATEX.get(character, character) for character in escape_controls(words))


def format_text(table: ResultTable) -> str:
    """Return a plain table in columns of equal width; with a legend if a number is marked."""
    lines = align_columns(format_lines(table, "{}*"))
    is_marked = any(cell.best for cells in table.cells.values() for cell in cells.values())
    legend = [LEGEND] if is_marked else []
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *legend])


def align_columns(lines: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return lines with columns of equal width, the first `left` of them aligned to the left."""
    lines = [[escape_controls(word) for word in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pad = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    return ["  ".join(f(word, w) for f, word, w in zip(pad, line, widths, strict=True)) for line in lines]


FORMATS: dict[str, Callable[[ResultTable], str]] = {
    "text": format_text, "markdown": format_markdown, "latex": format_latex
}  # fmt: skip


def flatten_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one flat record per row, for other programs; `notes` says what to know about it."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.table, []).append(row)
    notes = {data: iter(annotate_rows(group, choose_reference(group))) for data, group in groups.items()}
    has_own_seeds = any(set(row.seeds) != {row.seed} for row in rows)
    has_unseen = any(row.evaluation == UNSEEN for row in rows)
    records = []
    for row in rows:
        record = {"data": row.data, "method": row.method, "seed": row.seed, "rounds": row.summaries[0]["rounds"]}
        if has_unseen:
            record["evaluate"] = row.evaluation
        if has_own_seeds:
            record |= dict(zip(SEED_FIELDS, row.seeds, strict=True))
        record |= {f"accuracy.{name}": float(x) for name, x in row.domains.items()}
        record |= {name: float(x) for name, x in row.fairness.items()}
        record |= {
            f"{measure}.{d}": x for d, found in row.collect("calibration").items() for measure, x in found.items()
        }
        if row.validation:
            record |= {f"validation.{key}": float(row.validation[key]) for key in FAIRNESS_COLUMNS.values()}
        records.append(record | {"notes": "; ".join(next(notes[row.table]))})
    return records


def format_csv(rows: Sequence[Row]) -> str:
    """Return the flat records as CSV."""
    records = flatten_rows(rows)
    out = io.StringIO()
    fields = dict.fromkeys(name for record in records for name in record)
    writer = csv.DictWriter(out, list(fields), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue().rstrip("\n")


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Write the flat records as Parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"Parquet needs pyarrow: {explain_install('parquet')}") from None
    records = flatten_rows(rows)
    fields = dict.fromkeys(name for record in records for name in record)
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{f: r.get(f) for f in fields} for r in records]), out)
    write_bytes(path, out.getvalue())
