"""Print and write what commands show: tables of runs, also while they run, reports, the HTML page, diagnoses."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedheal import methods as method_table
from fedheal.aggregate.registry import STAGES
from fedheal.campaign import sweep
from fedheal.campaign.jobs import Job
from fedheal.core.errors import format_count
from fedheal.core.metrics import fairness
from fedheal.core.parameter import get_parameters
from fedheal.data import SPECS, find_spec
from fedheal.data.on_disk import FOLDER_PREFIX, note_classes, open_dataset
from fedheal.methods.costs import COSTS
from fedheal.methods.uneven_controls import explain_uneven_controls
from fedheal.report import rows, tables
from fedheal.report.diagnose import diagnose_run, draw_diagnosis, explain_diagnosis, format_diagnosis
from fedheal.report.figures import save_figure
from fedheal.report.html_page import Section, render_page
from fedheal.report.last_rounds import list_round_notes
from fedheal.report.text_report import format_blocks, format_data_notes, format_report
from fedheal.runs import folder as records
from fedheal.runs.schema import RoundRecord
from fedheal.simulate.build import make_data_request
from fedheal.simulate.callbacks import Callback
from fedheal.simulate.experiment import Experiment, format_value

PROSE_WIDTH = 30  # columns more than the longest words, for a table of prose to be readable


def find_width() -> int | None:
    """Return the columns of the terminal, or of COLUMNS if that is set; None if the output goes elsewhere."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None if a parent process has closed it
    return shutil.get_terminal_size().columns if is_terminal or "COLUMNS" in os.environ else None


def make_console() -> Console:
    """Return a console for tables: 200 columns if not on a terminal. Markup is off, since a domain may be called [old]."""
    return Console(width=find_width() or 200, markup=False)


def print_table(head: Sequence[str], body: Iterable[Sequence[str]], title: str = "", prose: bool = False) -> None:
    """Print a table of numbers or of prose; on a terminal that is too narrow, a block of lines for each row instead."""
    console, lines = make_console(), list(body)
    table = Table()
    for i, word in enumerate(head):
        table.add_column(word, justify="right" if i and not prose else "left")
    for line in lines:
        table.add_row(*line)
    if title:
        typer.echo(title)
    width = Measurement.get(console, console.options.update(max_width=10_000), table)  # minimum: with one word a line
    if width.maximum > console.width and not prose:  # rich would cut words of the widest columns
        for column, cells in zip(table.columns, zip(head, *lines, strict=True), strict=True):
            column.width = max(cell_len(word) for cell in cells for word in [*cell.split(), ""])
    if width.minimum + (PROSE_WIDTH if prose else 0) <= console.width:
        console.print(table)
    else:
        typer.echo(format_blocks(head, lines, console.width, prose))


def show_run(summary: Mapping[str, Any], folder: Path) -> None:
    """Print one run: its numbers, what they mean, notes on the data, and the folder."""
    summary = rows.rename_domains(dict(summary))
    show_comparison([summary])
    about = f"Accuracy in percent, {tables.describe_averaging(frozenset({int(summary['averaged'])}))}."
    noted = {**summary, "round_notes": list_round_notes(folder, summary)}
    typer.echo("\n".join([about, *format_data_notes([noted]), str(folder)]))


