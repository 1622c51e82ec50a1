"""Where data lie: below `data_root`, or else below the folder that the environment variable FEDHEAL_DATA names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fedheal.data.specs import Description, Located, Source

VARIABLE = "FEDHEAL_DATA"


@dataclass(frozen=True)
class Place:
    """What there is of one domain: where it was found, or what is missing of it."""

    source: Source
    found: Located | None
    missing: tuple[str, ...] = ()  # files, where others of the same layout are there
    stand_in: bool = False

    @property
    def name(self) -> str:
        return self.found.name if self.found else self.source.name


def root_of(given: str | None) -> Path:
    """The data root, which must exist."""
    said = given or os.environ.get(VARIABLE)
    where = f"data_root = {given!r}" if given else f"{VARIABLE} = {said!r}"
    if not said:
        raise ValueError(
            f"where the data lie is not said: set {VARIABLE}, or give data_root=FOLDER (--data-root FOLDER to `fedheal data`)"
        )
    root = Path(said).expanduser()
    try:
        there = root.exists()
    except OSError:  # a link that leads to itself, a name that is too long
        there = False
    if not there or not said.isprintable():
        raise ValueError(f"{where}: there is no such folder, or it cannot be used")
    return root


def located(description: Description, root: Path) -> tuple[Place, ...]:
    """Every domain of a data set, in its order."""
    return tuple(_place(source, root, description.classes) for source in description.sources)


def explained(place: Place, root: Path) -> str:
    """What is missing of a domain, where it should lie and where it can be had."""
    source = place.source
    if place.missing:
        what = f"{', '.join(place.missing)} is missing"
    else:
        what = f"{root / source.folders[0]}/ should hold {' or '.join(layout.looks_for for layout in source.layouts)}"
    return f"{source.name}: {what}" + (f"; it can be had from {source.available}" if source.available else "")


def _place(source: Source, root: Path, classes: tuple[str, ...]) -> Place:
    missing: list[str] = []
    for folder in source.folders:
        for layout in source.layouts:
            found = layout.locate(source.name, root / folder)
            if isinstance(found, Located):
                return Place(source, found)
            missing = missing or found
    hub = source.hub and source.hub.locate(source.name, root, classes)
    if hub:
        return Place(source, hub)
    if source.stand_in is not None:
        other = _place(source.stand_in, root, classes)
        if other.found:
            return Place(source, other.found, stand_in=True)
    return Place(source, None, tuple(missing))
