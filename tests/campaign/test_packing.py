"""The benchmark of runs that share a GPU, as far as it goes without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no GPU here"),
        (["--models", "vgg"], "models = vgg"),
        (["--at-a-time", "1,x"], "at-a-time = 1,x"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(arguments, message, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import packing

    monkeypatch.setattr(sys, "argv", ["packing.py", *arguments])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        packing.main()
    assert end.value.code == 2
    output = capsys.readouterr()
    assert message in output.err
    assert len(output.err.splitlines()) == 1
    assert output.out == ""


@pytest.mark.slow
def test_processes_are_timed_together():
    words = ["--device", "cpu", "--models", "small_cnn", "--at-a-time", "2", "--rounds", "1"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / "packing.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith(("| 1 ", "| 2 "))]
    assert [int(number) for number, *_ in lines] == [2]
    for _, seconds, rate, _ in lines:
        assert float(rate) == pytest.approx(1 / float(seconds), abs=0.06)
