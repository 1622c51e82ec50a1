"""Short slices of `benchmarks/fuzz.py` and `benchmarks/soak.py`, which `make soak` runs as a whole."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
INPUTS = {
    "command lines": 2,
    "experiment files": 4,
    "method names": 30,
    "run folders": 3,
    "data files": 6,
    "Flower replies": 8,
    "updates": 15,
}


@pytest.fixture
def load(monkeypatch):
    """A function that loads a benchmark from its folder. The path, which that changes, is restored."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])

    def load_benchmark(name):
        spec = importlib.util.spec_from_file_location(f"{name}_benchmark", BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load_benchmark


@pytest.mark.parametrize("target", INPUTS)
def test_wrong_inputs_end_with_a_result_or_a_sentence(load, tmp_path, monkeypatch, target):
    fuzz = load("fuzz")
    monkeypatch.setenv("FEDHEAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDHEAL_DATA", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with warnings.catch_warnings():  # of libraries, about odd files
        warnings.simplefilter("ignore")
        outcome = fuzz.run_target(target, INPUTS[target], 0, tmp_path, tries_bombs=False)
    assert outcome.failures == []
    assert outcome.inputs == INPUTS[target]


def test_an_input_that_waits_or_computes_too_long_hangs_and_one_on_a_busy_machine_does_not(load, tmp_path, monkeypatch):
    load("fuzz")
    import guard

    monkeypatch.setattr(guard, "LEAST_SECONDS", 0.02)
    watched = guard.Guard(guard.Limits(seconds=0.5), guard.WriteWatch([tmp_path]), [])

    def alternate():  # as on a machine whose cores others use, too: longer than the limit on the clock
        end = time.monotonic() + 4
        while time.monotonic() < end:
            time.sleep(0.01)
            sum(range(40_000))
        return "accepted"

    def compute():
        while True:
            sum(range(10_000))

    assert watched.run(alternate) == "accepted"
    for attempt in (lambda: time.sleep(60), compute):
        began = time.monotonic()
        with pytest.raises(guard.Hang):
            watched.run(attempt)
        assert time.monotonic() - began < 30


def test_only_bombs_are_written_before_the_clock_starts(load, tmp_path):
    load("fuzz")
    from data_files import DataFiles

    (tmp_path / "play").mkdir()
    target, written = DataFiles(tmp_path), []
    for kind in (*target.kinds, "bomb idx", "bomb zip of depth"):
        target.prepare((kind, 0, True, [], []))
        written += [kind] * any(target.folder.iterdir())
    assert written == ["bomb idx", "bomb zip of depth"]


def test_every_target_has_a_slice(load):
    assert load("fuzz").TARGETS.keys() == INPUTS.keys()


def test_sites_that_come_and_go_are_counted_exactly(load, tmp_path):
    soak = load("soak")
    trial = soak.Soak(0, tmp_path / "run")
    trial.execute(25)
    assert trial.failures == []
    assert trial.oracle.find_difference(soak.find_state(trial.strategy.state)) == ""
    assert trial.measurements.events.keys() >= {"joins", "leaves", "falls silent", "twice"}
    trial.oracle.n["site-00"] += 1  # the oracle sees what is wrong
    assert "site-00" in trial.oracle.find_difference(soak.find_state(trial.strategy.state))


def test_a_trial_may_be_repeated_in_its_folder(load, tmp_path):
    soak = load("soak")
    for _ in range(2):
        soak.Soak(0, tmp_path / "run").execute(3)
    assert len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) == 3
