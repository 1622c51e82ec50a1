"""The commands that run many experiments: `fedheal demo`, `compare` and `sweep`."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedheal.cli.options import SEEDS_HELP, AsJson, Jobs, Quiet, Ray, RunsFolder, Seeds, Track
from fedheal.cli.planned_jobs import count_runs, run_jobs
from fedheal.cli.words import is_override

if TYPE_CHECKING:
    from fedheal.campaign.jobs import Job
    from fedheal.simulate.experiment import Experiment

DEMO_METHODS = ("fedavg", "fedavg+uniform", "fedavg+afl", "fedheal")
SEARCHES = ("grid", "random", "optuna")
DEFAULT_TRIALS = 20
COMPARED_SEEDS_HELP = f"{SEEDS_HELP} Eight can show a difference between up to four methods; more methods need more."
VARY_HELP = (
    "Instead of --seeds: seeds of split, init and batch, all combined, for variance components: split=10,init=3."
)


def demo(
    out: Annotated[Path, typer.Option(help="The folder of the runs.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="The seed of all four runs.")] = 0,
    rounds: Annotated[int | None, typer.Option(help="Fewer rounds, for a first look; use a separate --out.")] = None,
    jobs: Jobs = 0,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare FedAvg, FedAvg with uniform weights, AFL and FedHEAL on the embedded digits.

    Run the same command again to resume it: finished runs are not repeated.
    """
    from fedheal.campaign.checks import check_campaign_folder
    from fedheal.campaign.compare import plan
    from fedheal.cli import display
    from fedheal.report import rows, tables

    planned = plan(DEMO_METHODS, [seed], {} if rounds is None else {"rounds": rounds}, check_campaign_folder(out))
    run_jobs(planned, quiet or as_json, f"Four methods on ten digits in four domains, seed {seed}", jobs)
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


