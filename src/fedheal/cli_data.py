"""`fedheal data`: what there is, what is on disk, and what to do with it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedheal import data as datasets
from fedheal import models
from fedheal.compare import seeds_of
from fedheal.data import cache, export, real
from fedheal.experiment import Experiment, clients_of, override

data_app = typer.Typer(help="Data sets: what there is, what is on disk, and what to do with it.", no_args_is_help=True)

Data = Annotated[str, typer.Argument(help="digits, office-caltech, folder:PATH, ...; 'fedheal data list' has all.")]
Root = Annotated[str | None, typer.Option(help="Where the data lie, if not where FEDHEAL_DATA says.")]
AllowMissing = Annotated[bool, typer.Option("--allow-missing", help="Go on without domains that are not on disk.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="Fields of the experiment.")]


@data_app.command("list")
def list_() -> None:
    """The data sets there are, and the settings of an experiment on them."""
    table = Table("data", "what it is", "protocol")
    for name, dataset in datasets.DATASETS.items():
        table.add_row(name, dataset.about, " ".join(f"{k}={v}" for k, v in dataset.protocol.items()))
    table.add_row("folder:PATH", "your own: <domain>/<class>/... or <domain>/{train,test}/<class>/... in a folder", "")
    table.add_row("package.module:function", "your own: a function that returns fedheal.data.domains.Domains", "")
    _wide().print(table)
    typer.echo(f"Models: {', '.join(models.MODELS)}, or package.module:factory")


@data_app.command("prepare")
def prepare(
    data: Data,
    data_root: Root = None,
    allow_missing: AllowMissing = False,
    again: Annotated[bool, typer.Option("--again", help="Make it anew, even if it is there.")] = False,
    words: Words = None,
) -> None:
    """Decode a data set once, into files that are mapped into memory from then on.

    They go to the folder FEDHEAL_CACHE, or ~/.cache/fedheal. A run does this itself when it has not been done.
    """
    experiment = _experiment(data, data_root, allow_missing, words)
    started = time.monotonic()
    found = real.opened(*datasets.description(data, _wanted(experiment)))
    prepared = cache.prepare(found.recipe, again)
    domains = real.domains_of(found, prepared)
    for domain in domains.domains:
        typer.echo(f"{domain.name}: {len(domain.train):,} training and {len(domain.test):,} test images")
    _say_notes(domains.notes)
    typer.echo(f"fingerprint {domains.identity}")
    typer.echo(f"{prepared.folder} ({time.monotonic() - started:.1f} s)")


@data_app.command("export")
def export_command(
    data: Data,
    out: Annotated[Path | None, typer.Option(help="The file; <data>.export if not given.")] = None,
    seeds: Annotated[
        str, typer.Option(help="Of the experiments: how many (5), a range (0-4) or a list (1,4).")
    ] = "0-4",
    data_root: Root = None,
    allow_missing: AllowMissing = False,
    words: Words = None,
) -> None:
    """Write just the images that a protocol uses as one small file, to take to another machine.

    There, data_root=FILE (or the folder it lies in) runs the same experiments with the same bytes.

    Example: fedheal data export digits --seeds 0-2 --out digits.export
    """
    chosen = seeds_of(seeds)
    experiment = _experiment(data, data_root, allow_missing, words)
    found = real.opened(*datasets.description(data, _wanted(experiment)))
    domains = real.domains_of(found, cache.prepare(found.recipe))
    held: dict[str, list[Any]] = {}
    for seed in chosen:
        for client in clients_of(experiment.model_copy(update={"seed": seed}), domains):
            held.setdefault(client.domain, []).append(client.indices)
    path = out or Path(f"{domains.name}.export")
    export.export(found, export.used(held), {"seeds": chosen, "fields": list(words or ())}, path)
    _say_notes(domains.notes)
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB), for the seeds {', '.join(map(str, chosen))}")


def _experiment(data: str, root: str | None, allow_missing: bool, words: list[str] | None) -> Experiment:
    values = dict(override(word) for word in words or ())
    said: dict[str, Any] = {"data": data, "data_root": root, "allow_missing": allow_missing}
    return Experiment.of({key: value for key, value in said.items() if value} | values)


def _wanted(experiment: Experiment) -> datasets.Wanted:
    return datasets.Wanted(experiment.data_root, experiment.allow_missing, experiment.classes, experiment.image_size)


def _say_notes(notes: tuple[str, ...]) -> None:
    for note in notes:
        typer.echo(f"Note: {note}.")


def _wide() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200)
