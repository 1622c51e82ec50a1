"""Four domains of digits that need no download, with unequal shares: a small test bed for fairness.

- `handwritten`: 8 x 8 pen digits of the UCI repository as shipped with scikit-learn (Alpaydin, Kaynak).
- `print`: digits of free fonts on paper; training and test fonts are different families.
- `street`: the same fonts as house numbers, with colour, neighbours, perspective, clutter and blur.
- `display`: noisy seven-segment displays whose unlit segments show; few samples, unlike anything else here.

The first two are large and easy and dominate an average by sample count; the last is small and suffers from it. The images
are computed in integer arithmetic, so their bytes are the same everywhere; `FINGERPRINT` pins them. The glyphs come from
`glyphs.npz` (made by `tools/make_glyph_atlas.py`; families and licences are in `glyphs.json`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

import numpy as np
import torch

from fedheal.core.arrays import Integers
from fedheal.data.domains import Domain, Domains, Split, fingerprint
from fedheal.data.embedded import scenes
from fedheal.data.embedded.stable_random import draw_integers

TRAIN_SIZE = {"print": 1500, "street": 1500, "display": 400}
TEST_SIZE = 500
WRITERS_BOUNDARY = 1287  # handwritten: the fixed order of digits that every writer copied restarts here

# The displays of the test split are bolder and more slanted than any of the training split.
STYLE = {"train": ((500, 760), (0, 40)), "test": ((761, 900), (41, 50))}  # half thickness, slant

FINGERPRINT = "6560c4cc84828a5bfe3f78aa31c065d56d0eb9a5c0cd78d43440589b3e171eb9"


def load_embedded() -> Domains:
    """Draw the data set. Raise ValueError if its fingerprint is not the expected one."""
    data = draw_embedded()
    actual = fingerprint(data)
    if actual != FINGERPRINT:
        raise ValueError(
            f"the embedded digits have the fingerprint {actual} instead of {FINGERPRINT}: scikit-learn's digits or "
            "the glyph atlas differ from those of this version of fedheal, so results would not be comparable"
        )
    return data


def draw_embedded() -> Domains:
    """Draw the data set without checking its fingerprint."""
    return Domains(
        name="embedded",
        classes=tuple(str(digit) for digit in range(10)),
        domains=(
            _draw_handwritten(),
            _draw_domain("print", lambda labels, part, name: scenes.draw_print(labels, _load_glyphs(part), name)),
            _draw_domain("street", lambda labels, part, name: scenes.draw_street(labels, _load_glyphs(part), name)),
            _draw_domain("display", lambda labels, part, name: scenes.draw_display(labels, *STYLE[part], name)),
        ),
        clients_per_domain=(3, 3, 3, 3),
        samples_per_client=(400, 400, 300, 80),
    )


def _make_split(images: Integers, labels: Integers) -> Split:
    return Split(torch.from_numpy(np.clip(images, 0, 255).astype(np.uint8)), torch.from_numpy(labels.astype(np.int64)))


def _load_glyphs(part: str) -> Integers:
    with resources.files("fedheal.data.embedded").joinpath("glyphs.npz").open("rb") as file, np.load(file) as atlas:
        glyphs: Integers = atlas[part].astype(np.int64)
    return glyphs


def _draw_handwritten() -> Domain:
    from sklearn.datasets import load_digits  # importing it takes a second, and only these digits need it

    pens = load_digits()
    images = scenes.draw_handwritten(pens.images.astype(np.int64))
    labels, cut = pens.target, WRITERS_BOUNDARY
    return Domain("handwritten", _make_split(images[:cut], labels[:cut]), _make_split(images[cut:], labels[cut:]))


def _draw_domain(name: str, draw: Callable[[Integers, str, str], Integers]) -> Domain:
    """Draw a domain by a function of labels, part and name, with equally frequent classes in an order set by the name."""

    def draw_split(part: str, size: int) -> Split:
        order = np.argsort(draw_integers(f"{name}/{part}/order", 0, 2**62, size), kind="stable")
        labels = (np.arange(size, dtype=np.int64) % 10)[order]
        return _make_split(draw(labels, part, f"{name}/{part}"), labels)

    return Domain(name, draw_split("train", TRAIN_SIZE[name]), draw_split("test", TEST_SIZE))
