"""Four domains of digits that need no download, with unequal shares: a small stage for questions of fairness.

- `handwritten`: 8 x 8 pen digits of the UCI repository as shipped with scikit-learn (Alpaydin, Kaynak).
- `print`: digits of free fonts on paper; training and test fonts are different families.
- `street`: the same fonts as house numbers, with colour, neighbours, perspective, clutter and blur.
- `display`: noisy seven-segment displays whose unlit segments show; few samples, unlike anything else here.

The first two are large and easy and dominate an average by sample count; the last is small and pays for it.
The images are computed at load time in integer arithmetic, so their bytes are the same everywhere;
`FINGERPRINT` pins them. The glyphs come from `glyphs.npz` (made by `tools/make_glyph_atlas.py`; families and
licences are in `glyphs.json`).
"""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch
from sklearn.datasets import load_digits

from fedheal.data.domains import Domain, Domains, Split, fingerprint
from fedheal.data.embedded import scenes as _scenes
from fedheal.data.embedded.draw import Ints, integers
from fedheal.data.embedded.raster import bytes_of

# The usual federation: per domain, in the order handwritten, print, street, display.
CLIENTS_PER_DOMAIN = (3, 3, 3, 3)
SAMPLES_PER_CLIENT = (400, 400, 300, 80)

TRAIN_SIZE = {"print": 1500, "street": 1500, "display": 400}
TEST_SIZE = 500
WRITERS_BOUNDARY = 1287  # handwritten: the fixed order of digits that every writer copied starts anew here

# Seven-segment displays seen in testing are bolder and lean more than any in training.
TRAIN_STYLE = _scenes.SegmentStyle(half_thickness=(500, 760), slant=(0, 40))
TEST_STYLE = _scenes.SegmentStyle(half_thickness=(761, 900), slant=(41, 50))

FINGERPRINT = "6560c4cc84828a5bfe3f78aa31c065d56d0eb9a5c0cd78d43440589b3e171eb9"


def load() -> Domains:
    """Draw the data set and check that its bytes are the known ones."""
    data = draw()
    found = fingerprint(data)
    if found != FINGERPRINT:
        raise ValueError(
            f"the embedded digits have the fingerprint {found} instead of {FINGERPRINT}: scikit-learn's digits or "
            "the glyph atlas are not those this version of fedheal was made with, so results would not compare"
        )
    return data


def draw() -> Domains:
    """The data set, unchecked."""
    return Domains(
        name="embedded",
        classes=tuple(str(digit) for digit in range(10)),
        domains=(_handwritten(), _print(), _street(), _display()),
        clients_per_domain=CLIENTS_PER_DOMAIN,
        samples_per_client=SAMPLES_PER_CLIENT,
    )


def _split(images: Ints, labels: Ints) -> Split:
    return Split(torch.from_numpy(bytes_of(images)), torch.from_numpy(labels.astype(np.int64)))


def _labels(name: str, size: int) -> Ints:
    """As many of each class as possible, in an order given by the name."""
    order = np.argsort(integers(f"{name}/order", 0, 2**62, size), kind="stable")
    return (np.arange(size, dtype=np.int64) % 10)[order]


def _glyphs(part: str) -> Ints:
    with resources.files("fedheal.data.embedded").joinpath("glyphs.npz").open("rb") as file, np.load(file) as atlas:
        glyphs: Ints = atlas[part].astype(np.int64)
    return glyphs


def _handwritten() -> Domain:
    pens = load_digits()
    images = _scenes.handwritten(pens.images.astype(np.int64))
    labels, cut = pens.target, WRITERS_BOUNDARY
    return Domain("handwritten", _split(images[:cut], labels[:cut]), _split(images[cut:], labels[cut:]))


def _print() -> Domain:
    def part(name: str, size: int) -> Split:
        labels = _labels(f"print/{name}", size)
        return _split(_scenes.printed(labels, _glyphs(name), f"print/{name}"), labels)

    return Domain("print", part("train", TRAIN_SIZE["print"]), part("test", TEST_SIZE))


def _street() -> Domain:
    def part(name: str, size: int) -> Split:
        labels = _labels(f"street/{name}", size)
        return _split(_scenes.street(labels, _glyphs(name), f"street/{name}"), labels)

    return Domain("street", part("train", TRAIN_SIZE["street"]), part("test", TEST_SIZE))


def _display() -> Domain:
    def part(name: str, size: int, style: _scenes.SegmentStyle) -> Split:
        labels = _labels(f"display/{name}", size)
        return _split(_scenes.display(labels, style, f"display/{name}"), labels)

    train = part("train", TRAIN_SIZE["display"], TRAIN_STYLE)
    return Domain("display", train, part("test", TEST_SIZE, TEST_STYLE))
