"""The embedded data puts fairness at stake: the committed experiment, one seed and five of its twenty rounds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "embedded.py"


@pytest.mark.slow
def test_every_domain_can_be_learnt_and_fedavg_leaves_one_behind():
    spec = importlib.util.spec_from_file_location("embedded_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    table = module.study(seed=0, rounds=5, with_pooled=False, eval_every=5)
    assert min(table["alone"].values()) >= 80
    worst = min(table["fedavg"], key=table["fedavg"].get)
    assert 20 < table["fedavg"][worst] <= table["alone"][worst] - 15
    assert table["fedavg+uniform"][worst] > table["fedavg"][worst] + 5
