"""A short slice of `benchmarks/chaos.py`, which breaks a deployment every other round."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from needs import needs

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
SEED = 7  # its first fault is a full disk


@pytest.fixture
def chaos(monkeypatch):
    """The module `benchmarks/chaos.py`."""
    monkeypatch.setattr(sys, "path", [str(CHAOS.parent), *sys.path])
    spec = importlib.util.spec_from_file_location("chaos_benchmark", CHAOS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_seed_plans_every_kind_of_fault_for_every_other_round(chaos):
    faults = chaos.plan_faults(60, seed=0)
    assert faults == chaos.plan_faults(60, seed=0)
    assert faults != chaos.plan_faults(60, seed=1)
    assert [fault.due for fault in faults] == list(range(2, 60, 2))
    assert {fault.kind for fault in faults} == {*chaos.AT_SERVER, *chaos.AT_SITE}


@pytest.mark.slow
def test_the_model_without_faults_depends_on_who_counted_in_each_round(chaos):
    initial, nobody, all_twice = (
        chaos.make_model(),
        chaos.replay_cohorts([[], []]),
        chaos.replay_cohorts([chaos.NAMES, chaos.NAMES]),
    )
    assert nobody.keys() == initial.keys()
    assert all(nobody[key].equal(value) for key, value in chaos.to_tensors(initial).items())
    assert not all_twice["bias"].equal(nobody["bias"])
    assert not all_twice["bias"].equal(chaos.replay_cohorts([chaos.NAMES, chaos.NAMES[1:]])["bias"])


@pytest.mark.soak
def test_a_deployment_whose_disk_was_full_ends_with_the_model_of_its_cohorts(chaos, tmp_path):
    needs("root", "netns", "tmpfs")
    words = ["--rounds", "3", "--seed", str(SEED), "--seconds", "300", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, CHAOS, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "chaos.json").read_text())
    (fault,) = summary["faults"]
    assert fault["kind"] == "full disk"
    assert fault["recorded"].endswith("resumed")
    assert "No space left on device" in (tmp_path / "run-run.log").read_text()
    assert len(summary["checks"]) == 3

    # The checks that passed can fail: one number of the model, then a round that is there twice, then an unseen fault.
    run, checks = tmp_path / "run", []
    model = load_file(run / "model.safetensors")
    model["bias"][0] += 1e-6
    save_file(model, run / "model.safetensors")
    checks.append(chaos.check_outcome(run, [], 3))
    lines = (run / "rounds.jsonl").read_text().splitlines(keepends=True)
    (run / "rounds.jsonl").write_text("".join([*lines, lines[-1]]))
    checks.append(chaos.check_outcome(run, [chaos.Fault("hang", 2, 0.0)], 3))
    assert [list(check.values()) for check in checks] == [[True, True, False], [False, False, False]]
