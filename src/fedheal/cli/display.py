"""Print and write what commands show: tables of runs, also while they run, reports, the HTML page, diagnoses."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedheal import methods as method_table
from fedheal.aggregate.registry import STAGES
from fedheal.campaign import sweep
from fedheal.campaign.jobs import Job
from fedheal.report import conclusions, rows, tables
from fedheal.report.comparability import check_reference, list_cautions
from fedheal.report.diagnose import diagnose_run, draw_diagnosis, explain_diagnosis, format_diagnosis
from fedheal.report.figures import save_figure
from fedheal.report.html_page import Section, render_page
from fedheal.runs import folder as records


def make_console() -> Console:
    """Return a console for tables: 200 columns if not on a terminal. Markup is off, since a domain may be called [old]."""
    return Console(width=None if sys.stdout.isatty() else 200, markup=False)


def show_run(summary: Mapping[str, Any], folder: Path) -> None:
    """Print one run: its numbers, what they mean, notes on the data, and the folder."""
    show_comparison([summary])
    about = f"Accuracy in percent, {tables.describe_averaging(frozenset({int(summary['averaged'])}))}."
    typer.echo("\n".join([about, *format_data_notes([summary]), str(folder)]))


def show_comparison(summaries: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of methods against domains, AVG, STD and worst, the best of each column in bold."""
    domains = list(summaries[0]["domains"])
    table = Table()
    table.add_column("method", no_wrap=True)
    for name in (*domains, "AVG", "STD", "worst"):
        table.add_column(name, justify="right")
    values = [[s["domains"][d] for d in domains] + [s["avg"], s["std"], s["worst"]] for s in summaries]
    best = [min(column) if i == len(domains) + 1 else max(column) for i, column in enumerate(zip(*values, strict=True))]
    for summary, row in zip(summaries, values, strict=True):
        is_best = [len(values) > 1 and x == b for x, b in zip(row, best, strict=True)]
        cells = [Text(f"{x:.1f}", style="bold" if bold else "") for x, bold in zip(row, is_best, strict=True)]
        table.add_row(summary["method"], *cells)
    make_console().print(table)


