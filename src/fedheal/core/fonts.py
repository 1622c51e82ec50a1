"""Fonts for names in any script: an installed one that has their letters, and escapes for letters that none has.

matplotlib draws a box, and warns, for a letter that its font lacks.
"""

from functools import cache

USUAL = "DejaVu Sans"  # comes with matplotlib


def find_families(text: str) -> list[str]:
    """Return the font families to write a text with: the usual one and, if it lacks letters, the best installed one."""
    missing = frozenset(text) - read_letters(USUAL) - {"\n"}
    return [USUAL, *_find_fallback(missing)] if missing else [USUAL]


def escape_letters(text: str, families: list[str]) -> str:
    r"""Replace every letter that no family has by its code, such as `\u6f22`."""
    known = frozenset("\n").union(*map(read_letters, families))
    return "".join(c if c in known else c.encode("unicode_escape").decode() for c in text)


@cache
def find_font_file(family: str) -> str:
    """Return the path of an installed font."""
    from matplotlib.font_manager import FontProperties, findfont

    return str(findfont(FontProperties(family=[family])))


@cache
def read_letters(family: str) -> frozenset[str]:
    """Return the letters that a family has."""
    from matplotlib.font_manager import get_font

    return frozenset(map(chr, get_font(find_font_file(family)).get_charmap()))


@cache
def _find_fallback(letters: frozenset[str]) -> list[str]:
    """Return the installed family that has most of these letters; none if no font has any."""
    from matplotlib.font_manager import get_font_names

    # The Last Resort font has a box for every letter there is.
    families = [name for name in sorted(get_font_names()) if "Last Resort" not in name]
    have = {name: len(letters & read_letters(name)) for name in families}
    best = max(have, key=have.__getitem__, default="")
    return [best] if have.get(best) else []
