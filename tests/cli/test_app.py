"""What all commands have in common."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import fedheal
from command_line import assert_sentence, read_files
from tiny_data import WORDS

INTO = {
    "run": ["run", *WORDS],
    "compare": ["compare", "fedavg", "--data", "tiny_data:load"],
    "sweep": ["sweep", *WORDS, "lr=0.1,0.2"],
    "reproduce": ["reproduce", "table1", "--smoke"],
    "demo": ["demo"],
    "data show": ["data", "show", "tiny_data:load"],
}


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["run", "--help"], ["demo", "--help"]])
def test_version_and_help(call, words: list[str]) -> None:
    done = call(*words)
    assert (done.code, done.err) == (0, "")
    assert done.out.strip() == f"fedheal {fedheal.__version__}" if words == ["--version"] else "Usage" in done.out


@pytest.mark.parametrize("command", INTO.values(), ids=INTO)
@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("taken", "fedheal: taken is a file: name another folder"),
        ("taken/deep/here", "fedheal: taken/deep/here cannot be made, since taken is a file: name another folder"),
    ],
)
def test_a_file_where_a_folder_should_go_is_a_sentence(
    call, tmp_path: Path, command: list[str], out: str, message: str
) -> None:
    (tmp_path / "taken").write_text("mine")
    assert_sentence(call(*command, "--out", out), message)
    assert read_files(tmp_path) == {"taken": b"mine"}


@pytest.mark.parametrize("command", [["demo"], ["compare", "fedavg"], ["sweep", "tau=0,0.3"]])
def test_fewer_than_no_runs_at_a_time_are_refused(call, tmp_path: Path, command: list[str]) -> None:
    assert_sentence(call(*command, "--jobs", "-2"), "jobs = -2", "0 for as many as this machine takes")
    assert list(tmp_path.iterdir()) == []


def test_the_next_command_is_one_that_the_shell_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / ".venv" / "bin" / "fedheal"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert sys.modules["fedheal.cli.app"]._find_command() == ".venv/bin/fedheal"
    monkeypatch.chdir(program.parent.parent)
    assert sys.modules["fedheal.cli.app"]._find_command() == "bin/fedheal"
    monkeypatch.setenv("PATH", str(program.parent))
    assert sys.modules["fedheal.cli.app"]._find_command() == "fedheal"
