"""Check the command line of a benchmark. A wrong argument ends the benchmark with one sentence and exit code 2.

`parse_*` are types of command-line arguments. argparse turns their errors into that sentence.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def exit_with_error(message: str) -> NoReturn:
    """Print the benchmark's name and a message to stderr, and exit with code 2."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)


def require_flower() -> None:
    """Exit with an error if Flower is not installed."""
    try:
        import fedheal.flower  # noqa: F401
    except ImportError as error:
        exit_with_error(str(error))


def parse_positive(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse_names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return an argument type for names separated by commas, all of which must be known."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; use some of {','.join(known)}")
        return names

    return parse
