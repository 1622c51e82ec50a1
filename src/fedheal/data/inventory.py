"""Report what is on disk of a data set: per domain its state, its size and its class balance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedheal.data.locate import DomainLocation, explain_missing, locate_domains, resolve_root
from fedheal.data.on_disk import DataRequest
from fedheal.data.specs import DatasetSpec
from fedheal.data.splits import RawSplit


@dataclass(frozen=True)
class DomainStatus:
    """The state of one domain on disk."""

    name: str
    state: str  # found, stand-in, incomplete, missing or damaged
    layout: str = ""
    folder: str = ""
    train: int = 0
    test: int = 0
    balance: str = ""
    detail: str = ""  # what is wrong, or what to do


def inspect_domains(spec: DatasetSpec, request: DataRequest) -> list[DomainStatus]:
    """Read every domain, except for image files, which only `fedheal data prepare` decodes."""
    root = resolve_root(request.root)
    return [_inspect_domain(location, explain_missing(location, root)) for location in locate_domains(spec, root)]


def _inspect_domain(location: DomainLocation, explanation: str) -> DomainStatus:
    files, spec = location.files, location.spec
    if files is None:
        return DomainStatus(spec.name, "missing", detail=explanation.partition(": ")[2])
    try:
        raw = files.read()
    except ValueError as error:
        return DomainStatus(files.name, "damaged", files.layout, str(files.folder), detail=str(error))
    state, detail = "found", ""
    if len(raw.train) < spec.train or len(raw.test) < spec.test:
        state, detail = "incomplete", f"the full data set has {spec.train:,} / {spec.test:,}"
    if location.is_stand_in:
        state, detail = "stand-in", f"for {spec.name}, which is available from {spec.available_from}"
    return DomainStatus(
        name=files.name,
        state=state,
        layout=files.layout,
        folder=str(files.folder),
        train=len(raw.train),
        test=len(raw.test),
        balance=_describe_balance(raw.train, raw.classes),
        detail=detail,
    )


def _describe_balance(split: RawSplit, classes: tuple[str, ...]) -> str:
    """Name the rarest and the most frequent class."""
    counts = np.bincount(split.labels, minlength=len(classes))
    low, high = int(counts.argmin()), int(counts.argmax())
    return f"{counts[low]:,} ({classes[low]}) to {counts[high]:,} ({classes[high]}) in {len(classes)} classes"
