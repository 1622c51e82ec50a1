"""Rows as a table of methods against domains, AVG, STD and worst: mean and spread over seeds, the best of each column bold."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedheal.core.metrics import LAST
from fedheal.report import comparability as alike
from fedheal.report.conclusions import chosen_reference
from fedheal.report.rows import BOUNDS, EVENNESS, Row, by_data, described
from fedheal.runs.folder import write_bytes
from fedheal.runs.schema import FREE

LOWER_IS_BETTER = frozenset({"STD"})


@dataclass(frozen=True)
class Cell:
    """One number over seeds; `sd` (ddof=1) needs two."""

    mean: float
    sd: float | None
    best: bool = False


@dataclass(frozen=True)
class Table:
    """`cells[method][column]`; bounds come last and are never best."""

    data: str
    columns: tuple[str, ...]
    cells: Mapping[str, Mapping[str, Cell]]
    seeds: Mapping[str, tuple[int, ...]]
    averaged: frozenset[int] = frozenset({LAST})  # how many last rounds the numbers are means of

    @property
    def about(self) -> str:
        """What the numbers are."""
        spread = ", ± standard deviation over seeds" if any(len(seeds) > 1 for seeds in self.seeds.values()) else ""
        return f"accuracy in percent, {over_rounds(self.averaged)}{spread}"


def over_rounds(averaged: frozenset[int]) -> str:
    """Which rounds a result is a mean of.

    >>> over_rounds(frozenset({5})), over_rounds(frozenset({1})), over_rounds(frozenset({3}))
    ('mean of the last five rounds', 'in the last round', 'mean of the last 3 rounds')
    """
    if len(averaged) > 1:
        return f"mean of the last rounds ({min(averaged)} to {max(averaged)} of them)"
    (number,) = averaged
    return {1: "in the last round", 5: "mean of the last five rounds"}.get(number, f"mean of the last {number} rounds")


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table a data set. Two runs of one method and seed cannot both be a row: that is refused by name."""
    return [_table(data, group) for data, group in by_data(rows).items()]


def _table(data: str, rows: Sequence[Row]) -> Table:
    seen: dict[tuple[str, int], Row] = {}
    for row in rows:
        twin = seen.setdefault((row.method, row.seed), row)
        if twin is not row:
            places = " and ".join(str(r.summaries[0].get("folder", "?")) for r in (twin, row))
            one, other = (described(r.summaries[0])[0] for r in (twin, row))
            differ = [key for key in one.keys() | other.keys() if one.get(key) != other.get(key) and key not in FREE]
            how = f", with other settings ({', '.join(sorted(differ))})" if differ else ""
            raise ValueError(f"{row.method} with seed {row.seed} was run twice{how} ({places}): report them apart")
    columns = (*rows[0].domains, *EVENNESS)
    methods = sorted({row.method: None for row in rows}, key=lambda name: name in BOUNDS)
    values = {m: {c: [value(row, c) for row in rows if row.method == m] for c in columns} for m in methods}
    rivals = [m for m in methods if m not in BOUNDS]
    best = {c: _best(c, [np.mean(values[m][c]) for m in rivals]) for c in columns}
    cells = {
        m: {
            c: Cell(
                float(np.mean(v)),
                float(np.std(v, ddof=1)) if len(v) > 1 else None,
                m in rivals and len(rivals) > 1 and float(np.mean(v)) == best[c],
            )
            for c, v in values[m].items()
        }
        for m in methods
    }
    seeds = {m: tuple(sorted(row.seed for row in rows if row.method == m)) for m in methods}
    return Table(data, columns, cells, seeds, frozenset(_averaged(s) for row in rows for s in row.summaries))


def _averaged(summary: Mapping[str, Any]) -> int:
    """Runs of earlier versions do not say it."""
    return int(summary.get("averaged", min(LAST, int(summary["rounds"]))))


def value(row: Row, column: str) -> float:
    """A row's number in a column."""
    return float(row.evenness[EVENNESS[column]] if column in EVENNESS else row.domains[column])


