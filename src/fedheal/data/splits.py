"""A split of a data set as it is distributed: images of any size, not yet resized, and their classes.

Readers give one of two kinds: `Pixels`, an array that a file held whole, or `Encoded`, image files (in a folder, a table or
an archive) that are read one at a time. What follows treats both alike; only an export looks at the difference, since it
passes images on as they came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedheal.data.readers.images import decoded

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

    def name(self, index: int) -> str:
        return f"image {index}"

    def only(self, positions: Labels) -> Pixels:
        return Pixels(self.array[positions], self.labels[positions])

    def relabelled(self, labels: Labels) -> Pixels:
        return replace(self, labels=labels)


@dataclass(frozen=True)
class Encoded:
    """Image files, each with a name; `read(name)` gives the bytes."""

    names: Sequence[str]
    labels: Labels
    read: Callable[[str], bytes]

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        return decoded(self.read(self.names[index]), self.names[index])

    def name(self, index: int) -> str:
        return self.names[index]

    def only(self, positions: Labels) -> Encoded:
        return Encoded([self.names[i] for i in positions], self.labels[positions], self.read)

    def relabelled(self, labels: Labels) -> Encoded:
        return replace(self, labels=labels)


Raw = Pixels | Encoded


@dataclass(frozen=True)
class Excerpt:
    """Says that a split holds only some images of a whole one: their positions in it, and all labels of it."""

    positions: Labels  # ascending
    labels: Labels


@dataclass(frozen=True)
class RawDomain:
    """One domain as distributed; labels count its own classes."""

    name: str
    classes: tuple[str, ...]
    train: Raw
    test: Raw
    excerpt: Excerpt | None = None  # of the training split
