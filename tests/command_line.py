"""Call the command line in tests, and check what it prints."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

with warnings.catch_warnings():  # typer still imports names that click has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from fedheal import cli

__all__ = ["CONTROL", "ENVIRONMENT", "Done", "assert_sentence", "cli", "read_files"]

TESTS = Path(__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])}
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Done:
    """A command that has ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


def assert_sentence(done: Done, *words: str) -> None:
    """Assert that a command printed one sentence with these words to stderr, nothing else, and ended with code 2."""
    assert "Traceback" not in done.err
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("fedheal: ")
    assert done.err.count("\n") == 1, done.err
    for word in words:
        assert word in done.err, done.err


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
