"""The text of figures in any script: find the fonts for it, and escape the letters that none has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedheal.core.fonts import escape_letters, find_families

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


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
