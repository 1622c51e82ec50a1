"""Names in text: keep each on its line and no part of the markup, whatever it holds."""

import re
import unicodedata


def escape_controls(text: str) -> str:
    r"""Escape what breaks a line, moves a cursor or turns the direction of writing.

    >>> escape_controls("two\nlines\x1b[2J")
    'two\\nlines\\x1b[2J'
    """
    return "".join(c if _is_visible(c) else c.encode("unicode_escape").decode() for c in text)


def escape_markdown(text: str) -> str:
    r"""Escape what Markdown reads as the end of a cell, as HTML or as a link.

    >>> escape_markdown("<b>a|b[c](d)")
    '\\<b>a\\|b\\[c](d)'
    """
    return re.sub(r"([\\|<\[])", r"\\\1", escape_controls(text))


def _is_visible(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"  # a space of any width
