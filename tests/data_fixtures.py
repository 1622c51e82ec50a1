"""Fixtures for tests of data and of commands: their own cache, no data of the machine, and the command line in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from command_line import Done, cli
from tiny_data import WORDS


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep prepared data in a folder of the test's own, and find none of the machine's data by chance."""
    folder = tmp_path_factory.mktemp("prepared") / "cache"
    monkeypatch.setenv("FEDHEAL_CACHE", str(folder))
    monkeypatch.delenv("FEDHEAL_DATA", raising=False)
    return folder


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """A function that runs `fedheal` with these arguments in the test's folder and returns its exit code and output."""

    def call_command(*arguments: object) -> Done:
        monkeypatch.chdir(tmp_path)
        # A later field replaces one of WORDS: on a command line each field may appear once.
        texts = [str(argument) for argument in arguments]
        keys = [text.partition("=")[0] for text in texts]
        words = [text for i, text in enumerate(texts) if not (text in WORDS and keys[i] in keys[i + 1 :])]
        monkeypatch.setattr(sys, "argv", ["fedheal", *words])
        capfd.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return Done(code, *capfd.readouterr())

    return call_command