def compare(
    words: Annotated[
        list[str],
        typer.Argument(metavar="METHOD... [key=value ...]", help="Methods or bounds, and fields that all runs share."),
    ],
    data: Annotated[str, typer.Option(help="The data set.")] = "embedded",
    seeds: Annotated[str | None, typer.Option(help=COMPARED_SEEDS_HELP, show_default="8")] = None,
    vary: Annotated[str | None, typer.Option(help=VARY_HELP)] = None,
    out: RunsFolder = None,
    jobs: Jobs = 0,
    ray: Ray = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare methods over several seeds, paired by seed, and show a table and what may be concluded from it.

    Run the same command again to resume it: finished runs are not repeated. lr=0.1 is a field of all runs; fedprox:mu=0.1, with
    a colon, is a method with a parameter. Bounds can stand beside methods: standalone, centralised, leave-one-domain-out. With
    evaluate=unseen, each domain is evaluated with a model that was trained without it.

    Example: fedheal compare fedavg fedavg+uniform fedheal --seeds 8 rounds=10
    """
    from fedheal.campaign import compare as comparison
    from fedheal.campaign.checks import check_campaign_folder
    from fedheal.cli import display
    from fedheal.report import conclusions, rows, tables
    from fedheal.report.comparability import list_cautions
    from fedheal.report.text_report import format_report
    from fedheal.report.variance_table import decompose_rows, flatten_components
    from fedheal.simulate.experiment import make_folder_name, parse_overrides

    overrides = [word for word in words if is_override(word)]
    values = parse_overrides(overrides)
    for option in ("data", "seeds", "vary", "jobs"):
        if option in values:
            raise ValueError(
                f"{option}={values[option]} is not a field of a comparison: use --{option} {values[option]}"
            )
    methods = [word for word in words if not is_override(word)]
    for word in methods:
        if word.endswith(".toml"):
            raise ValueError(f"{word}: a comparison takes no experiment file; write its fields as key=value")
    numbers = comparison.choose_seeds(seeds, vary)
    name = ["compare", data.replace(":", "."), *comparison.name_design(numbers), *sorted(overrides)]
    folder = check_campaign_folder(out or Path("runs") / make_folder_name("-".join(name)))
    planned = comparison.plan(methods, numbers, values | {"data": data}, folder, track)
    note = _note_comparison(methods, numbers, planned)
    run_jobs(planned, quiet or as_json, count_runs(planned, folder), jobs, ray, note=note)
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


def _note_comparison(methods: Sequence[str], seeds: Sequence[Mapping[str, int]], planned: Sequence[Job]) -> str:
    """Return why a comparison that is about to run can show no difference, or an empty string."""
    from fedheal.report import conclusions, rows

    if len(methods) == 1:
        return f"{methods[0]} is the only method, so nothing is compared: name another to compare it with"
    is_crossed = len(seeds[0]) > 1  # runs share seeds, and no difference is tested
    if is_crossed or all(job.is_finished for job in planned):
        return ""
    compared = [method for method in methods if method not in rows.BOUNDS]
    domains = _count_domains(planned[0].experiment)
    return conclusions.foresee_too_few_seeds(len(seeds), len(compared), domains).rstrip(".")


def _count_domains(experiment: Experiment) -> int:
    """Return how many domains a data set on disk has; two for others, which are not loaded to be counted."""
    from fedheal.data import SPECS, find_spec
    from fedheal.data.on_disk import FOLDER_PREFIX, open_dataset
    from fedheal.simulate.build import make_data_request

    if experiment.data in SPECS or experiment.data.startswith(FOLDER_PREFIX):
        with suppress(ValueError):  # a cluster's data need not be on this machine; else `run_jobs` says what is wrong
            dataset = open_dataset(*find_spec(experiment.data, make_data_request(experiment)))
            return len([x for x in dataset.locations if x.files] or dataset.spec.domains)
    return 2


def sweep_command(
    words: Annotated[
        list[str],
        typer.Argument(metavar="key=values ...", help="Fields to search: 0:0.9:0.1 or 0,0.4,1. One value is fixed."),
    ],
    seeds: Seeds = "1",
    metric: Annotated[str, typer.Option(help="The metric to choose by: avg, worst, std, gap or jain.")] = "avg",
    search: Annotated[str, typer.Option(help="grid, random or optuna.")] = "grid",
    trials: Annotated[
        int | None, typer.Option(help="How many points random and optuna try.", show_default=str(DEFAULT_TRIALS))
    ] = None,
    out: RunsFolder = None,
    jobs: Jobs = 0,
    ray: Ray = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Search values of fields, and choose the best on data held out of the clients' training data (validation=0.2).

    Results on the test set are not shown. The last line is a command that tests the choice, on other seeds. Some values contain
    commas themselves and count as one value: only=plain,noisy, clients_per_domain=plain=5,noisy=3, and a method with
    parameters.

    Example: fedheal sweep method=fedheal tau=0:0.9:0.1 beta=0,0.4,1 rounds=10
    """
    tried = _choose_trials(search, trials)
    from rich.console import Console

    from fedheal.campaign import sweep
    from fedheal.campaign.checks import SWEEP_FILE, check_campaign_folder
    from fedheal.campaign.compare import parse_seeds
    from fedheal.cli import display
    from fedheal.core.atomic_files import write_if_changed
    from fedheal.simulate.experiment import make_folder_name

    space, fixed = sweep.parse_space(words)
    name = ["sweep", *(word.replace(":", "..") for word in sorted(words))]
    folder = check_campaign_folder(out or Path("runs") / make_folder_name("-".join(name)))
    wanted = sweep.Search(space, fixed, parse_seeds(seeds), folder, metric)
    run_trials = functools.partial(run_jobs, quiet=quiet or as_json, title="", jobs=jobs, ray=ray, is_search=True)
    first = wanted.jobs(wanted.point(0))[0]
    if ray is None and not first.is_finished:
        display.print_notes([first.experiment], Console(quiet=quiet or as_json))
    found = list(sweep.SEARCHES[search](wanted, run_trials, tried))
    best = sweep.choose_best(found, metric)
    summary = {
        "metric": metric,
        "judged_on": "validation data held out of the clients' training data",
        "chosen": best.point,
        "trials": [{"point": trial.point, "validation": trial.validation} for trial in found],
        "next_command": wanted.format_next_command(best),
    }
    write_if_changed(folder / SWEEP_FILE, json.dumps(summary, indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    elif not quiet:
        # A cluster's data need not be on this machine.
        data = sweep.measure_validation(wanted.jobs(best.point)[0].experiment) if ray is None else None
        display.show_search(wanted, found, best, data)


def _choose_trials(search: str, trials: int | None) -> int:
    """Return how many points a search tries, if it does not try all. Raise ValueError if the two do not fit."""
    if search not in SEARCHES:
        raise ValueError(f"search = {search}: use {', '.join(SEARCHES)}")
    if search == "grid" and trials is not None:
        raise ValueError(
            f"trials = {trials} has no effect: --search grid tries every point; leave it out, or use --search random or optuna"
        )
    return DEFAULT_TRIALS if trials is None else trials


def _find_command() -> str:
    """Return how to call this program in the user's shell, which may not have its environment activated."""
    program = Path(sys.executable).with_name("fedheal")
    if shutil.which("fedheal") or not program.exists():
        return "fedheal"
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)
