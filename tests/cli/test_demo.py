"""`fedheal demo`: the same bits twice, and a table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedheal
from command_line import CONTROL, assert_sentence, read_files


@pytest.mark.parametrize("words", [["demo", "--rounds", "0"], ["demo", "--seed", "-1"]])
def test_wrong_options_of_the_demo_are_a_sentence(call, tmp_path: Path, words: list[str]) -> None:
    assert_sentence(call(*words), words[1].strip("-"), words[2])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_demo_in_two_processes_gives_a_table_and_the_bits_of_a_run_in_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedheal", "demo", "--rounds", "1", "--jobs", "2", "--out", str(tmp_path / "one")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert CONTROL.search(done.stdout) is None
    one = read_files(tmp_path / "one")
    assert "one/report.html (open it in a browser)" in done.stdout
    assert b"Accuracy by domain" in one["report.html"]
    assert "in the last round" in done.stdout
    models = [name for name in one if name.endswith("model.safetensors")]
    assert len(models) == 4
    assert len({one[name] for name in models}) == 4  # four different methods
    fedheal.run(fedheal.Experiment(method="fedheal", data="embedded", rounds=1), tmp_path / "two", progress=False)
    again = (tmp_path / "two" / "model.safetensors").read_bytes()
    assert one["fedavg+fedheal-embedded-seed0/model.safetensors"] == again
    header = next(line for line in done.stdout.splitlines() if "method" in line and "AVG" in line)
    assert re.findall(r"\w+", header) == ["method", "handwritten", "print", "street", "display", "AVG", "STD", "worst"]
    table = done.stdout[done.stdout.index(header) :].splitlines()
    rows = [line for line in table if len(re.findall(r"\d+\.\d", line)) == 7]
    methods = [re.findall(r"fed[\w+:=]*", row)[0] for row in rows]
    assert methods == ["fedavg", "fedavg+uniform", "fedavg+fedheal", "fedavg+fedheal:variant=released"]
    for row, method in zip(rows, methods, strict=True):
        folder = tmp_path / "one" / f"{method.replace(':', '_')}-embedded-seed0"
        result = json.loads((folder / "result.json").read_text())
        shown = [f"{x:.1f}" for x in (*result["domains"].values(), result["avg"], result["std"], result["worst"])]
        assert re.findall(r"\d+\.\d", row) == shown
