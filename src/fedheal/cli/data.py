"""`fedheal data`: what there is, what is on disk, and what to do with it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedheal import data as datasets
from fedheal import models
from fedheal.campaign.compare import parse_seeds
from fedheal.cli.display import make_console
from fedheal.data import archive, cache, export
from fedheal.data import download as downloads
from fedheal.data import inventory as inspect
from fedheal.data import on_disk as real
from fedheal.data.locate import located, root_of
from fedheal.runs.folder import make_folder
from fedheal.simulate.build import load_domains, make_data_request, partition_clients
from fedheal.simulate.experiment import Experiment, parse_overrides

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
    make_console().print(table)
    typer.echo(f"Models: {', '.join(models.MODELS)}, or package.module:factory")


@data_app.command("check")
def check(
    data: Annotated[str | None, typer.Argument(help="A data set; all that are read from disk if not given.")] = None,
    data_root: Root = None,
) -> None:
    """What is on disk: per domain what was found, counts, class balance; what is missing and where it can be had.

    The exit code is 0 if everything is there (a stand-in counts), 1 if something is missing, 2 if something is damaged.
    Images in folders are counted, not opened: fedheal data prepare names those that cannot be read.
    """
    if data is None and root_of(data_root).is_file():  # an export, which says itself what it is of
        file = root_of(data_root)
        known = datasets.DESCRIPTIONS.get(archive.manifest(file).name)
        raise typer.Exit(_say_export(file, real.lacking(known, file) if known else []))
    worst = 0
    for name in [data] if data else list(datasets.DESCRIPTIONS):
        described, wanted = datasets.description(name, datasets.Wanted(data_root))
        root = root_of(wanted.root)
        packed = real.export_of(described, located(described, root), root)
        if packed is not None:
            worst = max(worst, _say_export(packed, real.lacking(described, packed)))
            continue
        found = inspect.inspected(described, wanted)
        if data is None and all(one.state == "missing" for one in found):
            typer.echo(f"{name}: nothing of it is here\n")
            continue
        table = Table("domain", "state", "layout", "train", "test", "class balance (training)", title=name)
        for one in found:
            table.add_row(one.name, one.state, one.layout, f"{one.train:,}", f"{one.test:,}", one.balance)
        make_console().print(table)
        for one in found:
            worst = max(worst, {"missing": 1, "damaged": 2}.get(one.state, 0))
            where = f" in {one.folder}" if one.folder else ""
            typer.echo(
                f"{one.name}: {one.state}{where}{f': {one.said}' if one.said else ''}", err=one.state == "damaged"
            )
        typer.echo()
    raise typer.Exit(worst)


@data_app.command("show")
def show(
    data: Data,
    out: Annotated[Path, typer.Option(help="The folder for the pictures.")] = Path("data-show"),
    clients: Annotated[bool, typer.Option("--clients", help="Draw what each client holds instead.")] = False,
    data_root: Root = None,
    allow_missing: AllowMissing = False,
    words: Words = None,
) -> None:
    """Contact sheets, a PNG for each domain; with --clients, every client's domain, size and label distribution.

    Example: fedheal data show digits --clients dirichlet=0.1 seed=1
    """
    from fedheal.data import preview as pictures  # matplotlib takes a while, and only this command needs it

    experiment = _experiment(data, data_root, allow_missing, words)
    domains = load_domains(experiment)
    if not clients:
        for path in pictures.sheets(domains, out):
            typer.echo(f"{path}")
        return
    held = partition_clients(experiment, domains)
    counts = pictures.label_counts(domains, held)
    table = Table("client", "domain", "samples", *domains.classes)
    for client, row in zip(held, counts, strict=True):
        table.add_row(client.id, client.domain, str(row.sum()), *map(str, row))
    make_console().print(table)
    make_folder(out)
    path = out / f"{domains.name}-clients.png"
    pictures.client_plot(domains, held).savefig(path, dpi=150)
    typer.echo(f"{path}")


@data_app.command("fetch")
def fetch(
    data: Data,
    domain: Annotated[list[str] | None, typer.Option(help="Only this domain; may be given several times.")] = None,
    data_root: Root = None,
    origin: Annotated[str, typer.Option("--from", help="hub or web; the hub first if not given.")] = "",
) -> None:
    """Download the domains that are not on disk. This is the only command that uses the network.

    Files of the Hugging Face hub are checked against its checksums; of other sites, against those known to fedheal, or else
    what came first is recorded and printed. A download that was stopped goes on where it was.
    """
    described, wanted = datasets.description(data, datasets.Wanted(data_root))
    root = root_of(wanted.root)
    names = [source.name for source in described.sources]
    for name in domain or ():
        if name not in names:
            raise ValueError(f"domain = {name}: the domains of '{data}' are {', '.join(names)}")
    places = [place for place in located(described, root) if not domain or place.source.name in domain]
    wanting = [place.source for place in places if place.found is None or place.stand_in]
    for place in places:
        if place.source not in wanting:
            typer.echo(f"{place.name} is here already: {place.found.folder if place.found else ''}")
    troubles = []
    for source in wanting:
        try:
            with _downloading() as progress:
                found = downloads.fetch(source, root, progress, origin)
        except ValueError as error:
            troubles.append(str(error))
            continue
        for one in found:
            vouched = "as expected" if one.vouched else "recorded: nobody vouches for it"
            typer.echo(f"{one.path}  SHA-256 {one.sha256} ({vouched})")
    if troubles:
        raise ValueError("; ".join(troubles))


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
    found = real.opened(*datasets.description(data, make_data_request(experiment)))
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

    There, data_root=FILE (or the folder it lies in) runs the same experiments with the same bytes; of your own image
    folders, data=folder:FILE does.

    Example: fedheal data export digits --seeds 0-2 --out digits.export
    """
    chosen = parse_seeds(seeds)
    experiment = _experiment(data, data_root, allow_missing, words)
    if "seed" in parse_overrides(words or ()):
        raise ValueError(f"the seeds of an export are given by --seeds: it cannot be given as seed={experiment.seed}")
    found = real.opened(*datasets.description(data, make_data_request(experiment)))
    domains = real.domains_of(found, cache.prepare(found.recipe))
    held: dict[str, list[Any]] = {}
    for seed in chosen:
        for client in partition_clients(experiment.model_copy(update={"seed": seed}), domains):
            held.setdefault(client.domain, []).append(client.indices)
    path = out or Path(f"{domains.name}.export")
    export.export(found, export.used(held), {"seeds": chosen, "fields": list(words or ())}, path)
    _say_notes(domains.notes)
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB), for the seeds {', '.join(map(str, chosen))}")


@contextmanager
def _downloading() -> Iterator[downloads.Progress]:
    with Live(console=Console(stderr=True), transient=True) as live:

        def progress(name: str, have: int, total: int) -> None:
            live.update(f"{name}: {have:,}{f' of {total:,}' if total else ''}")

        yield progress


def _say_export(packed: Path, lacking: Sequence[str]) -> int:
    said = archive.manifest(packed)
    names = ", ".join(domain.name for domain in said.domains)
    typer.echo(f"{said.name}: an export, {packed}, of {names} for {said.settings}")
    archive.read(packed)
    for name in lacking:
        typer.echo(f"{name}: missing in {packed}")
    return 1 if lacking else 0


def _experiment(data: str, root: str | None, allow_missing: bool, words: list[str] | None) -> Experiment:
    values = parse_overrides(words or ())
    said = {"data": data, "data_root": root, "allow_missing": allow_missing}
    given = {key: value for key, value in said.items() if value}
    for key in given.keys() & values.keys():
        raise ValueError(f"'{key}' is given twice: {given[key]} and {key}={values[key]}")
    return Experiment.of(given | values)


def _say_notes(notes: tuple[str, ...]) -> None:
    for note in notes:
        typer.echo(f"Note: {note}.")
