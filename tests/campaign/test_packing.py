"""The benchmark of runs that share a GPU, as far as it goes without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "packing.py"


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    blind = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARK), *words]
    return subprocess.run(command, env=blind, capture_output=True, text=True, check=False, timeout=300)


def assert_sentence(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_no_gpu_is_a_sentence():
    assert_sentence(ran(), "there is no GPU here")


@pytest.mark.slow
def test_what_cannot_be_measured_is_a_sentence():
    assert_sentence(ran("--models", "vgg"), "models = vgg")
    assert_sentence(ran("--at-a-time", "1,x"), "at-a-time = 1,x")


@pytest.mark.slow
def test_processes_are_timed_together():
    done = ran("--device", "cpu", "--models", "small_cnn", "--at-a-time", "1,2", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    lines = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith(("| 1 ", "| 2 "))]
    assert [int(number) for number, *_ in lines] == [1, 2]
    for _, seconds, rate, _ in lines:
        assert float(rate) == pytest.approx(1 / float(seconds), abs=0.06)
