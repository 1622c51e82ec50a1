"""The command `fedheal reproduce`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedheal.cli.options import AsJson, Jobs, Quiet, Ray, Seeds
from fedheal.cli.planned_jobs import count_runs, run_jobs

RESULTS = "headline, table1, table2, ablation, beta, tau, consistency, convergence"
Fields = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value ...]", help="Fields that differ from the paper's settings.")
]
SMOKE_HELP = "Try the command: a few rounds, on the embedded data unless --data names others; minutes on a CPU."


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
    """Reproduce a table or figure of the paper, and show its numbers beside ours.

    Run the same command again to resume it: finished runs are not repeated, even if another result needed them first.

    Example: fedheal reproduce table1 --smoke
    """
    if result not in RESULTS.split(", "):
        raise ValueError(f"there is no result '{result}': choose one of {RESULTS}")
    from fedheal.campaign.checks import check_campaign_folder
    from fedheal.campaign.compare import parse_seeds
    from fedheal.cli import display
    from fedheal.reproduce import RECIPES, Options, make_suffix, plan_recipe
    from fedheal.reproduce.outputs import write_outputs
    from fedheal.simulate.experiment import parse_overrides

    options_as_words = [f"{k}={v}" for k, v in {"rounds": rounds, "device": device}.items() if v is not None]
    values = parse_overrides([*options_as_words, *(words or [])])  # which refuses a field that is set in both forms
    row_list, data_list = ([w.strip() for w in text.split(",") if w.strip()] for text in (row_names, data))
    options = Options(parse_seeds(seeds), row_list, data_list, values, smoke)
    parts = plan_recipe(RECIPES[result], options, check_campaign_folder(out))
    planned = list({job.folder: job for part in parts for job in part.jobs}.values())
    run_jobs(planned, quiet or as_json, count_runs(planned, out), jobs, ray)
    made = write_outputs(result, RECIPES[result], parts, out / f"{result}{make_suffix(options)}")
    title = f"{RECIPES[result].title}{' (a smoke run)' if smoke else ''}"
    page = display.write_page(made.rows, out / f"{result}{make_suffix(options)}.html", title, sections=made.sections)
    if as_json:
        typer.echo(json.dumps(made.records, indent=2))
    elif not quiet:
        typer.echo("\n\n".join(made.texts))
        typer.echo("\n".join(["", *map(str, made.files), page]))
