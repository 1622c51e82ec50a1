"""Check the command line of a benchmark. A wrong argument ends the benchmark with one sentence and exit code 2.

`parse_*` are types of command-line arguments. argparse turns their errors into that sentence.
"""

from __future__ import annotations

import argparse
import math
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


def require_ray() -> None:
    """Exit with an error if Ray is not installed."""
    from fedheal.engine.ray_cluster import import_ray

    try:
        import_ray()
    except ValueError as error:
        exit_with_error(str(error))


def parse_positive(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse_seconds(text: str) -> float:
    """Return a finite number above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return seconds


def parse_folder(text: str) -> Path:
    """Return a folder that exists or can be made."""
    folder = Path(text)
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise argparse.ArgumentTypeError(f"{path} is a file: name another folder")
    return folder


def parse_names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return an argument type for names separated by commas, all of which must be known."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; use some of {','.join(known)}")
        return names

    return parse
