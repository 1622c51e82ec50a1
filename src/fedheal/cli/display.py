"""What commands print and write: tables of runs, reports, the page, diagnoses."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedheal import methods as method_table
from fedheal.aggregate.registry import STAGES
from fedheal.campaign import sweep
from fedheal.core.parameter import get_parameters
from fedheal.report import conclusions, rows, tables
from fedheal.report.comparability import check_reference, list_cautions
from fedheal.report.diagnose import diagnose_run, draw_diagnosis, explain_diagnosis, format_diagnosis
from fedheal.report.figures import save_figure
from fedheal.report.html_page import Section, render_page
from fedheal.runs import folder as records


def wide() -> Console:
    """Where nobody looks at a terminal there is no width to keep to. A domain may be called [old]: nothing is markup."""
    return Console(width=None if sys.stdout.isatty() else 200, markup=False)


def ran(summary: Mapping[str, Any], folder: Path) -> None:
    """One run: its numbers, what they are, what is special about the data, and where it is."""
    compared([summary])
    about = f"Accuracy in percent, {tables.describe_averaging(frozenset({int(summary['averaged'])}))}."
    typer.echo("\n".join([about, *notes([summary]), str(folder)]))


def compared(summaries: Sequence[Mapping[str, Any]]) -> None:
    """Runs side by side, on the screen."""
    wide().print(_table(summaries))


def _table(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """Methods against domains, AVG, STD and worst; the best of each column stands out."""
    columns = list(summaries[0]["domains"])
    table = Table()
    table.add_column("method", no_wrap=True)
    for name in (*columns, "AVG", "STD", "worst"):
        table.add_column(name, justify="right")
    values = [[s["domains"][c] for c in columns] + [s["avg"], s["std"], s["worst"]] for s in summaries]
    best = [min(column) if i == len(columns) + 1 else max(column) for i, column in enumerate(zip(*values, strict=True))]
    for summary, row in zip(summaries, values, strict=True):
        cells = [
            Text(f"{x:.1f}", style="bold" if len(values) > 1 and x == b else "") for x, b in zip(row, best, strict=True)
        ]
        table.add_row(summary["method"], *cells)
    return table


def notes(summaries: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is special about the data, each thing once."""
    return [f"Note: {note}." for note in rows.collect_data_notes(summaries)]


def searched(search: sweep.Search, found: Sequence[sweep.Trial], chosen: sweep.Trial) -> None:
    """What a search tried, what it chose, and what the choice is worth."""
    wide().print(_trials(found, chosen))
    best = " ".join(f"{key}={value}" for key, value in chosen.point.items())
    said = [
        f"Chosen by {search.metric} on validation data, {len(search.seeds)} seed(s): {best}. "
        "The test set had no part in it."
    ]
    equals = sum(trial.score(search.metric) == chosen.score(search.metric) for trial in found)
    if equals > 1:
        said.append(f"{equals} points are equally good on it: this is the first, and no better than the others.")
    typer.echo("\n".join([*said, f"The runs are in {search.out}."]))


def _trials(found: Sequence[sweep.Trial], chosen: sweep.Trial) -> Table:
    table = Table(title="mean over seeds; chosen on validation, the test set for information", title_justify="left")
    for key in chosen.point:
        table.add_column(key, justify="right")
    for where in ("validation", "test"):
        for name in ("avg", "std", "worst"):
            table.add_column(f"{where} {name}", justify="right")
    table.add_column("")
    for trial in found:
        numbers = [
            sum(part[name]) / len(part[name])
            for part in (trial.validation, trial.test)
            for name in ("avg", "std", "worst")
        ]
        mark = "chosen" if trial is chosen else ""
        table.add_row(*(str(v) for v in trial.point.values()), *(f"{x:.2f}" for x in numbers), mark)
    return table


def reported(found: Sequence[rows.Row], form: str, reference: str | None = None) -> str:
    """A table for each data set, what may be concluded from it, and what is special about the data."""
    check_reference(found, reference)
    parts = []
    groups = rows.group_by_data(found)
    for table in tables.build_tables(found):
        own = groups[table.data]
        parts.append(f"{table.data}: {table.about}")
        parts.append(tables.FORMATS[form](table))
        said = list_cautions(own, reference) + conclusions.conclude(own, reference)
        said += notes(summary for row in own for summary in row.summaries)
        bullet = {"text": "", "markdown": "- ", "latex": "% "}[form]
        parts.append("\n".join(f"{bullet}{sentence}" for sentence in said))
    if form == "latex":
        parts = [part if part.startswith(("\\", "%")) else f"% {part}" for part in parts]
    return "\n\n".join(part for part in parts if part)


def write_page(
    found: Sequence[rows.Row],
    path: Path,
    title: str = "",
    reference: str | None = None,
    sections: Sequence[Section] = (),
) -> str:
    """Write the HTML page and say where it is."""
    text = render_page(found, title, reference, sections)
    records.make_folder(path.parent)
    records.write_text(path, text)
    return str(path)


def diagnosed(runs: Sequence[Path], by: str | None, figures: Path | None) -> None:
    """Who is under-served in a run: a table, sentences and a picture."""
    if len(runs) != 1:
        raise ValueError(f"--diagnose looks at one run, but there are {len(runs)} folders: name one")
    diagnosis = diagnose_run(runs[0], by)
    head, *body = format_diagnosis(diagnosis)
    table = Table()
    for i, word in enumerate(head):
        table.add_column(word, justify="right" if i else "left")
    for line in body:
        table.add_row(*line)
    wide().print(table)
    typer.echo("\n".join(explain_diagnosis(diagnosis)))
    written = save_figure((figures or runs[0]) / f"diagnosis-{diagnosis.kind}", partial(draw_diagnosis, diagnosis))
    if written:
        typer.echo(str(written[-1]))


def parts() -> Table:
    """What methods are put together from."""
    table = Table(
        "part",
        "what it does",
        "parameters",
        title="<local>[:key=value,...]{+<stage>[:key=value,...]}",
        title_justify="left",
    )
    groups = (("local", method_table.LOCAL), ("stage", STAGES), ("whole", method_table.WHOLE))
    for kind, named in groups:
        for part_name, part in named.items():
            keys = ", ".join(f"{key}={parameter.default}" for key, parameter in get_parameters(part).items())
            table.add_row(f"{part_name} ({kind})", (inspect.getdoc(part) or "").split("\n")[0], keys)
    for bound, about in rows.BOUNDS.items():
        table.add_row(f"{bound} (bound)", about, "")
    table.add_row("package.module:function", "your own: a function that returns a Stage, a Term or an Aggregator", "")
    return table


def explained(name: str) -> Table:
    """A method's parameters, and the source of each default."""
    table = Table("part", "parameter", "default", "what it is", "source of the default", title_justify="left")
    method = method_table.get(name)
    table.title = method.name
    for part in method.parts:
        for key, parameter in part.parameters.items():
            value, default = part.values[key], parameter.default
            shown = str(default).lower() if isinstance(default, bool) else str(default)
            shown = shown if value == default else f"{shown} (here {value})"
            table.add_row(part.name, key, shown, parameter.description, parameter.source)
    if not table.rows:
        table.add_row(name, "no parameters", "", "", "")
    return table