def show_comparison(summaries: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of methods against domains, AVG, STD and worst; of several methods, the best of each column is marked."""
    domains = list(summaries[0]["domains"])
    values = [[s["domains"][d] for d in domains] + [s["avg"], s["std"], s["worst"]] for s in summaries]
    best = [min(column) if i == len(domains) + 1 else max(column) for i, column in enumerate(zip(*values, strict=True))]
    marks = [["*" if len(values) > 1 and x == b else "" for x, b in zip(row, best, strict=True)] for row in values]
    body = [[f"{x:.1f}{mark}" for x, mark in zip(*pair, strict=True)] for pair in zip(values, marks, strict=True)]
    names = [summary["method"] for summary in summaries]
    print_table(["method", *domains, *rows.FAIRNESS_COLUMNS], [[n, *row] for n, row in zip(names, body, strict=True)])
    if len(values) > 1:
        typer.echo(tables.LEGEND)


def show_search(
    search: sweep.Search,
    trials: Sequence[sweep.Trial],
    best: sweep.Trial,
    data: sweep.ValidationData | None = None,
) -> None:
    """Print what a search tried, how sure its scores are, what it chose, and the command that tests the choice."""
    columns = dict.fromkeys([search.metric, *rows.FAIRNESS_COLUMNS.values()])
    body = []
    for trial in trials:
        point = " ".join(f"{key}={value}" for key, value in trial.point.items())
        if trial.validation is None:
            body.append([point, *("" for _ in columns), "diverged"])
            continue
        cells = [tables.summarise_seeds(trial.validation[name]).format() for name in columns]
        body.append([point, *cells, "chosen" if trial is best else ""])
    number = len(search.seeds)
    spread = f"mean ± standard deviation over {number} seeds" if number > 1 else f"seed {search.seeds[0]}"
    print_table(["point", *columns, ""], body, f"Accuracy on validation data in percent, {spread}")
    point = " ".join(f"{key}={value}" for key, value in best.point.items())
    typer.echo(f"Chosen by {search.metric} on validation data: {point}. The test set had no part in the choice.")
    if data is not None:
        sizes = ", ".join(f"{domain} {size:,}" for domain, size in data.sizes.items())
        points = 100 / min(data.sizes.values())
        typer.echo(f"Validation examples per domain: {sizes}. One example is up to {points:.2g} points of accuracy.")
        if all(data.is_chance(trial) for trial in trials):
            typer.echo(
                f"No point is more than two standard errors above chance (always predicting one class: AVG {data.chance:.1f}), "
                "so the choice means nothing: train for more rounds, or search other values."
            )
    equals = sweep.count_equals(trials, best, search.metric)
    if equals and number > 1:
        others = f"{format_count(equals, 'other point')} {'is' if equals == 1 else 'are'}"
        typer.echo(f"{others} within one standard error of it: these seeds do not tell them apart.")
    elif equals:
        typer.echo(f"{equals + 1} points are equally good: this is the first of them, and no better than the others.")
    if number == 1:
        typer.echo("One seed shows no spread: a small lead may be chance. Use --seeds 3 or more to see it.")
    typer.echo(f"The runs are in {search.out}. Test the choice on seeds that had no part in it:")
    typer.echo(f"  {search.format_next_command(best)}")


def print_note(note: str, console: Console) -> None:
    """Print a sentence about what is about to run."""
    console.print(f"Note: {note}.", highlight=False, markup=False, soft_wrap=True)


def print_notes(experiments: Iterable[Experiment], console: Console) -> None:
    """Name what may be overlooked before clients train: missing classes, and weights that controls do not have."""
    experiments = list(experiments)
    _print_class_notes(experiments, console)
    for name, method in {e.method_name: e.resolved_method for e in experiments}.items():
        if problem := explain_uneven_controls(method):
            print_note(f"{name}: {problem}; fair_controls=p applies them to both", console)


def _print_class_notes(experiments: Iterable[Experiment], console: Console) -> None:
    """Name the classes of image folders that not every domain has."""
    requests = dict.fromkeys((e.data, make_data_request(e)) for e in experiments)
    for name, request in requests:
        if name in SPECS or name.startswith(FOLDER_PREFIX):
            note = note_classes(open_dataset(*find_spec(name, request)))
            if note:
                print_note(note, console)


class StartNote(Callback):
    """A note that there was nothing to resume, if a run starts with its first round."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console
        # Records without a checkpoint have a warning of their own.
        self.has_rounds = records.find_last_round(records.check_folder(folder)) > 0

    def started(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> None:
        if not done and not self.has_rounds:
            print_note(f"{self.folder} has no rounds to resume from, so the run starts with round 1", self.console)


def write_report(runs: Sequence[rows.Row], form: str, out: Path | None, reference: str | None) -> None:
    """Write a report of one of the formats to a file and print its path, or print the report."""
    if out is not None:
        records.make_folder(out.parent)
    if form == "parquet":
        assert out is not None
        tables.write_parquet(runs, out)
        typer.echo(out)
        return
    width = find_width() if out is None else None
    text = tables.format_csv(runs) if form == "csv" else format_report(runs, form, reference, width)
    if out is None:
        typer.echo(text)
    else:
        records.write_text(out, text + "\n")
        typer.echo(out)


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
    print_table(head, body)
    typer.echo("\n".join(explain_diagnosis(result)))
    written = save_figure((figures or folders[0]) / f"diagnosis-{result.kind}", partial(draw_diagnosis, result))
    if written:
        typer.echo(str(written[-1]))


def show_parts() -> None:
    """Print the parts that methods are made of."""
    body = []
    kinds: dict[str, Mapping[str, Callable[..., Any]]] = {
        "local": method_table.LOCAL,
        "stage": STAGES,
        "whole": method_table.WHOLE,
        "server": method_table.SERVERS,
    }
    for kind, parts in kinds.items():
        for name, part in parts.items():
            keys = ", ".join(f"{key}={format_value(p.default)}" for key, p in get_parameters(part).items())
            about = (inspect.getdoc(part) or "").split("\n")[0]
            body.append([f"{name} ({kind})", about, keys, COSTS.get(name, "")])
    body += [[f"{bound} (bound)", about, "", ""] for bound, about in rows.BOUNDS.items()]
    own = "your own function that returns a Stage, a Term, a Server or an Aggregator"
    body.append(["package.module:function", own, "", ""])
    title = "<local>[:key=value,...]{+<stage>[:...]}[+<server>[:...]]"
    print_table(["part", "what it does", "parameters", "costs more than fedavg"], body, title, prose=True)


def show_parameters(name: str) -> None:
    """Print a method's parameters and the source of each default."""
    if name in rows.BOUNDS:
        typer.echo(f"{name} is a bound for comparisons, not a method, and has no parameters: {rows.BOUNDS[name]}.")
        return
    method, body = method_table.get(name), []
    for part in method.parts:
        for key, parameter in part.parameters.items():
            value, cell = part.values[key], format_value(parameter.default)
            cell += "" if value == parameter.default else f" (here {format_value(value)})"
            body.append([key, part.name, cell, parameter.description, parameter.source])
    head = ["parameter", "part", "default", "what it is", "source of the default"]
    print_table(head, body or [["no parameters", name, "", "", ""]], method.name, prose=True)
    for part in method.parts:
        if COSTS.get(part.name):
            typer.echo(f"{part.name} costs more than fedavg: {COSTS[part.name]}.")


class LiveTable:
    """A live table of runs on a terminal; elsewhere one line for each finished run.

    A search shows its runs' accuracy on validation data, and nothing of the test set.
    """

    def __init__(self, console: Console, jobs: Sequence[Job], is_search: bool = False) -> None:
        self.console, self.jobs, self.is_search = console, jobs, is_search
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
            if not job.has_result:
                self.console.print(f"{job.folder.name}: diverged", highlight=False, markup=False, soft_wrap=True)
                return
            result = rows.load_summary(job.folder, ("avg", "std", "worst", "seconds"))
            shown = (result["validation"] or {}) if self.is_search else result
            numbers = " ".join(
                f"{word} {shown[key]:.2f}" for word, key in rows.FAIRNESS_COLUMNS.items() if key in shown
            )
            seconds = sum(result["seconds"].values())
            line = f"{job.folder.name}: {'validation ' if self.is_search else ''}{numbers} ({seconds:.0f} s)"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def make_table(self) -> Table:
        """Return the rounds done by each run, and the numbers of its last evaluation."""
        table = Table("run", "rounds", *rows.FAIRNESS_COLUMNS, title="validation data" if self.is_search else None)
        for job in self.jobs:
            done = records.read_rounds(job.folder)
            accuracies = [record.validation if self.is_search else record.domains for record in done]
            last = next((fairness(domains) for domains in reversed(accuracies) if domains), None)
            numbers = [f"{last[key]:.1f}" if last else "" for key in rows.FAIRNESS_COLUMNS.values()]
            table.add_row(Text(job.folder.name), f"{len(done)}/{job.experiment.rounds}", *numbers)
        return table
