"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedheal.cli.words import check_jobs_option

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
JOBS_HELP = "Runs at a time; 0: one per core, or as many as the GPUs take."
Jobs = Annotated[int, typer.Option(help=JOBS_HELP, callback=check_jobs_option)]
SEEDS_HELP = "A number of seeds (5), a range (3-7) or a list (1,4,8-12)."
Seeds = Annotated[str, typer.Option(help=SEEDS_HELP)]
Track = Annotated[str | None, typer.Option(help="Also log to tensorboard, mlflow[:URI] or wandb.")]
Ray = Annotated[str | None, typer.Option(help="Run on a Ray cluster: auto, local or HOST:PORT.")]
RunsFolder = Annotated[Path | None, typer.Option(help="The folder of the runs; default: runs/<command>-...")]
