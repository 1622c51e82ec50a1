"""Colours that people with any colour vision can distinguish, the same for a domain or a method in every figure.

Domains take those of Okabe and Ito (2008), methods those of Tol's "muted" set; both have lighter twins for dark pages. A
method's colour, marker and dash follow from its name alone, so that it looks the same in every figure, page and run.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

DOMAINS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#6B6B6B")
DOMAINS_DARK = ("#5AB0E8", "#F2894A", "#33C79B", "#E3A3C6", "#F3BE55", "#9AD4F5", "#B79AD6", "#B5B5B5")
METHODS = ("#332288", "#CC6677", "#117733", "#88CCEE", "#AA4499", "#999933", "#882255", "#44AA99", "#DDAA33", "#777777")
METHODS_DARK = (
    "#A7A1E8", "#F29BA8", "#6CC788", "#A6DDF5", "#DB8ED0", "#CFCF6A", "#D987A8", "#7FD6C8", "#F0CB6E", "#B8B8B8"
)  # fmt: skip
PHASE_COLOURS = (METHODS[3], METHODS[1], METHODS[5])  # of a round
PHASE_COLOURS_DARK = (METHODS_DARK[3], METHODS_DARK[1], METHODS_DARK[5])
# These have a colour each, circles and solid lines. Any other name has a colour by its checksum, and never both of these.
KNOWN = ("fedavg", "uniform", "fedheal", "afl", "qffl", "fedprox", "scaffold", "moon", "feddyn", "fedfv")
MARKERS = ("o", "s", "D", "^", "v")  # matplotlib's
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down")  # Plotly's
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")  # Plotly's


class Look(NamedTuple):
    """How a method is drawn."""

    colour: str
    dark: str  # the colour on a dark page
    marker: str
    symbol: str
    dash: str


def domain_colour(number: int) -> str:
    """Return the colour of the domain with this number in its data set; colours repeat after eight."""
    return DOMAINS[number % len(DOMAINS)]


def method_look(name: str) -> Look:
    """Return how a method is drawn, by its name alone; `fedheal` is `fedavg+fedheal`.

    >>> method_look("fedavg+fedheal") == method_look("fedheal"), method_look("fedavg").symbol
    (True, 'circle')
    >>> method_look("moon+fedheal").symbol != "circle"
    True
    """
    short = name.removeprefix("fedavg+")
    if short in KNOWN:
        colour, shape = KNOWN.index(short), 0
    else:
        shape, colour = divmod(zlib.crc32(short.encode()) % ((len(MARKERS) - 1) * len(METHODS)), len(METHODS))
        shape += 1
    return Look(METHODS[colour], METHODS_DARK[colour], MARKERS[shape], SYMBOLS[shape], DASHES[shape])
