"""Checks of what a benchmark is given: what is wrong ends it with a sentence and exit code 2.

`parse_*` are types of command-line arguments: argparse turns what they raise into that sentence.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def require_flower() -> None:
    """End the program if Flower is not installed."""
    try:
        import fedheal.flower  # noqa: F401
    except ImportError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


def parse_positive(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse_names(known: tuple[str, ...]) -> object:
    """Return a type for names with commas between them, all of which must be known."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; use some of {','.join(known)}")
        return names

    return parse
