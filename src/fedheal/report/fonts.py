"""Names in any script on figures: with an installed font that has their letters, or escaped if there is none.

matplotlib draws a box, and warns, for a letter that its font lacks.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


def find_families(figure: Figure) -> list[str]:
    """Return the families that have the letters of a figure: the usual one and, if letters are missing, one more."""
    missing = frozenset(_collect_letters(figure) - _read_letters(_find_file("sans-serif")))
    return ["sans-serif", *_find_family(missing)] if missing else ["sans-serif"]


def escape_missing(figure: Figure, families: list[str]) -> None:
    r"""Replace every letter that no family has, such as by `\u6f22`."""
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter

    known = frozenset("\n").union(*(_read_letters(_find_file(name)) for name in families))
    if not _collect_letters(figure) - known:
        return

    def escape(text: str) -> str:
        return "".join(c if c in known else c.encode("unicode_escape").decode() for c in text)

    for axis in _list_axes(figure):
        if frozenset("".join(label.get_text() for label in axis.get_majorticklabels())) - known:
            write = axis.get_major_formatter()  # it would write the labels again
            axis.set_major_formatter(FuncFormatter(lambda x, place, write=write: escape(write(x, place))))
    for text in figure.findobj(Text):
        text.set_text(escape(text.get_text()))


def _collect_letters(figure: Figure) -> frozenset[str]:
    from matplotlib.text import Text

    for axis in _list_axes(figure):
        axis.get_majorticklabels()  # which are not written before
    return frozenset("".join(text.get_text() for text in figure.findobj(Text))) - {"\n"}


def _list_axes(figure: Figure) -> list[Axis]:
    return [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]


@cache
def _find_file(family: str) -> str:
    from matplotlib.font_manager import FontProperties, findfont

    return str(findfont(FontProperties(family=[family])))


@cache
def _read_letters(file: str) -> frozenset[str]:
    from matplotlib.font_manager import get_font

    return frozenset(map(chr, get_font(file).get_charmap()))


@cache
def _find_family(letters: frozenset[str]) -> list[str]:
    """Return the installed family that has most of these letters; none if no font has any."""
    from matplotlib.font_manager import fontManager

    # The Last Resort font has a box for every letter there is.
    files = {entry.name: entry.fname for entry in fontManager.ttflist if "Last Resort" not in entry.name}
    have = {name: len(letters & _read_letters(file)) for name, file in sorted(files.items())}
    best = max(have, key=have.__getitem__, default="")
    return [best] if have.get(best) else []