def _best(column: str, means: list[Any]) -> float:
    if not means:
        return float("nan")
    return float(min(means) if column in LOWER_IS_BETTER else max(means))


def markdown(table: Table) -> str:
    """A Markdown table."""
    lines = [f"| method | {' | '.join(map(in_a_cell, table.columns))} | seeds |"]
    lines.append("|---" * (len(table.columns) + 2) + "|")
    for method, cells in table.cells.items():
        shown = [_text(cell, "**{}**") for cell in cells.values()]
        lines.append(f"| {in_a_cell(method)} | {' | '.join(shown)} | {len(table.seeds[method])} |")
    return "\n".join(lines)


def latex(table: Table) -> str:
    """A LaTeX tabular with booktabs rules; bounds below a rule of their own."""
    lines = [
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        r"\toprule",
        " & ".join(["method", *map(_escaped, table.columns)]) + r" \\",
        r"\midrule",
    ]
    ruled = False
    for method, cells in table.cells.items():
        if method in BOUNDS and not ruled:
            lines.append(r"\midrule")
            ruled = True
        shown = [_text(cell, r"\textbf{{{}}}", r"{{\scriptsize$\pm${}}}") for cell in cells.values()]
        lines.append(" & ".join([_escaped(method), *shown]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def text(table: Table) -> str:
    """A plain table in columns of equal width; a legend where something is marked."""
    head = ["method", *table.columns, "seeds"]
    body = [
        [
            method,
            *(_text(cell, "{}*") if cell.best else _text(cell, "{}") for cell in cells.values()),
            str(len(table.seeds[method])),
        ]
        for method, cells in table.cells.items()
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = [
        "  ".join(
            word.ljust(w) if i == 0 else word.rjust(w) for i, (word, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, *body]
    ]
    marked = any(cell.best for cells in table.cells.values() for cell in cells.values())
    legend = ["* best of its column (STD: the lowest)"] if marked else []
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *legend])


def _text(cell: Cell, bold: str, spread: str = "± {}") -> str:
    mean = bold.format(f"{cell.mean:.2f}") if cell.best else f"{cell.mean:.2f}"
    return mean if cell.sd is None else f"{mean} {spread.format(f'{cell.sd:.2f}')}"


def in_a_cell(words: str) -> str:
    """Words that do not end a cell of a Markdown table."""
    return words.replace("|", r"\|")


LATEX = {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"} | {
    character: f"\\{character}" for character in "&%$#_{}"
}


def _escaped(words: str) -> str:
    return "".join(LATEX.get(character, character) for character in words)


def tidy(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One flat record a row, for other programs; `notes` says what else to know of it."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.summaries[0]["data"], []).append(row)
    notes = {data: iter(alike.notes(own, chosen_reference(own))) for data, own in groups.items()}
    return [
        {
            "data": row.summaries[0]["data"],
            "method": row.method,
            "seed": row.seed,
            "rounds": row.summaries[0]["rounds"],
            **{f"accuracy.{name}": float(x) for name, x in row.domains.items()},
            **{name: float(x) for name, x in row.evenness.items()},
            **({f"validation.{k}": float(row.validation[k]) for k in EVENNESS.values()} if row.validation else {}),
            "notes": "; ".join(next(notes[row.summaries[0]["data"]])),
        }
        for row in rows
    ]


def csv_text(rows: Sequence[Row]) -> str:
    """The tidy records as CSV."""
    records = tidy(rows)
    fields = list(dict.fromkeys(name for record in records for name in record))
    out = io.StringIO()
    writer = csv.DictWriter(out, fields, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue().rstrip("\n")


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """The tidy records as Parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError("Parquet needs pyarrow: pip install 'fedheal[parquet]'") from None
    records = tidy(rows)
    fields = list(dict.fromkeys(name for record in records for name in record))
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{f: r.get(f) for f in fields} for r in records]), out)
    write_bytes(path, out.getvalue())


FORMATS: dict[str, Callable[[Table], str]] = {"text": text, "markdown": markdown, "latex": latex}