def format_data_notes(summaries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the notes on the runs' data, each once."""
    return [f"Note: {note}." for note in rows.collect_data_notes(summaries)]


def show_search(search: sweep.Search, trials: Sequence[sweep.Trial], best: sweep.Trial) -> None:
    """Print what a search tried and what it chose."""
    make_console().print(_make_trial_table(trials, best))
    point = " ".join(f"{key}={value}" for key, value in best.point.items())
    about = f"Chosen by {search.metric} on validation data, {len(search.seeds)} seed(s)"
    typer.echo(f"{about}: {point}. The test set had no part in the choice.")
    equals = sum(trial.score(search.metric) == best.score(search.metric) for trial in trials)
    if equals > 1:
        typer.echo(f"{equals} points are equally good: this is the first of them, and no better than the others.")
    typer.echo(f"The runs are in {search.out}.")


def _make_trial_table(trials: Sequence[sweep.Trial], best: sweep.Trial) -> Table:
    table = Table(title="mean over seeds; chosen on validation, the test set for information", title_justify="left")
    metrics = ("avg", "std", "worst")
    for column in (*best.point, *(f"{split} {name}" for split in ("validation", "test") for name in metrics), ""):
        table.add_column(column, justify="right" if column else "left")
    for trial in trials:
        means = [sum(part[name]) / len(part[name]) for part in (trial.validation, trial.test) for name in metrics]
        mark = "chosen" if trial is best else ""
        table.add_row(*map(str, trial.point.values()), *(f"{x:.2f}" for x in means), mark)
    return table


def format_report(runs: Sequence[rows.Row], form: str, reference: str | None = None) -> str:
    """Return a table for each data set, what may be concluded from it, and notes on the data."""
    check_reference(runs, reference)
    bullet = {"text": "", "markdown": "- ", "latex": "% "}[form]
    parts, groups = [], rows.group_by_data(runs)
    for table in tables.build_tables(runs):
        group = groups[table.data]
        sentences = list_cautions(group, reference) + conclusions.conclude(group, reference)
        sentences += format_data_notes(summary for row in group for summary in row.summaries)
        notes = "\n".join(f"{bullet}{sentence}" for sentence in sentences)
        parts += [f"{table.data}: {table.about}", tables.FORMATS[form](table), notes]
    if form == "latex":
        parts = [part if part.startswith(("\\", "%")) else f"% {part}" for part in parts]
    return "\n\n".join(part for part in parts if part)


def write_report(runs: Sequence[rows.Row], form: str, out: Path | None, reference: str | None) -> None:
    """Write a report of one of the formats to a file, or print it."""
    if out is not None:
        records.make_folder(out.parent)
    if form == "parquet":
        assert out is not None
        tables.write_parquet(runs, out)
        return
    text = tables.format_csv(runs) if form == "csv" else format_report(runs, form, reference)
    if out is None:
        typer.echo(text)
    else:
        records.write_text(out, text + "\n")


def write_page(
    runs: Sequence[rows.Row],
    path: Path,
    title: str = "",
    reference: str | None = None,
    sections: Sequence[Section] = (),
) -> str:
    """Write the HTML page and return its path."""
    text = render_page(runs, title, reference, sections)
    records.make_folder(path.parent)
    records.write_text(path, text)
    return str(path)


def show_diagnosis(folders: Sequence[Path], by: str | None, figures: Path | None) -> None:
    """Print who is under-served in a run, as a table and sentences, and write a figure."""
    if len(folders) != 1:
        raise ValueError(f"--diagnose takes one run, but there are {len(folders)} folders: name one")
    result = diagnose_run(folders[0], by)
    head, *body = format_diagnosis(result)
    table = Table()
    for i, word in enumerate(head):
        table.add_column(word, justify="right" if i else "left")
    for line in body:
        table.add_row(*line)
    make_console().print(table)
    typer.echo("\n".join(explain_diagnosis(result)))
    written = save_figure((figures or folders[0]) / f"diagnosis-{result.kind}", partial(draw_diagnosis, result))
    if written:
        typer.echo(str(written[-1]))


def make_parts_table() -> Table:
    """Return a table of the parts that methods are made of."""
    title = "<local>[:key=value,...]{+<stage>[:key=value,...]}"
    table = Table("part", "what it does", "parameters", title=title, title_justify="left")
    for kind, parts in (("local", method_table.LOCAL), ("stage", STAGES), ("whole", method_table.WHOLE)):
        for name, part in parts.items():
            keys = ", ".join(f"{k}={p.default}" for k, p in inspect.signature(part).parameters.items())
            table.add_row(f"{name} ({kind})", (inspect.getdoc(part) or "").split("\n")[0], keys)
    for bound, about in rows.BOUNDS.items():
        table.add_row(f"{bound} (bound)", about, "")
    table.add_row("package.module:function", "your own function that returns a Stage, a Term or an Aggregator", "")
    return table


def make_parameter_table(name: str) -> Table:
    """Return a table of a method's parameters and the source of each default."""
    table = Table("part", "parameter", "default", "what it is", "source of the default", title_justify="left")
    method = method_table.get(name)
    table.title = method.name
    for part in method.parts:
        for key, parameter in part.parameters.items():
            value, default = part.values[key], parameter.default
            text = str(default).lower() if isinstance(default, bool) else str(default)
            cell = text if value == default else f"{text} (here {value})"
            table.add_row(part.name, key, cell, parameter.description, parameter.source)
    if not table.rows:
        table.add_row(name, "no parameters", "", "", "")
    return table


class LiveTable:
    """A live table of runs on a terminal; elsewhere one line for each finished run."""

    def __init__(self, console: Console, jobs: Sequence[Job]) -> None:
        self.console, self.jobs = console, jobs
        self.live = Live(get_renderable=self.make_table, console=console, refresh_per_second=1, transient=True)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def report_finished(self, job: Job) -> None:
        """Print a line about a finished run, unless the live table shows it."""
        if not self.console.is_terminal:
            result = rows.load_summary(job.folder, ("avg", "std", "worst", "seconds"))
            metrics = f"AVG {result['avg']:.2f} STD {result['std']:.2f} worst {result['worst']:.2f}"
            line = f"{job.folder.name}: {metrics} ({sum(result['seconds'].values()):.0f} s)"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def make_table(self) -> Table:
        """Return the rounds done by each run, and the numbers of its last evaluation."""
        table = Table("run", "rounds", "AVG", "STD", "worst")
        for job in self.jobs:
            done = records.read_rounds(job.folder)
            evaluated = [record.fairness for record in done if record.fairness]
            metrics = [f"{evaluated[-1][name]:.1f}" if evaluated else "" for name in ("avg", "std", "worst")]
            table.add_row(Text(job.folder.name), f"{len(done)}/{job.experiment.rounds}", *metrics)
        return table
