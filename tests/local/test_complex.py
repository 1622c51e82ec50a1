"""A complex parameter is trained as its two parts are, whatever the term."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fedheal.engine.serial import SerialEngine
from fedheal.simulate.build import build_federation
from fedheal.simulate.evaluation import select_evaluated_model
from fedheal.simulate.round import initial_state, run_round
from tiny_data import load, quick


@cache
def train_model(method: str, model: str) -> torch.Tensor:
    fed = build_federation(quick(method=method, model=f"local.waves:{model}"), load(), torch.device("cpu"))
    state = initial_state(fed)
    for _ in range(3):
        state, _ = run_round(fed, state, SerialEngine(fed.local_training), False)
    return select_evaluated_model(fed, state.model, state.terms).params


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["fedavg+fedheal", "fedprox:mu=0.5", "scaffold", "scaffold:option=1", "feddyn:alpha=0.5", "ditto:lam=0.5"]
)
def test_a_complex_parameter_is_trained_as_its_two_parts(method: str) -> None:
    whole, parts = (train_model(method, model) for model in ("Waves", "TwoParts"))
    assert torch.allclose(whole, parts, atol=1e-5)
    assert not torch.allclose(whole, train_model("fedavg", "Waves"), atol=1e-4)
