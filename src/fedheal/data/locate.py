"""Find the files of a data set below `data_root` or the folder in the environment variable FEDHEAL_DATA, and report on them."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedheal.core.errors import format_count, shorten_list
from fedheal.data.readers.folders import note_split_folders
from fedheal.data.readers.images import SUFFIXES, measure_depth
from fedheal.data.specs import IMAGE_FOLDERS, DatasetSpec, DomainFiles, DomainSpec
from fedheal.data.splits import EncodedImages, RawDomain, RawSplit, align_labels, explain_empty_split

VARIABLE = "FEDHEAL_DATA"
DEPTH_SAMPLE = 20  # images that are opened to see whether they use their 16 bits
UNUSED_BITS = 2  # from which on images are visibly dark


@dataclass(frozen=True)
class DomainLocation:
    """The result of the search for one domain: its files, or the missing ones."""

    spec: DomainSpec
    files: DomainFiles | None
    missing: tuple[str, ...] = ()  # set if some files of a layout are there
    is_stand_in: bool = False

    @property
    def name(self) -> str:
        return self.files.name if self.files else self.spec.name


@dataclass(frozen=True)
class DomainStatus:
    """The state of one domain on disk."""

    name: str
    state: str  # found, stand-in, incomplete, unusable, missing or damaged
    layout: str = ""
    folder: str = ""
    train: int = 0
    test: int = 0
    balance: str = ""  # the rarest and the most frequent class
    detail: str = ""  # what is wrong, or what to do
    classes: tuple[str, ...] = ()


def resolve_root(data_root: str | None) -> Path:
    """Return the data root. Raise ValueError if none is configured or it does not exist."""
    value = data_root or os.environ.get(VARIABLE)
    if not value:
        raise ValueError(
            f"no data directory is configured: set {VARIABLE}, or pass data_root=FOLDER (--data-root FOLDER for "
            "`fedheal data`)"
        )
    root = Path(value).expanduser()
    if not os.path.exists(root) or not value.isprintable():  # Path.exists raises if a name is too long
        raise ValueError(
            f"{'data_root' if data_root else VARIABLE} = {value!r}: there is no such folder; name that of the data"
        )
    return root


def locate_domains(spec: DatasetSpec, root: Path) -> tuple[DomainLocation, ...]:
    """Search for every domain of a data set, in its order."""
    return tuple(_locate_domain(domain, root, spec.classes) for domain in spec.domains)


def explain_missing(location: DomainLocation, root: Path) -> str:
    """Say what is missing of a domain, where it should be and where to get it."""
    domain = location.spec
    if location.missing:
        reason = f"{', '.join(location.missing)} is missing"
    else:
        folder, expected = root / domain.folders[0], " or ".join(layout.looks_for for layout in domain.layouts)
        reason = f"{folder}/ should contain {expected}"
        if any(path.suffix.lower() in SUFFIXES for path in folder.glob("*")):
            reason += " (it has images, but no folders of classes)"
        places = [root / name / part for name in domain.folders for part in (".", "partitions") if name != "."]
        if pickle := next((path for place in places for path in sorted(place.glob("*.pkl"))), None):
            reason += f" ({pickle} is a pickle, which can run code and is never read)"
    source = f"; it is available from {domain.available_from}" if domain.available_from else ""
    return f"{domain.name}: {reason}{source}"


def inspect_domains(spec: DatasetSpec, root: Path) -> list[DomainStatus]:
    """Read every domain, except for image files, which only `fedheal data prepare` decodes."""
    return [_inspect_domain(location, root, spec.classes) for location in locate_domains(spec, root)]


def _inspect_domain(location: DomainLocation, root: Path, classes: tuple[str, ...]) -> DomainStatus:
    files, spec = location.files, location.spec
    if files is None:
        return DomainStatus(spec.name, "missing", detail=explain_missing(location, root).partition(": ")[2])
    try:
        raw = align_labels(files.read(), classes) if classes else files.read()
    except ValueError as error:
        return DomainStatus(files.name, "damaged", files.layout, str(files.folder), detail=str(error))
    state, detail = "found", ""
    if spec.is_incomplete(len(raw.train), len(raw.test)):
        state, detail = "incomplete", f"the full data set has {spec.train:,} training and {spec.test:,} test images"
    detail = "; ".join(filter(None, (detail, files.note)))
    if files.layout == IMAGE_FOLDERS and not any(path.parent.name in raw.classes for path in files.files):
        names = shorten_list(raw.classes)
        detail = f"all images are in folders below its classes ({names}): is the path one folder too high?"
    elif bits := _find_unused_bits(raw.train):
        detail = (
            f"its images have 16 bits per pixel, but use only {bits} of them, so they will be nearly black: multiply their "
            f"values by {1 << 16 - bits}, or save them with 8 bits"
        )
    detail = "; ".join(filter(None, (detail, *_note_splits(location, raw))))
    if not len(raw.train) or not len(raw.test):
        state, detail = "unusable", explain_empty_split(files.name, len(raw.train), len(raw.test))
    if location.is_stand_in:
        state, detail = "stand-in", f"for {spec.name}, which is available from {spec.available_from}"
    counts = np.bincount(raw.train.labels, minlength=len(raw.classes))
    low, high = (f"{counts[c]:,} ({raw.classes[c]})" for c in (counts.argmin(), counts.argmax()))
    balance = f"{low} to {high} in {len(raw.classes)} classes"
    if counts.min() == counts.max():
        balance = f"{counts[0]:,} in each of {format_count(len(raw.classes), 'class')}"
    found = files.name, state, files.layout, str(files.folder)
    return DomainStatus(*found, len(raw.train), len(raw.test), balance, detail, raw.classes)


def _note_splits(location: DomainLocation, raw: RawDomain) -> list[str]:
    """Say how a user's own folders are divided where their names do not, and which classes a domain cannot be judged by."""
    is_own = not location.spec.home
    notes = [note_split_folders(location.files.folder)] if is_own and location.files else []
    for part, split in (("training", raw.train), ("test", raw.test)):
        absent = np.flatnonzero(np.bincount(split.labels, minlength=len(raw.classes)) == 0)
        if len(absent):
            notes.append(f"no {part} images of {shorten_list([raw.classes[i] for i in absent])}")
    return notes


def _find_unused_bits(images: RawSplit) -> int:
    """Return how many bits a sample of 16-bit grey images uses, if they leave the upper ones unused, else 0."""
    if not isinstance(images, EncodedImages) or not len(images):
        return 0
    depths = []
    for name in images.names[:: max(1, len(images) // DEPTH_SAMPLE)]:
        with suppress(ValueError):  # `fedheal data prepare` lists unreadable files
            depths.append(measure_depth(images.read(name)))
        if depths[-1:] == [0]:
            break  # not 16 bits, as in most data sets: do not read the rest
    return max(depths) if depths and 0 < min(depths) <= max(depths) <= 16 - UNUSED_BITS else 0


def _locate_domain(domain: DomainSpec, root: Path, classes: tuple[str, ...]) -> DomainLocation:
    missing: list[str] = []
    for folder in domain.folders:
        for layout in domain.layouts:
            files = layout.locate(domain.name, root / folder)
            if isinstance(files, DomainFiles):
                return DomainLocation(domain, files)
            missing = missing or files
    if domain.hub and (hub_files := domain.hub.locate(domain.name, root, classes)):
        return DomainLocation(domain, hub_files)
    if domain.stand_in and (stand_in := _locate_domain(domain.stand_in, root, classes)).files:
        return DomainLocation(domain, stand_in.files, is_stand_in=True)
    return DomainLocation(domain, None, tuple(missing))
