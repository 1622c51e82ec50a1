"""Splits as distributed: images of any size, not resized yet, with their labels.

Readers return `Pixels`, an array that one file held, or `EncodedImages`, image files (in a folder, table or archive) that are
read one at a time. Only an export treats them differently, since it copies images in their encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedheal.data.domains import Excerpt
from fedheal.data.readers.images import decode_image

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


def choose_classes(domains: Sequence[RawDomain], fixed: tuple[str, ...], rule: str, data: str) -> tuple[str, ...]:
    """Return the fixed classes of a data set, or the "intersection" or "union" of its domains' classes."""
    if fixed:
        return fixed
    sets = [set(domain.classes) for domain in domains]
    classes = sorted(set.intersection(*sets) if rule == "intersection" else set.union(*sets))
    if len(classes) < 2:
        raise ValueError(
            f"data '{data}': the {rule} of the classes of {', '.join(d.name for d in domains)} has {len(classes)} "
            "class(es); at least two are needed"
        )
    return tuple(classes)


def align_labels(domain: RawDomain, classes: tuple[str, ...]) -> RawDomain:
    """Make the labels index `classes`, and drop images of other classes."""
    table = np.array([classes.index(name) if name in classes else -1 for name in domain.classes], dtype=np.int64)
    return replace(domain, classes=classes, train=_relabel(domain.train, table), test=_relabel(domain.test, table))


def _relabel(split: RawSplit, table: Labels) -> RawSplit:
    split = replace(split, labels=table[split.labels])
    return split.select(np.flatnonzero(split.labels >= 0)) if (split.labels < 0).any() else split
