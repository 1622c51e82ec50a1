"""The command line: parse options, call the library, show the result. Bad input gets one sentence and exit code 2.

Commands import what they need themselves, after simple checks: PyTorch takes seconds, and `fedheal --help` does without it.
"""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperGroup

from fedheal.cli.errors import INTERRUPTED, describe_usage_error, report_errors
from fedheal.cli.words import check_files, check_jobs_option, is_file, is_override
from fedheal.core.errors import format_count
from fedheal.simulate.interrupts import stop_on_terminate
from fedheal.version import __version__

if TYPE_CHECKING:
    from fedheal.campaign.jobs import Job
    from fedheal.simulate.experiment import Experiment


class DataGroup(TyperGroup):
    """`fedheal data`: its module is imported when its commands are asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        del self.commands

    @functools.cached_property
    def commands(self) -> Any:  # type: ignore[override]
        from fedheal.cli.data import data_app

        return typer.main.get_group(data_app).commands


app = typer.Typer(
    name="fedheal",
    help="Fair federated learning under domain skew: FedHEAL and the methods it is compared with.",
    no_args_is_help=True,
    suggest_commands=False,  # click does
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)
DATA_HELP = "List, check, show, fetch, prepare and export data sets."
app.add_typer(typer.Typer(cls=DataGroup, help=DATA_HELP, no_args_is_help=True), name="data")

DEMO_METHODS = ("fedavg", "fedavg+uniform", "fedheal", "fedheal:variant=released")
REPORT_FORMATS = ("text", "markdown", "latex", "csv", "parquet")
REPORT_SUFFIXES = {".md": "markdown", ".tex": "latex", ".csv": "csv", ".parquet": "parquet"}
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
JOBS_HELP = "Runs at a time; 0: one per core, or as many as the GPUs take."
Jobs = Annotated[int, typer.Option(help=JOBS_HELP, callback=check_jobs_option)]
SEEDS_HELP = "A number of seeds (5), a range (3-7) or a list (1,4,8-12)."
VARY_HELP = "Instead of --seeds, those of split, init and batch, crossed for variance components: split=10,init=3."
Seeds = Annotated[str, typer.Option(help=SEEDS_HELP)]
Track = Annotated[str | None, typer.Option(help="Also log to tensorboard, mlflow[:URI] or wandb.")]
Ray = Annotated[str | None, typer.Option(help="Run on a Ray cluster instead: auto, local or HOST:PORT.")]
OneRunOnRay = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Train the clients on a Ray cluster: auto, local or HOST:PORT.")
]
Workers = Annotated[int | None, typer.Option(help="Processes that train clients; the same as workers=N.")]
RunFolder = Annotated[Path | None, typer.Option(help="The run folder; default: runs/<name>.")]
RunsFolder = Annotated[Path | None, typer.Option(help="The folder of the runs; default: runs/<command>-...")]
RESUME_HELP = (
    "Resume the run in --out, or in runs/<name>; start it if it has no rounds yet. --resume --out FOLDER and --resume "
    "name=NAME are enough to find it."
)
Resume = Annotated[bool, typer.Option("--resume", help=RESUME_HELP)]
Fields = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value ...]", help="Fields that differ from the paper's settings.")
]
FigureFolder = Annotated[Path | None, typer.Option(help="A folder for figures as SVG, PDF and PNG, fit for a paper.")]
HTML_HELP = "One page with tables and figures: --out NAME.html, or report.html in the first folder."
DIAGNOSE_HELP = "Show which domains or clients of one run are under-served, since when, with which weight."
SEARCHES = ("grid", "random", "optuna")
RESULTS = "headline, table1, table2, ablation, beta, tau, consistency, convergence"
SMOKE_HELP = "A few rounds, on the embedded data unless --data names others: minutes on a CPU, to try the command."


def main() -> None:
    """Run the command line and exit."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for the user's own models, data and methods
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± must not fail
    stop_on_terminate()
    with report_errors():
        try:
            code = app(prog_name="fedheal", standalone_mode=False)
        except click.exceptions.Abort:
            raise KeyboardInterrupt from None
        except click.exceptions.NoArgsIsHelpError:  # which has printed it
            sys.exit(2)
        except click.exceptions.ClickException as error:
            raise ValueError(describe_usage_error(error)) from None
        if code == INTERRUPTED:  # typer's exit code for Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)


