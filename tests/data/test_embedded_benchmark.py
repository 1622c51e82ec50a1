"""The embedded data puts fairness at stake: the committed experiment, one seed and a few of its twenty rounds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "embedded.py"


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "least"), [(3, 70), pytest.param(5, 80, marks=pytest.mark.soak)])
def test_every_domain_can_be_learnt_and_fedavg_leaves_one_behind(rounds, least):
    spec = importlib.util.spec_from_file_location("embedded_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    table = module.measure_accuracies(seed=0, rounds=rounds, with_pooled=False, eval_every=rounds)
    assert min(table["alone"].values()) >= least
    worst = min(table["fedavg"], key=table["fedavg"].get)
    assert 20 < table["fedavg"][worst] <= table["alone"][worst] - 15
    assert table["fedavg+uniform"][worst] > table["fedavg"][worst] + 5
