"""The text of figures in any script: find the fonts for it, escape the letters that none has, and shorten long names.

Names come from the clients of a federation, and may hold anything. matplotlib reads `$...$` as mathematics, unless `PLAIN_TEXT`
is among its settings.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any

from fedheal.core.fonts import escape_letters, find_families
from fedheal.report.plain_text import escape_controls

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PLAIN_TEXT: Any = {"text.parse_math": False, "text.usetex": False}  # settings of matplotlib: a name is not a formula
MAX_WIDTH = 32  # of a name in a figure, in Latin letters: axes one column wide keep half of the width


def shorten_name(name: str) -> str:
    """Return a name that fits beside an axis or into a legend: on one line, and without its middle if it is long."""
    families = find_families(name)
    letters = [escape_controls(escape_letters(letter, families)) for letter in name]
    if measure_name("".join(letters)) <= MAX_WIDTH:
        return escape_controls(name)
    while measure_name("".join(letters)) >= MAX_WIDTH:
        del letters[len(letters) * 2 // 3]  # names of one site often differ at their ends
    middle = len(letters) * 2 // 3
    return "".join([*letters[:middle], "…", *letters[middle:]])


def measure_name(name: str) -> int:
    """Return about how wide a name is, in Latin letters; Chinese and the like are twice as wide."""
    return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in name)


def find_figure_families(figure: Figure) -> list[str]:
    """Return the font families that have the letters of a figure."""
    return find_families(_collect_text(figure))


def escape_figure(figure: Figure, families: list[str]) -> None:
    """Escape every letter of a figure that no family has."""
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter

    text = _collect_text(figure)
    if escape_letters(text, families) == text:
        return
    for axis in _list_axes(figure):
        labels = "".join(label.get_text() for label in axis.get_majorticklabels())
        if escape_letters(labels, families) != labels:
            write = axis.get_major_formatter()  # it would write the labels again
            axis.set_major_formatter(FuncFormatter(lambda x, at, write=write: escape_letters(write(x, at), families)))
    for part in figure.findobj(Text):
        part.set_text(escape_letters(part.get_text(), families))


def _collect_text(figure: Figure) -> str:
    from matplotlib.text import Text

    for axis in _list_axes(figure):
        axis.get_majorticklabels()  # which are not written before
    return "".join(part.get_text() for part in figure.findobj(Text))


def _list_axes(figure: Figure) -> list[Axis]:
    return [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
