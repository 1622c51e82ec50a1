"""What is on disk of a data set: per domain what was found, how much of the whole it is, and how even its classes are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedheal.data.locate import Place, explained, located, root_of
from fedheal.data.on_disk import Wanted
from fedheal.data.specs import Description
from fedheal.data.splits import Raw


@dataclass(frozen=True)
class Finding:
    """One domain."""

    name: str
    state: str  # found, stand-in, part of it, missing, damaged
    layout: str = ""
    folder: str = ""
    train: int = 0
    test: int = 0
    balance: str = ""
    said: str = ""  # what is wrong, or what to do


def inspected(description: Description, wanted: Wanted) -> list[Finding]:
    """Every domain, read but for the image files themselves, which `prepare` decodes."""
    root = root_of(wanted.root)
    return [_finding(place, explained(place, root)) for place in located(description, root)]


def _finding(place: Place, explanation: str) -> Finding:
    found, whole = place.found, place.source
    if found is None:
        return Finding(whole.name, "missing", said=explanation.partition(": ")[2])
    try:
        raw = found.read()
    except ValueError as error:
        return Finding(found.name, "damaged", found.layout, str(found.folder), said=str(error))
    train, test = len(raw.train), len(raw.test)
    state, said = "found", ""
    if train < whole.train or test < whole.test:
        state, said = "part of it", f"the whole has {whole.train:,} / {whole.test:,}"
    if place.stand_in:
        state, said = "stand-in", f"for {whole.name}, which can be had from {whole.available}"
    return Finding(
        found.name, state, found.layout, str(found.folder), train, test, balance(raw.train, raw.classes), said
    )


def balance(split: Raw, classes: tuple[str, ...]) -> str:
    """The rarest and the most frequent class."""
    counts = np.bincount(split.labels, minlength=len(classes))
    low, high = int(counts.argmin()), int(counts.argmax())
    return f"{counts[low]:,} ({classes[low]}) to {counts[high]:,} ({classes[high]}) in {len(classes)} classes"
