"""The benchmark of runs that share a GPU, as far as it goes without one."""

from __future__ import annotations

import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiny_data

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def packing(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import packing

    return packing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no GPU here"),
        (["--models", "vgg"], "models = vgg"),
        (["--at-a-time", "1,x"], "at-a-time = 1,x"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(packing, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["packing.py", *arguments])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        packing.main()
    assert end.value.code == 2
    output = capsys.readouterr()
    assert message in output.err
    assert len(output.err.splitlines()) == 1
    assert output.out == ""


class SharedEnd:
    """One end of a pipe for a thread; a process would have its own copy, which its parent's `close` leaves open."""

    def __init__(self, end):
        self.send, self.recv, self.close = end.send, end.recv, lambda: None


def make_pipe():
    here, there = Pipe()
    return here, SharedEnd(there)


def test_runs_are_timed_together(packing, monkeypatch, capsys):
    """Threads replace the processes, and `sleep` replaces a round."""

    def serve_naps(model, device, precision, parent):
        parent.send(packing.WarmUp(0.1, 0))
        while rounds := parent.recv():
            time.sleep(0.02 * rounds)
            parent.send(rounds)

    context = SimpleNamespace(Pipe=make_pipe, Process=threading.Thread)
    monkeypatch.setattr(packing, "get_context", lambda _: context)
    monkeypatch.setattr(packing, "serve_rounds", serve_naps)
    packing.time_workers("small_cnn", "cpu", "fp32", [1, 4], 2)
    lines = [
        line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith(("| 1 ", "| 4 "))
    ]
    assert [int(number) for number, *_ in lines] == [1, 4]
    for _, seconds, rate, _ in lines:
        assert float(rate) == pytest.approx(1 / float(seconds), rel=0.02)
    alone, together = (float(seconds) for _, seconds, *_ in lines)
    assert together < alone / 2  # they nap at the same time


def test_a_run_trains_when_it_is_told_to(packing, monkeypatch):
    monkeypatch.setattr(packing, "make_experiment", lambda model, device, precision: tiny_data.quick(device=device))
    monkeypatch.setattr(packing, "make_domains", lambda protocol: tiny_data.load())
    trained = []
    run_round = packing.run_round
    monkeypatch.setattr(packing, "run_round", lambda *words: trained.append(words) or run_round(*words))
    here, there = Pipe()
    for rounds in (3, 0):
        here.send(rounds)
    packing.serve_rounds("small_cnn", "cpu", "fp32", there)
    assert here.recv().reserved_bytes == 0
    assert here.recv() == 3
    assert len(trained) == 2 + 3  # two to warm up