@app.callback(invoke_without_command=True)
def _show_version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"fedheal {__version__}")
        raise typer.Exit


@app.command(name="run")
def run_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE.toml] [key=value ...]", help="An experiment file, and fields that override it."),
    ] = None,
    out: RunFolder = None,
    resume: Resume = False,
    track: Track = None,
    ray: OneRunOnRay = None,
    workers: Workers = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run one experiment into runs/<name>/, where the name holds method, data, seed and every field that is not the default.

    Fields: method, data, model, rounds, seed, epochs, lr, batch_size, participation, dropout, ... (docs/reference.md has all
    of them). The method's own parameters, such as tau and beta, are set the same way; fedheal methods NAME lists them.
    evaluate=unseen makes one run for each domain, which leaves it out of training, and shows the accuracy there.

    Example: fedheal run method=fedheal tau=0.4 rounds=10 seed=1
    """
    files = [word for word in words or () if is_file(word)]
    check_files(files, words or [])
    from rich.console import Console

    from fedheal.cli import display
    from fedheal.simulate.callbacks import Callback
    from fedheal.simulate.progress import Progress
    from fedheal.simulate.runner import run

    overrides = [word for word in words or () if word not in files]
    overrides += [f"{key}={value}" for key, value in (("ray_address", ray), ("workers", workers)) if value is not None]
    experiment, folder = _find_experiment(files, overrides, out, resume, on_ray=ray is not None)
    if experiment.evaluate == "unseen" and not experiment.without:
        _run_unseen(experiment, folder, track, quiet, as_json)
        return
    console = Console(quiet=quiet or as_json)
    callbacks: list[Callback] = [Progress(console)]
    if resume:
        callbacks.insert(0, display.StartNote(folder, console))
    if track is not None:
        from fedheal.tracking import tracker  # imported late: its libraries are optional

        callbacks.append(tracker(track, folder))
    display.print_class_notes([experiment], console)
    result = run(experiment, folder, resume, callbacks, progress=False)
    if as_json:
        typer.echo(json.dumps(dict(result.summary), indent=2))
    elif not quiet:
        display.show_run(result.summary, folder)


def _find_experiment(
    files: list[str], overrides: list[str], out: Path | None, resume: bool, on_ray: bool
) -> tuple[Experiment, Path]:
    """Return an experiment and its folder. To resume without fields that describe one, it is that of the folder."""
    from fedheal.runs.folder import check_folder
    from fedheal.runs.schema import FREE
    from fedheal.simulate.experiment import Experiment, parse_overrides
    from fedheal.simulate.runner import check_folder_owner

    is_described = bool(files) or not parse_overrides(overrides).keys() <= FREE
    if on_ray and "engine=ray" not in overrides:
        overrides = [*overrides, "engine=ray"]
    if resume and not is_described:
        out = out or Path("runs") / Experiment.read(None, overrides).run_name
        files = [str(out / "experiment.toml")]
        if not (check_folder(out) / "experiment.toml").exists():
            raise ValueError(
                f"{out} holds no run to resume: there is no experiment.toml; name another folder with --out, or leave out "
                "--resume to start one"
            )
    experiment = Experiment.read(files[0] if files else None, overrides)
    folder = out or Path("runs") / experiment.run_name
    if resume and is_described:
        alone = f"use --resume --out {folder} alone to resume what is there, or name another folder"
        check_folder_owner(folder, experiment, f"fields given with --resume describe the whole experiment; {alone}")
    return experiment, folder


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder of the runs.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="The seed of all four runs.")] = 0,
    rounds: Annotated[int | None, typer.Option(help="Fewer rounds, for a first look; use a separate --out.")] = None,
    jobs: Jobs = 0,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare FedAvg, FedAvg with uniform weights, and FedHEAL as in the paper and as released, on the embedded digits.

    Finished runs are not run again; stopped ones are resumed.
    """
    from fedheal.campaign.compare import plan
    from fedheal.cli import display
    from fedheal.report import rows, tables
    from fedheal.runs.folder import check_folder

    planned = plan(DEMO_METHODS, [seed], {} if rounds is None else {"rounds": rounds}, check_folder(out))
    _run_jobs(planned, quiet or as_json, f"Four methods on ten digits in four domains, seed {seed}", jobs)
    summaries = [rows.load_summary(job.folder) for job in planned]
    runs = rows.build_rows(summaries)
    page = display.write_page(runs, out / "report.html", "FedHEAL on four domains of digits")
    if as_json:
        typer.echo(json.dumps(summaries, indent=2))
    elif not quiet:
        display.show_comparison(summaries)
        about = tables.build_tables(runs)[0].about
        typer.echo(
            f"{about[0].upper()}{about[1:]}. One seed: differences of a point or two are noise.\n"
            f"Figures and all numbers: {page} (open it in a browser).\n"
            f"The runs are in {out}/; try: {_find_command()} compare fedavg fedavg+uniform fedheal"
        )


