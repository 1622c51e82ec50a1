"""The command line. Bad input gets one sentence and exit code 2; nothing else here but saying and showing."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import click
import torch
import typer
from rich.console import Console

import fedheal
from fedheal import methods as method_table
from fedheal.campaign import sweep
from fedheal.campaign.compare import plan, seeds_of
from fedheal.campaign.pool import Job, at_a_time, run_all
from fedheal.cli import display as show
from fedheal.cli.data import data_app
from fedheal.cli.live_table import Board
from fedheal.report import conclusions, rows, tables
from fedheal.report import figures as drawing
from fedheal.report.comparability import list_cautions
from fedheal.reproduce import RECIPES, Options, make_suffix, plan_recipe
from fedheal.reproduce.outputs import write_outputs
from fedheal.runs import folder as records
from fedheal.runs.schema import FREE
from fedheal.simulate.experiment import Experiment, parse_overrides
from fedheal.simulate.interrupts import stop_on_terminate
from fedheal.simulate.progress import Progress
from fedheal.simulate.runner import run as execute

app = typer.Typer(
    name="fedheal",
    help="Fair federated learning under domain skew: FedHEAL and the methods it is compared with.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")

INTERRUPTED = 130
DEMO = ("fedavg", "fedavg+uniform", "fedheal", "fedheal:variant=released")
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
Jobs = Annotated[int, typer.Option(help="Runs at a time; 0: one a core, or as many as the GPUs take.")]
Seeds = Annotated[str, typer.Option(help="How many (5), a range (3-7) or a list (1,4).")]
Track = Annotated[str | None, typer.Option(help="Also log to tensorboard, mlflow[:URI] or wandb.")]
Ray = Annotated[
    str | None, typer.Option(help="Run on the Ray cluster at this address instead ('auto', 'local', HOST:PORT).")
]


def main() -> None:
    """The entry point: errors that a user can mend become a sentence."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a user's own models and data are found where the command is given
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± is no reason to fail
    stop_on_terminate()
    with _sentences():
        try:
            code = app(standalone_mode=False)
        except click.exceptions.Abort:
            raise KeyboardInterrupt from None
        except click.exceptions.ClickException as error:
            error.show()
            sys.exit(2)
        if code == INTERRUPTED:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)


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
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was stopped; --resume --out FOLDER is enough.")
    ] = False,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run one experiment into runs/<name>/.

    Fields: method, data, model, rounds, seed, epochs, lr, batch_size, participation, dropout, ... (docs/reference.md has all
    of them); the method's own parameters, such as tau and beta, are given the same way: fedheal methods NAME lists them.

    Example: fedheal run method=fedheal tau=0.4 rounds=10 seed=1
    """
    given = words or []
    files = [word for word in given if _is_file(word)]
    if len(files) > 1:
        raise ValueError(f"one description at most can be run, but there are {len(files)}: {', '.join(files)}")
    changes = [word for word in given if word not in files]
    if resume and out is not None and not files and parse_overrides(changes).keys() <= FREE:
        files = [str(_described(out))]
    experiment = Experiment.read(files[0] if files else None, changes)
    folder = out or Path("runs") / experiment.folder_name
    watchers = [Progress(Console(quiet=quiet or as_json)), *_trackers(track, folder)]
    result = execute(experiment, folder, resume, watchers, progress=False)
    if as_json:
        typer.echo(json.dumps(dict(result.summary), indent=2))
    elif not quiet:
        show.ran(result.summary, folder)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="The seed of all four runs.")] = 0,
    rounds: Annotated[
        int | None,
        typer.Option(help="Fewer rounds than the data's protocol, for a first look; with an --out of its own."),
    ] = None,
    jobs: Jobs = 0,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """FedAvg, FedAvg with uniform weights, and FedHEAL as in the paper and as released, on the embedded digits.

    A run that is finished is not run again; one that was stopped goes on.
    """
    planned = plan(DEMO, [seed], {} if rounds is None else {"rounds": rounds}, records.check_folder(out))
    console = Console(quiet=quiet or as_json)
    how = at_a_time(planned, _processes(jobs))
    console.print(f"Four methods on ten digits in four domains, seed {seed}, {how}:", highlight=False)
    _run(planned, console, jobs)
    summaries = [rows.load_summary(job.folder) for job in planned]
    found = rows.build_rows(summaries)
    written = show.write_page(found, out / "report.html", "FedHEAL on four domains of digits")
    if as_json:
        typer.echo(json.dumps(summaries, indent=2))
    elif not quiet:
        show.compared(summaries)
        about = tables.build_tables(found)[0].about
        typer.echo(
            f"{about[0].upper()}{about[1:]}. One seed: differences of a point or two are noise.\n"
            f"Figures, and everything else: {written} (open it in a browser).\n"
            f"The runs are in {out}/; try: {_command()} compare fedavg fedavg+uniform fedheal --seeds 5"
        )


@app.command()
def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD... [key=value ...]", help="Methods or bounds, and what differs from the protocol."
        ),
    ],
    data: Annotated[str, typer.Option(help="The data set.")] = "embedded",
    seeds: Seeds = "5",
    out: Annotated[Path | None, typer.Option(help="Where the runs go; runs/compare-<data>... if not given.")] = None,
    jobs: Jobs = 0,
    ray: Ray = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Methods x seeds into one folder, paired, then a table and what may be concluded from it.

    Finished runs are not run again and stopped ones go on, so the same command may be repeated. A word with = and no earlier
    : is an override. Bounds may stand beside methods: standalone, centralised, leave-one-domain-out.

    Example: fedheal compare fedavg fedavg+uniform fedheal --seeds 5 rounds=10
    """
    overrides = [word for word in words if _is_override(word)]
    values = parse_overrides(overrides)
    if "data" in values:
        raise ValueError(f"the data set is given by --data: use --data {values['data']}")
    named = [word for word in words if not _is_override(word)]
    named_after = [
        "compare",
        data.replace(":", ".").replace("/", "_"),
        *(o.replace("/", "_") for o in sorted(overrides)),
    ]
    folder = out or Path("runs") / "-".join(named_after)
    planned = plan(named, seeds_of(seeds), values | {"data": data}, records.check_folder(folder), track)
    console = Console(quiet=quiet or as_json)
    how = at_a_time(planned, _processes(jobs), ray)
    console.print(
        f"{len(planned)} {'run' if len(planned) == 1 else 'runs'} into {folder}, {how}:",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    _run(planned, console, jobs, ray)
    found = rows.build_rows(rows.load_summary(job.folder) for job in planned)
    if as_json:
        said = [
            sentence
            for own in rows.group_by_data(found).values()
            for sentence in list_cautions(own) + conclusions.conclude(own)
        ]
        typer.echo(json.dumps({"rows": tables.flatten_rows(found), "conclusions": said}, indent=2))
    elif not quiet:
        typer.echo(show.reported(found, "text"))


@app.command(name="sweep")
def sweep_command(
    words: Annotated[
        list[str],
        typer.Argument(metavar="key=values ...", help="Several values: 0:0.9:0.1 or 0,0.4,1. One value: fixed."),
    ],
    seeds: Seeds = "1",
    metric: Annotated[str, typer.Option(help=f"What to choose by: {', '.join(sweep.METRICS)}.")] = "avg",
    search: Annotated[str, typer.Option(help="grid, random or optuna.")] = "grid",
    trials: Annotated[int, typer.Option(help="How many points random and optuna try.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Where the runs go; runs/sweep-... if not given.")] = None,
    jobs: Jobs = 0,
    ray: Ray = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Search over any fields, judged on examples held out of the clients' training data (validation=0.2).

    The test set is shown beside, for information; it has no part in the choice. What has commas itself is one value, as for a
    run: only=plain,noisy, clients_per_domain=plain=5,noisy=3, and a method with parameters.

    Example: fedheal sweep method=fedheal tau=0:0.9:0.1 beta=0,0.4,1 rounds=10
    """
    space, fixed = sweep.space_of(words)
    folder = out or Path("runs") / "-".join(
        ["sweep", *(word.replace("/", "_").replace(":", "..") for word in sorted(words))]
    )
    wanted = sweep.Search(space, fixed, seeds_of(seeds), records.check_folder(folder), metric)
    console = Console(quiet=quiet or as_json)

    def runner(planned: Sequence[Job]) -> None:
        _run(planned, console, jobs, ray)

    if search == "grid":
        found = sweep.grid(wanted, runner)
    elif search in ("random", "optuna"):
        found = list((sweep.randomly if search == "random" else sweep.by_optuna)(wanted, runner, trials))
    else:
        raise ValueError(f"search = {search}: use grid, random or optuna")
    chosen = sweep.best(found, metric)
    described = {
        "metric": metric,
        "judged_on": "validation data held out of the clients' training data",
        "chosen": chosen.point,
        "trials": [{"point": t.point, "validation": t.validation, "test": t.test} for t in found],
    }
    records.write_text(folder / "sweep.json", json.dumps(described, indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(described, indent=2))
    elif not quiet:
        show.searched(wanted, found, chosen)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of them.")],
    form: Annotated[str, typer.Option("--format", "-f", help="text, markdown, latex, csv or parquet.")] = "text",
    out: Annotated[Path | None, typer.Option(help="A file to write to instead of the screen.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="The method the others are compared with; FedAvg or the first if not given.")
    ] = None,
    html: Annotated[
        bool,
        typer.Option("--html", help="One page with tables and figures: --out, or report.html in the first folder."),
    ] = False,
    figures: Annotated[
        Path | None, typer.Option(help="A folder for the figures as SVG, PDF and PNG, fit for a paper.")
    ] = None,
    diagnose: Annotated[
        bool,
        typer.Option("--diagnose", help="Who is under-served in one run, since when, its weight and what was kept."),
    ] = False,
    by: Annotated[str | None, typer.Option(help="With --diagnose: domain or client.")] = None,
) -> None:
    """Tables of finished runs: mean and spread over seeds, the best of each column marked, and what may be concluded.

    Example: fedheal report runs/compare-embedded --html
    """
    _refuse_idle(form, out, reference, html, figures, diagnose)
    if figures is not None:
        records.check_folder(figures)  # before a page is written beside them
    if diagnose:
        show.diagnosed(runs, by, figures)
        return
    if by is not None:
        raise ValueError(f"by = {by}: it says whom --diagnose looks at; give both")
    found = sorted(rows.build_rows(rows.find_results(runs)), key=lambda row: (row.method, row.seed))
    if not found:
        raise ValueError(f"there is no finished run in {', '.join(map(str, runs))}")
    reference = _canonical(reference)
    if html or figures is not None:
        if html:
            typer.echo(show.write_page(found, out or _folder(runs[0]) / "report.html", reference=reference))
        if figures is not None:
            written = drawing.write_figures(found, figures, reference)
            typer.echo(f"{len(written)} files in {figures}")
        return
    if form == "parquet":
        if out is None:
            raise ValueError("Parquet is not for the screen: name a file with --out")
        records.make_folder(out.parent)
        tables.write_parquet(found, out)
        return
    if form == "csv":
        text = tables.format_csv(found)
    elif form in tables.FORMATS:
        text = show.reported(found, form, reference)
    else:
        raise ValueError(f"format = {form}: use one of {', '.join([*tables.FORMATS, 'csv', 'parquet'])}")
    if out is None:
        typer.echo(text)
    else:
        records.make_folder(out.parent)
        records.write_text(out, text + "\n")


def _refuse_idle(
    form: str, out: Path | None, reference: str | None, html: bool, figures: Path | None, diagnose: bool
) -> None:
    """Options of a report that would do nothing beside the others."""
    given = {"--html": html, "--format": form != "text", "--out": out is not None, "--reference": reference is not None}
    if diagnose and any(given.values()):
        idle = next(option for option, there in given.items() if there)
        raise ValueError(f"--diagnose makes a table and a picture of its own: leave out {idle}")
    if html and form != "text":
        raise ValueError(
            f"format = {form}: the page of --html has its tables to copy in all formats; leave one of them out"
        )
    if figures is not None and form != "text":
        raise ValueError(f"format = {form}: --figures writes no tables, but SVG, PDF and PNG; leave one of them out")
    if figures is not None and out is not None and not html:
        raise ValueError(f"out = {out}: --figures names the folder itself; leave out --out")
    if reference is not None and form in ("csv", "parquet"):
        raise ValueError(
            f"reference = {reference}: {form} has the numbers of every run and compares none; leave it out"
        )


@app.command()
def reproduce(
    result: Annotated[str, typer.Argument(metavar="RESULT", help=f"One of {', '.join(RECIPES)}.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value ...]", help="What differs from the paper's protocol.")
    ] = None,
    seeds: Seeds = "1",
    rows_: Annotated[
        str, typer.Option("--rows", help="Only these rows: names or patterns, such as 'fedavg*,moon+fedheal'.")
    ] = "",
    data: Annotated[str, typer.Option(help="Only these data sets: digits, office-caltech, or any other.")] = "",
    rounds: Annotated[int | None, typer.Option(help="Fewer rounds than the protocol.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = None,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke",
            help="A few rounds, on the embedded data unless --data names others: minutes on a CPU, numbers without meaning.",
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="Where the runs and the results go.")] = Path("runs/reproduce"),
    jobs: Jobs = 0,
    ray: Ray = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """A result of the paper beside ours: headline, table1, table2, ablation, beta, tau, consistency or convergence.

    Finished runs are not run again (results share them) and stopped ones go on, so the same command may be repeated.

    Example: fedheal reproduce table1 --smoke
    """
    if result not in RECIPES:
        raise ValueError(f"there is no result '{result}'; choose one of {', '.join(RECIPES)}")
    said = {"rounds": rounds, "device": device}
    values = parse_overrides(
        [*(f"{k}={v}" for k, v in said.items() if v is not None), *(words or [])]
    )  # in either form, once
    options = Options(seeds_of(seeds), _listed(rows_), _listed(data), values, smoke)
    parts = plan_recipe(RECIPES[result], options, records.check_folder(out))
    wanted = list({job.folder: job for part in parts for job in part.jobs}.values())
    how = at_a_time(wanted, _processes(jobs), ray)
    console = Console(quiet=quiet or as_json)
    console.print(f"{len(wanted)} runs into {out}, {how}:", highlight=False, markup=False, soft_wrap=True)
    _run(wanted, console, jobs, ray)
    made = write_outputs(result, RECIPES[result], parts, out / f"{result}{make_suffix(options)}")
    title = f"{RECIPES[result].title}{' (a smoke run)' if smoke else ''}"
    written = show.write_page(made.rows, out / f"{result}{make_suffix(options)}.html", title, sections=made.sections)
    if as_json:
        typer.echo(json.dumps(made.records, indent=2))
    elif not quiet:
        typer.echo("\n\n".join(made.texts))
        typer.echo("\n".join(["", *map(str, made.files), written]))


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


@app.command()
def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method: its parameters, and the source of each default.")
    ] = None,
) -> None:
    """The methods there are, and the parameters of their parts.

    Example: fedheal methods fedprox+fedheal
    """
    if name is not None:
        show.wide().print(show.explained(name))
        return
    show.wide().print(show.parts())
    typer.echo("fedheal methods NAME says what the parameters mean and where their defaults come from.")


def _canonical(method: str | None) -> str | None:
    """A method as runs name it: `fedheal` is `fedavg+fedheal`; what is no method is left for the report to refuse."""
    try:
        return None if method is None else method_table.get(method).name
    except ValueError:
        return method


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _run(planned: Sequence[Job], console: Console, jobs: int, ray: str | None = None) -> None:
    with Board(console, planned) as board:
        for job in run_all(planned, _processes(jobs), ray):
            board.ended(job)


def _processes(jobs: int) -> int:
    if jobs < 0:
        raise ValueError(f"jobs = {jobs}: use 0 for as many as this machine takes, or a number of runs at a time")
    return jobs


def _described(folder: Path) -> Path:
    """The description that a run left in its folder."""
    path = folder / "experiment.toml"
    if not path.exists():
        raise ValueError(f"{folder} holds no run to go on with: there is no experiment.toml")
    return path


def _trackers(track: str | None, folder: Path) -> list[fedheal.Callback]:
    if track is None:
        return []
    from fedheal.tracking.base import tracker  # only those who track need its libraries

    return [tracker(track, folder)]


def _command() -> str:
    """How this program is called in the user's shell, which may not know of its environment."""
    here = Path(sys.executable).with_name("fedheal")
    if shutil.which("fedheal") or not here.exists():
        return "fedheal"
    return str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else str(here)


def _is_file(word: str) -> bool:
    """`name=x.toml` says a name; `runs/compare-embedded-lr=0.1/fedavg/experiment.toml` is a file all the same."""
    key, equals, _ = word.partition("=")
    return not equals or (word.endswith(".toml") and not key.isidentifier())


def _is_override(word: str) -> bool:
    """A word with = and no earlier : is an override; `fedprox:mu=0.1` is a method."""
    before, equals, _ = word.partition("=")
    return bool(equals) and ":" not in before


@contextmanager
def _sentences() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        typer.echo(f"fedheal: {error}{where}", err=True)
    except OSError as error:
        typer.echo(f"fedheal: {error.strerror or error}{f' ({error.filename})' if error.filename else ''}", err=True)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". GPU")[0]
        helps = "fewer runs at a time (--jobs), a smaller batch_size or a smaller model will do"
        typer.echo(f"fedheal: a GPU has too little memory ({reason}); {helps}", err=True)
    except KeyboardInterrupt:
        typer.echo(
            "fedheal: stopped; the same command with --resume (for compare, sweep and reproduce, the same command) goes on",
            err=True,
        )
        sys.exit(INTERRUPTED)
    else:
        return
    sys.exit(2)
