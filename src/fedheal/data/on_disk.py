"""Load data sets from disk as `Domains`, and export the images that some experiments use to one archive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedheal.core.errors import format_count, shorten_list
from fedheal.data import archive
from fedheal.data.cache import CacheInputs, PreparedData, prepare_data
from fedheal.data.domains import Domain, Domains, Excerpt, fingerprint
from fedheal.data.locate import DomainLocation, explain_missing, locate_domains, resolve_root
from fedheal.data.partition import Client
from fedheal.data.readers.folders import check_split_folders, list_subfolders
from fedheal.data.specs import IMAGE_FOLDERS, DatasetSpec, DomainSpec, FolderLayout
from fedheal.data.splits import RawDomain, align_labels, choose_classes, note_class_differences
from fedheal.runs.folder import make_folder

FOLDER_PREFIX = "folder:"
FOLDER_NAME = "folder"  # the data set's name in an export of such a folder


@dataclass(frozen=True)
class DataRequest:
    """A request for a data set on disk.

    Attributes:
        root: The folder to search, or an export; None takes the environment variable FEDHEAL_DATA.
        allow_missing: Whether to load the other domains if some are missing.
        classes: "intersection" or "union" of the domains' classes, for data sets without a fixed list.
        size: Resize images to size x size; None keeps the data set's own size.
    """

    root: str | None = None
    allow_missing: bool = False
    classes: str = "intersection"
    size: int | None = None


@dataclass(frozen=True)
class OnDiskDataset:
    """A data set on disk: the locations of its domains (or the export that contains them), not read yet."""

    spec: DatasetSpec
    inputs: CacheInputs
    locations: tuple[DomainLocation, ...]
    export: Path | None = None


def multiply_fraction(fraction: float, total: int) -> int:
    """Return that fraction of a total, rounded down. The fraction counts as the decimal that was written."""
    return int(Fraction(str(fraction)) * total)


def make_folder_spec(name: str) -> DatasetSpec:
    """Return the specification of `folder:PATH`, where each subfolder is a domain. PATH may be an export of such a folder."""
    value = name.removeprefix(FOLDER_PREFIX)
    path = Path(value).expanduser()
    if value and path.is_file():
        try:
            manifest = archive.read_manifest(path)
        except ValueError as error:
            wanted = f"{FOLDER_PREFIX} takes a folder that contains <domain>/<class>/..., or its export"
            raise ValueError(f"data = {name!r}: {error}; {wanted}") from error
        if manifest.name != FOLDER_NAME:
            raise ValueError(
                f"data = {name!r}: {path} is an export of '{manifest.name}': use data={manifest.name} data_root={path}"
            )
        domains = [domain.name for domain in manifest.domains]
    elif not value or not path.is_dir():
        raise ValueError(f"data = {name!r}: there is no folder {value!r}; give one that contains <domain>/<class>/...")
    else:
        domains = list_subfolders(path)
        for domain in domains:
            check_split_folders(domain, path / domain)
    if not domains:
        raise ValueError(f"data = {name!r}: {path} has no subfolders; it must contain <domain>/<class>/...")
    specs = tuple(DomainSpec(n, train=0, test=0, folders=(n,), layouts=(FolderLayout(),), home="") for n in domains)
    return DatasetSpec(FOLDER_NAME, "your own image folders", specs, size=32, clients=5)


def open_dataset(spec: DatasetSpec, request: DataRequest) -> OnDiskDataset:
    """Locate a data set without reading it. Raise ValueError if domains are missing that may not be."""
    root = resolve_root(request.root)
    size = request.size or spec.size
    locations = locate_domains(spec, root)
    export = find_fuller_export(spec, locations, root)
    if export is not None:
        absent = list_missing_domains(spec, export)
        if absent and not request.allow_missing:
            raise ValueError(
                f"{export} lacks the domains {', '.join(absent)}; set allow_missing=true to continue without"
            )
        inputs = CacheInputs(spec.name, size, "export", {"": [export]}, read=lambda: archive.read_export(export))
        return OnDiskDataset(spec, inputs, (), export)
    name, place = spec.name, f" below {root}"
    if name == FOLDER_NAME:
        name, place = f"{FOLDER_PREFIX}{root}", ""
    present = [location.files for location in locations if location.files]
    missing = [explain_missing(location, root) for location in locations if location.files is None]
    if not present:
        raise ValueError(f"no domain of '{name}' was found{place}: {missing[0]}")
    if missing and not request.allow_missing:
        raise ValueError(
            f"'{name}' lacks {len(missing)} of {len(locations)} domains{place}: {'; '.join(missing)}; "
            "set allow_missing=true to continue without"
        )

    def read() -> tuple[tuple[str, ...], Sequence[RawDomain]]:
        domains = [files.read() for files in present]
        owned = {domain.name: domain.classes for domain in domains}
        classes = spec.classes or choose_classes(owned, request.classes, name)
        return classes, [align_labels(domain, classes) for domain in domains]

    paths = {files.name: files.files for files in present}
    return OnDiskDataset(spec, CacheInputs(spec.name, size, request.classes, paths, read=read), locations)


def find_fuller_export(spec: DatasetSpec, locations: Sequence[DomainLocation], root: Path) -> Path | None:
    """Return an export of the data set if it has domains that are not there as files."""
    present = {location.name for location in locations if location.files}
    export = archive.find_export(root, spec.name) if len(present) < len(locations) else None
    return export if export and not {d.name for d in archive.read_manifest(export).domains} <= present else None


def load_opened(dataset: OnDiskDataset) -> Domains:
    """Load a data set that was located, with notes on what is missing or unreadable."""
    return build_domains(dataset, prepare_data(dataset.inputs))


def build_domains(dataset: OnDiskDataset, prepared: PreparedData) -> Domains:
    """Return a prepared data set with the default clients of its specification."""
    spec, manifest = dataset.spec, prepared.manifest
    nominal = {s.name: s.train for domain in spec.domains for s in (domain, domain.stand_in) if s}
    domains = tuple(replace(d, nominal=nominal.get(d.name) or len(d.labels)) for d in prepared.map_domains())
    if dataset.export is not None:
        identity, notes = archive.verify_fingerprint(dataset.export, dataset.inputs.size, manifest.fingerprint)
    else:
        identity = manifest.fingerprint
        notes = _note_locations(dataset.locations, prepared) + _note_absent_classes(domains, manifest.classes)
        owned: dict[str, Sequence[str]] = {d.name: d.dropped_classes for d in manifest.domains}
        if (rule := dataset.inputs.class_rule) == "union":
            owned = {d.name: _list_classes(d, manifest.classes) for d in domains}
        note = "" if spec.classes else note_class_differences(owned, rule)
        notes += [note] if note else []
    return Domains(
        name=spec.name,
        classes=manifest.classes,
        domains=domains,
        clients_per_domain=(spec.clients,) * len(domains),
        samples_per_client=tuple(spec.samples or multiply_fraction(spec.fraction, d.nominal) for d in domains),
        identity=identity,
        notes=tuple(notes),
    )


def export_images(dataset: OnDiskDataset, clients: Sequence[Client], settings: Mapping[str, Any], out: Path) -> None:
    """Write the training images that any of the clients holds, and all test images, to `out`."""
    if dataset.export is not None:
        raise ValueError(f"{dataset.export} is already an export: copy it")
    prepared = prepare_data(dataset.inputs)
    data = build_domains(dataset, prepared)
    classes, raw_domains = dataset.inputs.read()
    excerpts, exported = [], []
    for raw, cached in zip(raw_domains, prepared.manifest.domains, strict=True):
        positions = np.unique(
            np.concatenate([client.indices.numpy() for client in clients if client.domain == raw.name])
        )
        train, test = (
            split.select(np.setdiff1d(np.arange(len(split)), cached.dropped[part])) if cached.dropped[part] else split
            for part, split in (("train", raw.train), ("test", raw.test))
        )
        excerpt, domain = Excerpt(torch.from_numpy(positions), torch.from_numpy(train.labels)), data[raw.name]
        excerpts.append(replace(raw, train=train.select(positions), test=test, excerpt=excerpt))
        exported.append(Domain(raw.name, domain.select(excerpt.positions), domain.test))
    manifest = archive.ExportManifest(
        name=data.name,
        classes=classes,
        identity=data.identity,
        size=dataset.inputs.size,
        fingerprint=fingerprint(replace(data, domains=tuple(exported), identity="")),
        settings=dict(settings),
        notes=data.notes,
    )
    make_folder(out.parent)
    archive.write_export(out, manifest, excerpts)


def list_missing_domains(spec: DatasetSpec, export: Path) -> list[str]:
    """Return the domains of a data set for which an export has neither images nor a stand-in."""
    present = {domain.name for domain in archive.read_manifest(export).domains}
    return [s.name for s in spec.domains if not {s.name, s.stand_in.name if s.stand_in else ""} & present]


def note_classes(dataset: OnDiskDataset) -> str:
    """Return a note on classes that not every domain has, or "". It is known before images are read for image folders only."""
    present = [location.files for location in dataset.locations if location.files]
    if dataset.spec.classes or not present or any(files.layout != IMAGE_FOLDERS for files in present):
        return ""
    return note_class_differences({files.name: files.read().classes for files in present}, dataset.inputs.class_rule)


def _list_classes(domain: Domain, classes: Sequence[str]) -> list[str]:
    """Return the names of the classes that a domain has images of."""
    counts = torch.bincount(torch.cat([domain.labels, domain.test.labels]), minlength=len(classes))
    return [name for name, count in zip(classes, counts.tolist(), strict=True) if count]


def _note_absent_classes(domains: Sequence[Domain], classes: Sequence[str]) -> list[str]:
    notes = []
    for domain in domains:
        for part, labels in (("training", domain.labels), ("test", domain.test.labels)):
            absent = [name for i, name in enumerate(classes) if not bool((labels == i).any())]
            if absent:
                notes.append(f"{domain.name}: no {part} images of {shorten_list(absent)}")
    return notes


def _note_locations(locations: Sequence[DomainLocation], prepared: PreparedData) -> list[str]:
    """Name missing, substituted and incomplete domains, and unreadable images."""
    notes = []
    cached = {domain.name: domain for domain in prepared.manifest.domains}
    for location in locations:
        spec, name = location.spec, location.name
        if location.files is None:
            notes.append(f"{name} is not on disk: results are over {len(cached)} of {len(locations)} domains")
            continue
        domain = cached[name]
        if location.is_stand_in:
            notes.append(f"{name} stands in for {spec.name}: its results are not results on {spec.name}")
        if spec.is_incomplete(domain.train, domain.test):
            train, test = f"{domain.train:,} of {spec.train:,}", f"{domain.test:,} of {spec.test:,}"
            notes.append(f"{name}: {train} training and {test} test images on disk")
        if location.files.note:
            notes.append(f"{name}: {location.files.note}")
        if domain.unreadable:
            reasons = shorten_list(domain.unreadable, separator="; ")
            notes.append(f"{name}: {format_count(len(domain.unreadable), 'image')} could not be read: {reasons}")
    return notes