@app.command()
def compare(
    words: Annotated[
        list[str],
        typer.Argument(metavar="METHOD... [key=value ...]", help="Methods or bounds, and fields that all runs share."),
    ],
    data: Annotated[str, typer.Option(help="The data set.")] = "embedded",
    seeds: Annotated[str | None, typer.Option(help=SEEDS_HELP, show_default="8")] = None,
    vary: Annotated[str | None, typer.Option(help=VARY_HELP)] = None,
    out: RunsFolder = None,
    jobs: Jobs = 0,
    ray: Ray = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare methods over seeds, paired, and show a table and what may be concluded from it.

    Finished runs are not run again and stopped ones are resumed, so the command may be repeated. A word with = and no earlier :
    is a field. Bounds may be compared with methods: standalone, centralised, leave-one-domain-out. evaluate=unseen evaluates
    each domain with a model that was trained without it.

    Example: fedheal compare fedavg fedavg+uniform fedheal --seeds 8 rounds=10
    """
    from fedheal.campaign import compare as comparison
    from fedheal.cli import display
    from fedheal.report import conclusions, rows, tables
    from fedheal.report.comparability import list_cautions
    from fedheal.report.text_report import format_report
    from fedheal.report.variance_table import decompose_rows, flatten_components
    from fedheal.runs.folder import check_folder
    from fedheal.simulate.experiment import make_folder_name, parse_overrides

    overrides = [word for word in words if is_override(word)]
    values = parse_overrides(overrides)
    for option in ("data", "seeds", "vary", "jobs"):
        if option in values:
            raise ValueError(
                f"{option}={values[option]} is not a field of a comparison: use --{option} {values[option]}"
            )
    methods = [word for word in words if not is_override(word)]
    numbers = comparison.choose_seeds(seeds, vary)
    name = ["compare", data.replace(":", "."), *comparison.name_design(numbers), *sorted(overrides)]
    folder = check_folder(out or Path("runs") / make_folder_name("-".join(name)))
    planned = comparison.plan(methods, numbers, values | {"data": data}, folder, track)
    alone = f"{methods[0]} is the only method, so nothing is compared: name another to compare it with"
    note = alone if len(methods) == 1 else ""
    _run_jobs(planned, quiet or as_json, _count_runs(planned, folder), jobs, ray, note=note)
    runs = rows.build_rows(rows.load_summary(job.folder) for job in planned)
    rows.write_method_order(folder, runs)
    if as_json:
        groups = rows.group_by_data(runs).values()
        sentences = [text for group in groups for text in list_cautions(group) + conclusions.conclude(group)]
        components = flatten_components([line for group in groups for line in decompose_rows(group)])
        shown = {"rows": tables.flatten_rows(runs), "conclusions": sentences}
        typer.echo(json.dumps(shown | ({"components": components} if components else {}), indent=2))
    elif not quiet:
        typer.echo(format_report(runs, "text", width=display.find_width()))


@app.command(name="sweep")
def sweep_command(
    words: Annotated[
        list[str],
        typer.Argument(metavar="key=values ...", help="Fields to search: 0:0.9:0.1 or 0,0.4,1. One value is fixed."),
    ],
    seeds: Seeds = "1",
    metric: Annotated[str, typer.Option(help="The metric to choose by: avg, worst, std, gap or jain.")] = "avg",
    search: Annotated[str, typer.Option(help="grid, random or optuna.")] = "grid",
    trials: Annotated[int, typer.Option(help="How many points random and optuna try.")] = 20,
    out: RunsFolder = None,
    jobs: Jobs = 0,
    ray: Ray = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Search over any fields, and choose on examples held out of the clients' training data (validation=0.2).

    Results on the test set are not shown: the command that is printed last gives them for the choice, on other seeds. A value
    that contains commas itself is one value, as for a run: only=plain,noisy, clients_per_domain=plain=5,noisy=3, and a method
    with parameters.

    Example: fedheal sweep method=fedheal tau=0:0.9:0.1 beta=0,0.4,1 rounds=10
    """
    if search not in SEARCHES:
        raise ValueError(f"search = {search}: use {', '.join(SEARCHES)}")
    from rich.console import Console

    from fedheal.campaign import sweep
    from fedheal.campaign.compare import parse_seeds
    from fedheal.cli import display
    from fedheal.core.atomic_files import write_if_changed
    from fedheal.runs.folder import check_folder
    from fedheal.simulate.experiment import make_folder_name

    space, fixed = sweep.parse_space(words)
    name = ["sweep", *(word.replace(":", "..") for word in sorted(words))]
    folder = check_folder(out or Path("runs") / make_folder_name("-".join(name)))
    wanted = sweep.Search(space, fixed, parse_seeds(seeds), folder, metric)
    run_jobs = functools.partial(_run_jobs, quiet=quiet or as_json, title="", jobs=jobs, ray=ray, is_search=True)
    first = wanted.jobs(wanted.point(0))[0]
    if ray is None and not first.is_finished:
        display.print_class_notes([first.experiment], Console(quiet=quiet or as_json))
    found = list(sweep.SEARCHES[search](wanted, run_jobs, trials))
    best = sweep.choose_best(found, metric)
    summary = {
        "metric": metric,
        "judged_on": "validation data held out of the clients' training data",
        "chosen": best.point,
        "trials": [{"point": trial.point, "validation": trial.validation} for trial in found],
        "next_command": wanted.format_next_command(best),
    }
    write_if_changed(folder / "sweep.json", json.dumps(summary, indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    elif not quiet:
        # A cluster's data need not be on this machine.
        data = sweep.measure_validation(wanted.jobs(best.point)[0].experiment) if ray is None else None
        display.show_search(wanted, found, best, data)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or folders of them.")],
    form: Annotated[
        str | None,
        typer.Option("--format", "-f", help="text, markdown, latex, csv or parquet; default: by the name of --out."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A file to write to instead of the screen, such as NAME.csv; NAME.html gets the page."),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="The method the others are compared with; default: FedAvg or the first.")
    ] = None,
    html: Annotated[bool, typer.Option("--html", help=HTML_HELP)] = False,
    figures: FigureFolder = None,
    diagnose: Annotated[bool, typer.Option("--diagnose", help=DIAGNOSE_HELP)] = False,
    by: Annotated[str | None, typer.Option(help="With --diagnose: domain or client.")] = None,
) -> None:
    """Show tables of finished runs: mean and spread over seeds, the best of each column, and what may be concluded.

    Example: fedheal report runs/compare-embedded --html
    """
    html = html or _is_page(out)
    has_format, form = form is not None, form or _find_report_format(out, html)
    _check_report_options(form, has_format, out, reference, html, figures, diagnose)
    from fedheal import methods as method_table
    from fedheal.cli import display
    from fedheal.report import figures as drawing
    from fedheal.report import rows
    from fedheal.runs.folder import check_folder

    if figures is not None:
        check_folder(figures)  # before a page is written
    if diagnose:
        display.show_diagnosis(folders, by, figures)
        return
    if by is not None:
        raise ValueError(f"by = {by}: --by needs --diagnose; add --diagnose or leave out --by")
    runs = rows.find_rows(folders)
    if not runs:
        raise ValueError(f"there is no finished run in {', '.join(map(str, folders))}: {rows.NO_RUNS}")
    with suppress(ValueError):  # the report refuses unknown names
        reference = reference and method_table.get(reference).name
    if html:
        folder = folders[0] if folders[0].is_dir() else folders[0].parent
        typer.echo(display.write_page(runs, out or folder / "report.html", reference=reference))
    if figures is not None:
        typer.echo(f"{len(drawing.write_figures(runs, figures, reference))} files in {figures}")
    if not html and figures is None:
        display.write_report(runs, form, out, reference)


def _is_page(out: Path | None) -> bool:
    return out is not None and out.suffix.lower() in (".html", ".htm")


def _find_report_format(out: Path | None, html: bool) -> str:
    """Return the format that a file's name stands for. Raise ValueError if it stands for none."""
    suffix = "" if out is None or html else out.suffix.lower()
    if suffix in ("", ".txt"):
        return "text"
    if suffix not in REPORT_SUFFIXES:
        known = ", ".join((".txt", *REPORT_SUFFIXES))
        raise ValueError(f"out = {out}: no format has the ending {suffix}; use one of {known}, .html, or give --format")
    return REPORT_SUFFIXES[suffix]


def _check_report_options(
    form: str,
    has_format: bool,
    out: Path | None,
    reference: str | None,
    html: bool,
    figures: Path | None,
    diagnose: bool,
) -> None:
    """Raise ValueError if an option of a report would have no effect with the others."""
    if form not in REPORT_FORMATS:
        raise ValueError(f"format = {form}: use one of {', '.join(REPORT_FORMATS)}")
    used = {"--html": html, "--format": has_format, "--out": out is not None, "--reference": reference is not None}
    option = next((option for option, is_used in used.items() if is_used), None)
    has_figures = figures is not None
    no_comparisons = used["--reference"] and form in ("csv", "parquet")
    for is_wrong, problem in (
        (diagnose and option, f"--diagnose writes its own table and figure: leave out {option}"),
        (
            html and has_format,
            f"format = {form}: --html writes a page with tables in all formats; leave out --format",
        ),
        (
            has_figures and has_format,
            f"format = {form}: --figures writes SVG, PDF and PNG, not tables; leave out --format",
        ),
        (html and out and out.suffix and not _is_page(out), f"out = {out}: the name of a page ends in .html"),
        (has_figures and out and not html, f"out = {out}: --figures already names a folder; leave out --out"),
        (no_comparisons, f"reference = {reference}: {form} has no comparisons; leave out --reference"),
        (form == "parquet" and out is None, "Parquet cannot be printed: name a file with --out"),
    ):
        if is_wrong:
            raise ValueError(problem)


@app.command()
def reproduce(
    result: Annotated[str, typer.Argument(metavar="RESULT", help=f"One of {RESULTS}.")],
    words: Fields = None,
    seeds: Seeds = "1",
    row_names: Annotated[str, typer.Option("--rows", help="Only these rows, such as 'fedavg*,moon+fedheal'.")] = "",
    data: Annotated[str, typer.Option(help="Only these data sets: digits, office-caltech, or any other.")] = "",
    rounds: Annotated[int | None, typer.Option(help="Fewer rounds than the protocol.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help=SMOKE_HELP)] = False,
    out: Annotated[Path, typer.Option(help="The folder of the runs and the results.")] = Path("runs/reproduce"),
    jobs: Jobs = 0,
    ray: Ray = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Reproduce a table or figure of the paper, and show its numbers with ours.

    Finished runs are not run again (results share them) and stopped ones are resumed, so the command may be repeated.

    Example: fedheal reproduce table1 --smoke
    """
    if result not in RESULTS.split(", "):
        raise ValueError(f"there is no result '{result}': choose one of {RESULTS}")
    from fedheal.campaign.compare import parse_seeds
    from fedheal.cli import display
    from fedheal.reproduce import RECIPES, Options, make_suffix, plan_recipe
    from fedheal.reproduce.outputs import write_outputs
    from fedheal.runs.folder import check_folder
    from fedheal.simulate.experiment import parse_overrides

    options_as_words = [f"{k}={v}" for k, v in {"rounds": rounds, "device": device}.items() if v is not None]
    values = parse_overrides([*options_as_words, *(words or [])])  # which refuses a field that is set in both forms
    row_list, data_list = ([w.strip() for w in text.split(",") if w.strip()] for text in (row_names, data))
    options = Options(parse_seeds(seeds), row_list, data_list, values, smoke)
    parts = plan_recipe(RECIPES[result], options, check_folder(out))
    planned = list({job.folder: job for part in parts for job in part.jobs}.values())
    _run_jobs(planned, quiet or as_json, _count_runs(planned, out), jobs, ray)
    made = write_outputs(result, RECIPES[result], parts, out / f"{result}{make_suffix(options)}")
    title = f"{RECIPES[result].title}{' (a smoke run)' if smoke else ''}"
    page = display.write_page(made.rows, out / f"{result}{make_suffix(options)}.html", title, sections=made.sections)
    if as_json:
        typer.echo(json.dumps(made.records, indent=2))
    elif not quiet:
        typer.echo("\n\n".join(made.texts))
        typer.echo("\n".join(["", *map(str, made.files), page]))


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="A method, to show its parameters and their defaults.")] = None,
) -> None:
    """List the parts that methods are made of, or the parameters of one method.

    Example: fedheal methods fedprox+fedheal
    """
    from fedheal.cli import display

    if name is not None:
        display.show_parameters(name)
        return
    display.show_parts()
    typer.echo("fedheal methods NAME explains the parameters and where their defaults come from.")


def _run_unseen(experiment: Experiment, folder: Path, track: str | None, quiet: bool, as_json: bool) -> None:
    """Run an experiment once without each domain, into folders of this one, and show the accuracy on unseen domains."""
    from fedheal.campaign.compare import expand_unseen
    from fedheal.campaign.jobs import Job
    from fedheal.cli import display
    from fedheal.report import rows, tables
    from fedheal.report.text_report import format_report
    from fedheal.runs.folder import check_folder

    parts = expand_unseen(experiment.to_dict())
    planned = [Job(part, check_folder(folder) / part.folder_name, track) for part in parts]
    _run_jobs(planned, quiet or as_json, _count_runs(planned, folder), jobs=1)
    runs = rows.build_rows(rows.load_summary(job.folder) for job in planned)
    if as_json:
        typer.echo(json.dumps({"rows": tables.flatten_rows(runs)}, indent=2))
    elif not quiet:
        typer.echo(format_report(runs, "text", width=display.find_width()))


def _run_jobs(
    planned: Sequence[Job],
    quiet: bool,
    title: str,
    jobs: int,
    ray: str | None = None,
    is_search: bool = False,
    note: str = "",
) -> None:
    """Run the jobs with a live table, after notes and a line with the title and how they are run."""
    from rich.console import Console

    from fedheal.campaign.pool import describe_schedule, run_all
    from fedheal.cli import display

    console, schedule = Console(quiet=quiet), describe_schedule(planned, jobs, ray)
    finished = run_all(planned, jobs, ray)  # checks all of them before anything is printed
    if ray is None and not is_search:
        display.print_class_notes((job.experiment for job in planned if not job.is_finished), console)
    if note:
        display.print_note(note, console)
    if title:
        console.print(f"{title}, {schedule}:", highlight=False, markup=False, soft_wrap=True)
    with display.LiveTable(console, planned, is_search) as table:
        for job in finished:
            table.report_finished(job)


def _count_runs(planned: Sequence[Job], folder: Path) -> str:
    return f"{format_count(len(planned), 'run')} into {folder}"


def _find_command() -> str:
    """Return how to call this program in the user's shell, which may not have its environment activated."""
    program = Path(sys.executable).with_name("fedheal")
    if shutil.which("fedheal") or not program.exists():
        return "fedheal"
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)
