"""The command `fedheal run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedheal.cli.options import AsJson, Quiet, Track
from fedheal.cli.planned_jobs import count_runs, run_jobs
from fedheal.cli.words import check_files, is_file

if TYPE_CHECKING:
    from fedheal.simulate.experiment import Experiment

OneRunOnRay = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Train the clients on a Ray cluster: auto, local or HOST:PORT.")
]
Workers = Annotated[int | None, typer.Option(help="Processes that train clients; the same as workers=N.")]
RunFolder = Annotated[Path | None, typer.Option(help="The run folder; default: runs/<name>.")]
RESUME_HELP = (
    "Resume the run in --out, or in runs/<name>; start it if it has no rounds yet. With --out FOLDER or name=NAME alone, the "
    "fields are read from the run folder."
)
Resume = Annotated[bool, typer.Option("--resume", help=RESUME_HELP)]


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
    """Run one experiment, and write its run folder, runs/<name>.

    The name is made of the method, the data, the seed and every field that differs from the data set's protocol. Fields are
    method, data, model, rounds, seed, epochs, lr, batch_size, participation, dropout, ... (docs/reference.md has all of them).
    Set the method's own parameters, such as tau and beta, in the same way; fedheal methods NAME lists them. Commas separate
    domains: without=usps,svhn, clients_per_domain=mnist=5,usps=3. With evaluate=unseen, each domain gets a run that trains
    without it and is tested on it.

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
    display.print_notes([experiment], console)
    result = run(experiment, folder, resume, callbacks, progress=False)
    if as_json:
        typer.echo(json.dumps(dict(result.summary), indent=2))
    elif not quiet:
        display.show_run(result.summary, folder)


def _find_experiment(
    files: list[str], overrides: list[str], out: Path | None, resume: bool, on_ray: bool
) -> tuple[Experiment, Path]:
    """Return the experiment and its run folder. A resume without fields that describe an experiment reads them there."""
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
            remedy = "leave out --resume to start one"
            if out.exists() and any(out.iterdir()):  # where no run starts
                remedy = "remove what is there"
            raise ValueError(
                f"{out} holds no run to resume: there is no experiment.toml; name another folder with --out, or {remedy}"
            )
    experiment = Experiment.read(files[0] if files else None, overrides)
    folder = out or Path("runs") / experiment.run_name
    if resume and is_described:
        alone = f"use --resume --out {folder} alone to resume what is there, or name another folder"
        remedy = f"fields given with --resume describe the whole experiment; {alone}"
        given = {key if key in Experiment.model_fields else "method" for key in parse_overrides(overrides)}
        check_folder_owner(folder, experiment, remedy, given)
    return experiment, folder


def _run_unseen(experiment: Experiment, folder: Path, track: str | None, quiet: bool, as_json: bool) -> None:
    """Run the experiment without each domain in turn, into subfolders, and show the accuracy on the unseen domains."""
    from fedheal.campaign.checks import check_campaign_folder
    from fedheal.campaign.compare import expand_unseen
    from fedheal.campaign.jobs import Job
    from fedheal.cli import display
    from fedheal.report import rows, tables
    from fedheal.report.text_report import format_report

    parts = expand_unseen(experiment.to_dict())
    check_campaign_folder(folder)
    planned = [Job(part, folder / part.folder_name, track) for part in parts]
    run_jobs(planned, quiet or as_json, count_runs(planned, folder), jobs=1)
    runs = rows.build_rows(rows.load_summary(job.folder) for job in planned)
    if as_json:
        typer.echo(json.dumps({"rows": tables.flatten_rows(runs)}, indent=2))
    elif not quiet:
        typer.echo(format_report(runs, "text", width=display.find_width()))
