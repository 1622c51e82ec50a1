"""The command `fedheal data`."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedheal import models
from fedheal.campaign.compare import parse_seeds
from fedheal.cli.display import make_console
from fedheal.cli.parsing import Command
from fedheal.data import DATASETS, SPECS, DataRequest, find_spec, on_disk
from fedheal.data.archive import read_export, read_manifest
from fedheal.data.cache import prepare_data
from fedheal.data.domains import Domains
from fedheal.data.download import check_origin, download_domain
from fedheal.data.locate import DomainStatus, inspect_domains, locate_domains, resolve_root
from fedheal.data.specs import DatasetSpec
from fedheal.data.splits import choose_classes, note_class_differences
from fedheal.runs.folder import make_folder, write_text
from fedheal.simulate.build import load_domains, make_data_request, partition_clients
from fedheal.simulate.experiment import Experiment, make_folder_name, parse_overrides

data_app = typer.Typer()  # `DataGroup` of app.py has its help

Data = Annotated[str, typer.Argument(help="digits, office-caltech, folder:PATH, ...; see 'fedheal data list' for all.")]
Root = Annotated[str | None, typer.Option(help="The data directory; FEDHEAL_DATA if not given.")]
AllowMissing = Annotated[bool, typer.Option("--allow-missing", help="Continue without domains that are not on disk.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="Fields of the experiment.")]

EXIT_CODES = {"missing": 1, "damaged": 2, "unusable": 2}


@data_app.command("list", cls=Command)
def list_command() -> None:
    """List the data sets, and the default settings of an experiment on them."""
    rows = [[n, d.about, " ".join(f"{k}={v}" for k, v in d.protocol.items())] for n, d in DATASETS.items()]
    rows.append(["folder:PATH", "your own: <domain>/<class>/... or <domain>/{train,test}/<class>/... in a folder", ""])
    rows.append(["package.module:function", "your own: a function that returns fedheal.data.domains.Domains", ""])
    make_console().print(_make_table(["data", "what it is", "protocol"], rows))
    typer.echo(f"Models: {', '.join(models.MODELS)}, timm:NAME, torchvision:NAME, or package.module:factory")


@data_app.command("check", cls=Command)
def check_command(
    data: Annotated[str | None, typer.Argument(help="A data set; all that are read from disk if not given.")] = None,
    data_root: Root = None,
    words: Words = None,
) -> None:
    """Report what is on disk: state, size and class balance of each domain, and where to get what is missing.

    Exit code 0: every domain is found (a stand-in counts). 1: a domain is missing, or lacks classes that others have. 2: a
    domain is damaged or has no test images, or the domains have fewer than two classes in common. Images in folders are
    counted but not opened; fedheal data prepare lists those that cannot be read.
    """
    if data is None and resolve_root(data_root).is_file():  # an export, which names its data set
        export = resolve_root(data_root)
        raise typer.Exit(_report_export(export, SPECS.get(read_manifest(export).name)))
    exit_code = 0
    for name in [data] if data else list(SPECS):
        experiment = _make_experiment(name, data_root, False, words)
        spec, request = find_spec(name, make_data_request(experiment))
        root = resolve_root(request.root)
        found_export = on_disk.find_fuller_export(spec, locate_domains(spec, root), root)
        if found_export is not None:
            exit_code = max(exit_code, _report_export(found_export, spec))
            continue
        statuses = inspect_domains(spec, root)
        if data is None and all(status.state == "missing" for status in statuses):
            typer.echo(f"{name}: not on disk\n")
            continue
        _report_statuses(name, statuses)
        exit_code = max(exit_code, *(EXIT_CODES.get(status.state, 0) for status in statuses))
        owned = {status.name: status.classes for status in statuses if status.classes}
        if owned and not spec.classes:
            choose_classes(owned, request.classes, name)  # raises if there are too few
            note = note_class_differences(owned, request.classes, limit=1000)
            typer.echo(f"{name}: {note}\n" if note else "", nl=False)
            exit_code = max(exit_code, 1 if note and request.classes == "intersection" else 0)
    raise typer.Exit(exit_code)


@data_app.command("show", cls=Command)
def show_command(
    data: Data,
    out: Annotated[Path, typer.Option(help="The folder for the images.")] = Path("data-show"),
    clients: Annotated[bool, typer.Option("--clients", help="Draw the clients' label distribution instead.")] = False,
    data_root: Root = None,
    allow_missing: AllowMissing = False,
    words: Words = None,
) -> None:
    """Draw a contact sheet (PNG) for each domain; with --clients, each client's domain, size and label distribution.

    Example: fedheal data show digits --clients dirichlet=0.1 seed=1
    """
    from fedheal.data import preview  # matplotlib is slow to import, and only this command needs it

    experiment = _make_experiment(data, data_root, allow_missing, words)
    domains = load_domains(experiment)
    partition = partition_clients(experiment, domains) if clients else ()  # first: a failure leaves no folder
    make_folder(out)
    if not clients:
        for domain in domains.domains:
            path = out / f"{_make_file_name(data, domain.name)}.png"
            preview.draw_contact_sheet(domain, domains.classes).save(path)
            typer.echo(f"{path}")
        return
    counts = preview.count_labels(domains, partition)
    rows = [[c.id, c.domain, str(n.sum()), *map(str, n)] for c, n in zip(partition, counts, strict=True)]
    _print_clients(rows, domains.classes)
    path = out / f"{_make_file_name(data, 'clients')}.csv"
    table = io.StringIO(newline="")
    csv.writer(table).writerows([["client", "domain", "samples", *domains.classes], *rows])
    write_text(path, table.getvalue())
    preview.plot_clients(domains, partition).savefig(path.with_suffix(".png"), dpi=150)
    typer.echo(f"{path}\n{path.with_suffix('.png')}")


@data_app.command("fetch", cls=Command)
def fetch_command(
    data: Data,
    domain: Annotated[list[str] | None, typer.Option(help="Only this domain; may be given several times.")] = None,
    data_root: Root = None,
    origin: Annotated[str, typer.Option("--from", help="hub or web; the hub first if not given.")] = "",
) -> None:
    """Download the domains that are not on disk. No other command uses the network.

    Files of the Hugging Face hub are checked against its checksums. Files of other sites are checked against published
    checksums; without one, the SHA-256 of the first download is recorded and printed. An interrupted download is resumed.
    """
    check_origin(origin)
    spec, request = find_spec(data, DataRequest(data_root))
    root = resolve_root(request.root)
    names = [domain_spec.name for domain_spec in spec.domains]
    for name in set(domain or ()).difference(names):
        raise ValueError(f"domain = {name}: use one of {', '.join(names)}, the domains of '{data}'")
    errors = []
    for location in locate_domains(spec, root):
        if domain and location.spec.name not in domain:
            continue
        if location.files is not None and not location.is_stand_in:
            typer.echo(f"{location.name} is already on disk: {location.files.folder}")
            continue
        try:
            with Live(console=Console(stderr=True), transient=True) as live:
                files = download_domain(location.spec, root, partial(_show_progress, live), origin)
        except ValueError as error:
            errors.append(str(error))
            continue
        for file in files:
            remark = "verified" if file.is_verified else "recorded: no published checksum"
            typer.echo(f"{file.path}  SHA-256 {file.sha256} ({remark})")
    if errors:
        raise ValueError("; ".join(dict.fromkeys(errors)))


@data_app.command("prepare", cls=Command)
def prepare_command(
    data: Data,
    data_root: Root = None,
    allow_missing: AllowMissing = False,
    again: Annotated[
        bool, typer.Option("--again", help="Prepare the data again, even if they are in the cache.")
    ] = False,
    words: Words = None,
) -> None:
    """Decode a data set once, into memory-mapped files.

    The files go to the folder FEDHEAL_CACHE, or to ~/.cache/fedheal. The first run on a data set does this by itself.
    """
    experiment = _make_experiment(data, data_root, allow_missing, words)
    start = time.monotonic()
    dataset = on_disk.open_dataset(*find_spec(data, make_data_request(experiment)))
    prepared = prepare_data(dataset.inputs, again)
    domains = on_disk.build_domains(dataset, prepared)
    for domain in domains.domains:
        typer.echo(f"{domain.name}: {len(domain.train):,} training and {len(domain.test):,} test images")
    for note in domains.notes:
        typer.echo(f"Note: {note}.")
    typer.echo(f"fingerprint {domains.identity}")
    typer.echo(f"{prepared.folder} ({time.monotonic() - start:.1f} s)")


@data_app.command("export", cls=Command)
def export_command(
    data: Data,
    out: Annotated[Path | None, typer.Option(help="The file; <data>.export or <folder>.export if not given.")] = None,
    seeds: Annotated[str, typer.Option(help="A number of seeds (5), a range (0-4) or a list (1,4,8-12).")] = "0-4",
    data_root: Root = None,
    allow_missing: AllowMissing = False,
    words: Words = None,
) -> None:
    """Write the images that a protocol uses to one small file, to take to another machine.

    On that machine, set data_root=FILE (or its folder): experiments then use the same bytes. For an export of your own image
    folders, set data=folder:FILE there.

    Example: fedheal data export digits --seeds 0-2 --out digits.export
    """
    chosen_seeds = parse_seeds(seeds)
    if out is not None and out.is_dir():
        raise ValueError(f"{out} is a folder: name a file, such as {out / 'data.export'}")
    experiment = _make_experiment(data, data_root, allow_missing, words)
    for field in parse_overrides(words or ()).keys() & {"seed", "split_seed"}:
        raise ValueError(f"{field}={getattr(experiment, field)}: set the seeds of an export by --seeds")
    dataset = on_disk.open_dataset(*find_spec(data, make_data_request(experiment)))
    domains = on_disk.build_domains(dataset, prepare_data(dataset.inputs))
    experiments = [experiment.model_copy(update={"seed": seed}) for seed in chosen_seeds]
    clients = [client for one in experiments for client in partition_clients(one, domains)]
    path = out or Path(f"{make_folder_name(Path(experiment.data).name)}.export")
    _check_replaces_same_data(path, domains)
    on_disk.export_images(dataset, clients, {"seeds": chosen_seeds, "fields": list(words or ())}, path)
    for note in domains.notes:
        typer.echo(f"Note: {note}.")
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB), for the seeds {', '.join(map(str, chosen_seeds))}")


def _check_replaces_same_data(path: Path, domains: Domains) -> None:
    """Raise ValueError if the file that an export would replace is anything but an export of the same data."""
    if not path.exists():
        return
    try:
        is_same = read_manifest(path).identity == domains.identity
    except ValueError:
        is_same = False
    if not is_same:
        raise ValueError(
            f"{path} exists already and is no export of these data: remove it, or name another file by --out"
        )


def _make_file_name(data: str, part: str) -> str:
    """Return a name for a file about a part of a data set, e.g. "folder_photos-sketches" of folder:photos."""
    return re.sub(r"[/\\:*?\"<>|\s]+", "_", f"{data}-{part}")[-80:]  # the end of a long path


def _print_clients(rows: Sequence[Sequence[str]], classes: Sequence[str]) -> None:
    """Print how many samples of each class a client holds; if that is too wide, its number of classes and the largest three."""
    console = make_console()
    table = _make_table(["client", "domain", "samples", *classes], rows)
    if console.measure(table, options=console.options.update(max_width=1 << 20)).maximum > console.width:
        short = []
        for client, domain, samples, *counts in rows:
            held = sorted((-int(n), name) for n, name in zip(counts, classes, strict=True) if n != "0")
            largest = ", ".join(f"{name} {-n}" for n, name in held[:3])
            short.append([client, domain, samples, str(len(held)), largest])
        table = _make_table(["client", "domain", "samples", "classes", "most samples of"], short)
    console.print(table)


def _make_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _show_progress(live: Live, name: str, size: int, total: int) -> None:
    live.update(f"{name}: {size:,}{f' of {total:,}' if total else ''}")


def _report_statuses(name: str, statuses: Sequence[DomainStatus]) -> None:
    columns = ["domain", "state", "layout", "train", "test", "class balance (training)"]
    rows = [[s.name, s.state, s.layout, f"{s.train:,}", f"{s.test:,}", s.balance] for s in statuses]
    make_console().print(_make_table(columns, rows, title=name))
    for status in statuses:
        where, detail = status.folder and f" in {status.folder}", status.detail and f": {status.detail}"
        typer.echo(f"{status.name}: {status.state}{where}{detail}", err=status.state == "damaged")
    typer.echo()


def _report_export(export: Path, spec: DatasetSpec | None) -> int:
    """Print the contents of an export, and return the exit code."""
    manifest = read_manifest(export)
    names = ", ".join(domain.name for domain in manifest.domains)
    typer.echo(f"{manifest.name}: an export, {export}, of {names} for {manifest.settings}")
    read_export(export)  # raises if it is damaged
    missing = on_disk.list_missing_domains(spec, export) if spec else []
    for name in missing:
        typer.echo(f"{name}: missing in {export}")
    return 1 if missing else 0


def _make_experiment(data: str, root: str | None, allow_missing: bool, words: list[str] | None) -> Experiment:
    overrides = parse_overrides(words or ())
    options = {"data": data, "data_root": root, "allow_missing": allow_missing}
    fields = {key: value for key, value in options.items() if value}
    for key in fields.keys() & overrides.keys():
        raise ValueError(f"'{key}' is given twice: {fields[key]} and {key}={overrides[key]}")
    return Experiment.of(fields | overrides)
