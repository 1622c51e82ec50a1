"""The command line. Bad input gets one sentence and exit code 2; nothing else here but saying and showing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import fedheal
from fedheal import records
from fedheal.execute import run as execute
from fedheal.experiment import Experiment
from fedheal.progress import Progress

app = typer.Typer(
    name="fedheal",
    help="Fair federated learning under domain skew: FedHEAL and the methods it is compared with.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

DEMO = ("fedavg", "fedavg+uniform", "fedheal", "fedheal:variant=released")
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]


def main() -> None:
    """The entry point: errors that a user can mend become a sentence."""
    with _sentences():
        app()


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"fedheal {fedheal.__version__}")
        raise typer.Exit


@app.command()
def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE.toml] [key=value ...]", help="A description and what differs from it."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; runs/<name> if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run one experiment into runs/<name>/.

    Fields: method, data, model, rounds, seed, epochs, lr, batch_size, participation, dropout, ... (all of them stand in
    the experiment.toml of a run); the method's own parameters, such as tau and beta, are given the same way.

    Example: fedheal run method=fedheal tau=0.4 rounds=10 seed=1
    """
    files = [word for word in words or [] if "=" not in word]
    if len(files) > 1:
        raise ValueError(f"one description at most can be run, but there are {len(files)}: {', '.join(files)}")
    experiment = Experiment.read(files[0] if files else None, [word for word in words or [] if "=" in word])
    folder = out or Path("runs") / experiment.folder_name
    silent = quiet or as_json
    with Progress(Console(quiet=silent)) as progress:
        result = execute(experiment, folder, resume, [progress], progress=False)
    if as_json:
        typer.echo(json.dumps(dict(result.summary), indent=2))
    elif not quiet:
        _show([result.summary])
        typer.echo(f"{folder}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="The seed of all four runs.")] = 0,
    rounds: Annotated[int | None, typer.Option(help="Fewer rounds than the data's protocol, for a first look.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0 is one a core.")] = 0,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """FedAvg, FedAvg with uniform weights, and FedHEAL as in the paper and as released, on the embedded digits.

    A run that is finished is not run again; one that was stopped goes on.
    """
    if rounds is not None and rounds < 1:
        raise ValueError(f"rounds = {rounds}: use 1 or more")
    extra = {} if rounds is None else {"rounds": rounds}
    experiments = [Experiment.of({"method": method, "data": "embedded", "seed": seed} | extra) for method in DEMO]
    folders = [out / experiment.folder_name for experiment in experiments]
    out.mkdir(parents=True, exist_ok=True)
    summaries: dict[int, Mapping[str, Any]] = {}
    workers = min(jobs if jobs > 0 else os.cpu_count() or 1, len(experiments))
    console = Console(quiet=quiet or as_json)
    console.print(f"Four methods on ten digits in four domains, seed {seed}, {workers} at a time:", highlight=False)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        started = {pool.submit(_one, e, f): i for i, (e, f) in enumerate(zip(experiments, folders, strict=True))}
        with console.status("training ..."):
            for done in as_completed(started):
                summary = summaries[started[done]] = done.result()
                console.print(f"  {summary['method']}: {sum(summary['seconds'].values()):.0f} s", highlight=False)
    ordered = [summaries[i] for i in range(len(experiments))]
    if as_json:
        typer.echo(json.dumps(ordered, indent=2))
    elif not quiet:
        _show(ordered)
        typer.echo(
            "Accuracy in percent, mean of the last five rounds. One seed: differences of a point or two are noise.\n"
            f"The runs are in {out}/; try: fedheal run method=fedheal seed=1"
        )


def _one(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """A whole run in a process of its own."""
    return dict(execute(experiment, folder, resume=True, progress=False).summary)


def _show(summaries: Sequence[Mapping[str, Any]]) -> None:
    # Where nobody looks at a terminal there is no width to keep to.
    Console(width=None if sys.stdout.isatty() else 200).print(_table(summaries))


def _table(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """Methods against domains, AVG, STD and worst; the best of each column stands out."""
    columns = list(summaries[0]["domains"])
    table = Table()
    table.add_column("method", no_wrap=True)
    for name in (*columns, "AVG", "STD", "worst"):
        table.add_column(name, justify="right")
    rows = [[s["domains"][c] for c in columns] + [s["avg"], s["std"], s["worst"]] for s in summaries]
    best = [min(column) if i == len(columns) + 1 else max(column) for i, column in enumerate(zip(*rows, strict=True))]
    for summary, row in zip(summaries, rows, strict=True):
        cells = [
            f"[bold]{x:.1f}[/]" if len(rows) > 1 and x == b else f"{x:.1f}" for x, b in zip(row, best, strict=True)
        ]
        table.add_row(summary["method"], *cells)
    return table


@contextmanager
def _sentences() -> Iterator[None]:
    try:
        yield
    except (ValueError, records.BadState) as error:
        typer.echo(f"fedheal: {error}", err=True)
    except OSError as error:
        typer.echo(f"fedheal: {error.strerror or error}{f' ({error.filename})' if error.filename else ''}", err=True)
    except KeyboardInterrupt:
        typer.echo("fedheal: stopped; --resume goes on from the last saved state", err=True)
        sys.exit(130)
    else:
        return
    sys.exit(2)
