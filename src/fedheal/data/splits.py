"""Splits as distributed: images of any size, not resized yet, with their labels.

Readers return `Pixels`, an array that one file held, or `EncodedImages`, image files (in a folder, table or archive) that are
read one at a time. Only an export treats them differently, since it copies images in their encoding.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedheal.core.errors import format_count, shorten_list
from fedheal.data.domains import Excerpt
from fedheal.data.readers.images import decode_image

SIMILAR = 0.75  # ratio of difflib from which two class names may be one, misspelt

ClassesByDomain = Mapping[str, Sequence[str]]
Labels = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Pixels:
    """Images of one size: grey `[N, H, W]` or RGB `[N, H, W, 3]`."""

    array: Bytes
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(np.ascontiguousarray(self.array[index]))

    def select(self, positions: Labels) -> Pixels:
        return Pixels(self.array[positions], self.labels[positions])


@dataclass(frozen=True)
class EncodedImages:
    """Image files by name; `read(name)` returns the bytes of one."""

    names: Sequence[str]
    labels: Labels
    read: Callable[[str], bytes]

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        return decode_image(self.read(self.names[index]), self.names[index])

    def select(self, positions: Labels) -> EncodedImages:
        return EncodedImages([self.names[i] for i in positions], self.labels[positions], self.read)


RawSplit = Pixels | EncodedImages


@dataclass(frozen=True)
class RawDomain:
    """One domain as distributed; labels index its own classes."""

    name: str
    classes: tuple[str, ...]
    train: RawSplit
    test: RawSplit
    excerpt: Excerpt | None = None
    dropped_classes: tuple[str, ...] = ()  # classes of its own that the data set does not use


def find_training_images(count: int) -> npt.NDArray[np.bool_]:
    """Return which of so many images, sorted by class and name, are for training: the first eight of every ten."""
    return np.arange(count) % 10 < 8


def choose_classes(owned: ClassesByDomain, rule: str, data: str) -> tuple[str, ...]:
    """Return the "intersection" or "union" of the domains' classes."""
    sets = [set(classes) for classes in owned.values()]
    chosen = sorted(set.intersection(*sets) if rule == "intersection" else set.union(*sets))
    if len(chosen) < 2:
        details = "; ".join(f"{domain} has {shorten_list(classes)}" for domain, classes in owned.items())
        raise ValueError(
            f"data '{data}': the {rule} of the classes of {', '.join(owned)} has "
            f"{format_count(len(chosen), 'class')}; at least two are needed ({details}): name folders of "
            f"one class alike{', or set classes=union' if rule == 'intersection' else ''}"
        )
    return tuple(chosen)


def note_class_differences(owned: ClassesByDomain, rule: str, limit: int = 10) -> str:
    """Name each class that not every domain has, its domains, and a class of similar spelling that they lack.

    The union of the classes keeps all of them. Then only classes that may be misspelt are named. Return "" if there is none.
    """
    shared = set[str].intersection(*map(set, owned.values()))
    owners: dict[str, list[str]] = {}
    for domain, names in owned.items():
        for name in set(names) - shared:
            owners.setdefault(name, []).append(domain)
    described, misspelt = [], []
    for name, domains in sorted(owners.items()):
        others = {n.lower(): n for n, d in owners.items() if len(d) >= len(domains) and not set(d) & set(domains)}
        close = difflib.get_close_matches(name.lower(), others, 1, SIMILAR)
        hint = f"; did you mean '{others[close[0]]}'?" if close else ""
        described.append(f"'{name}' (in {', '.join(domains)}{hint})")
        misspelt += described[-1:] if close else []
    if rule == "union" and misspelt:
        return f"class names that may be misspelt: {shorten_list(misspelt, limit)}; rename folders that are"
    if rule == "union" or not described:
        return ""
    is_one = len(described) == 1
    left_out, it = ("1 class is", "it") if is_one else (f"{len(described)} classes are", "them")
    names = shorten_list(described, limit)
    rename = "rename folders that are misspelt; " if misspelt else ""
    return f"{left_out} left out because not every domain has {it}: {names}; {rename}classes=union keeps {it}"


def explain_empty_split(domain: str, train: int, test: int) -> str:
    """Say that a domain cannot be used, and what it needs."""
    return (
        f"domain '{domain}' has {train} training and {test} test images and needs both; image folders without train/ and "
        "test/ need at least 9 images, since of every ten the last two are for testing"
    )


def align_labels(domain: RawDomain, classes: tuple[str, ...]) -> RawDomain:
    """Make the labels index `classes`, and drop images of other classes."""
    table = np.array([classes.index(name) if name in classes else -1 for name in domain.classes], dtype=np.int64)
    train, test = _relabel(domain.train, table), _relabel(domain.test, table)
    dropped = tuple(name for name in domain.classes if name not in classes)
    return replace(domain, classes=classes, train=train, test=test, dropped_classes=dropped)


def _relabel(split: RawSplit, table: Labels) -> RawSplit:
    split = replace(split, labels=table[split.labels])
    return split.select(np.flatnonzero(split.labels >= 0)) if (split.labels < 0).any() else split
