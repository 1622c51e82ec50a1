"""Fixtures for tests that read data: their own cache, no data directory of the machine, and the command line in-process."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

with warnings.catch_warnings():  # typer still imports names that click has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from fedheal import cli


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "cache"
    monkeypatch.setenv("FEDHEAL_CACHE", str(folder))
    monkeypatch.delenv("FEDHEAL_DATA", raising=False)
    return folder


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """`fedheal` with these words, in a folder of its own, as a process would end."""

    def called(*words: object) -> Done:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["fedheal", *map(str, words)])
        capfd.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        return Done(code, *capfd.readouterr())

    return called
