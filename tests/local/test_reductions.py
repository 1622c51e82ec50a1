"""Methods that must become another one, bit for bit, where a parameter or the first round takes their difference away."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from fedheal.core.state import RunState
from fedheal.engine.serial import SerialEngine
from fedheal.simulate.build import build_federation
from fedheal.simulate.round import initial_state, run_round
from tiny_data import load, quick
from tiny_runs import is_same


@cache
def run_method(method: str, rounds: int, **keys: Any) -> RunState:
    fed = build_federation(
        quick(**{"method": method, "model": "tiny_data:feature_model"} | keys), load(), torch.device("cpu")
    )
    state = initial_state(fed)
    for _ in range(rounds):
        state, _ = run_round(fed, state, SerialEngine(fed.local_training), evaluate=False)
    return state


pytestmark = pytest.mark.slow
SETTINGS = [{}, {"participation": 0.6, "dropout": 0.2, "augment": "crop-flip"}]


@pytest.mark.parametrize("keys", SETTINGS, ids=["everyone", "some"])
@pytest.mark.parametrize(
    ("method", "other"),
    [
        ("fedprox:mu=0", "fedavg"),
        ("moon:mu=0", "fedavg"),
        ("fedproto:lam=0", "fedavg"),
        ("ditto", "fedavg"),
        ("ditto:lam=0", "fedavg"),
        ("feddyn:preset=group", "fedavg"),
        ("fedprox:preset=group", "fedprox:mu=0.0001"),
        ("fedprox:mu=0+fedheal", "fedheal"),
        ("moon:mu=0+afl", "afl"),
        ("fedsam:rho=0", "fedavg"),
        ("fedlesam:rho=0", "fedavg"),
        ("feddg:outer=0", "fedavg"),
        ("fedism:alpha=0,q=0", "fedsam:rho=0.05+uniform"),
    ],
)
def test_the_same_bits_after_three_rounds(method: str, other: str, keys: dict[str, Any]) -> None:
    assert is_same(run_method(method, 3, **keys).model, run_method(other, 3, **keys).model)


@pytest.mark.parametrize(
    ("method", "other"),
    [
        ("scaffold", "uniform"),
        ("scaffold:option=1", "uniform"),
        ("scaffold:fair_controls=p", "uniform"),
        ("scaffold+afl", "afl"),
        ("scaffold+fedheal", "fedheal"),
        ("moon", "fedavg"),
        ("fedproto", "fedavg"),
        ("fedproc", "fedavg"),
        ("fpl", "fedavg"),
        ("fedlesam", "fedavg"),
        ("feddg", "fedavg"),
    ],
)
def test_the_first_round_has_nothing_to_go_by_yet(method: str, other: str) -> None:
    assert is_same(run_method(method, 1).model, run_method(other, 1).model)
    assert not is_same(run_method(method, 2).model, run_method(other, 2).model)


@pytest.mark.parametrize(
    "name", ["fedprox", "fedproto", "moon", "ditto:feedback=true", "scaffold", "feddyn", "fedproc", "fedsam"]
)
def test_without_its_parameter_taken_away_a_method_is_another_one(name: str) -> None:
    assert not is_same(run_method(name, 3).model, run_method("fedavg", 3).model)


def test_feddyns_average_is_uniform_fedavgs_local_models_of_a_first_round_with_a_tiny_alpha() -> None:
    """The regulariser vanishes with alpha and what is judged is the plain mean; the broadcast model goes twice as far."""
    state, plain = run_method("feddyn:alpha=1e-9,clip=0", 1), run_method("uniform", 1)
    start = run_method("uniform", 0)
    average = state.terms[0].shared["average"]
    assert torch.allclose(average, plain.model.params, atol=1e-6)
    assert torch.allclose(
        state.model.params - start.model.params, 2 * (plain.model.params - start.model.params), atol=1e-5
    )


def test_unweighted_methods_and_weights_by_examples() -> None:
    """SCAFFOLD and FedDyn average evenly unless a stage says otherwise; the others by examples."""
    for name in ("scaffold", "feddyn"):
        assert is_same(run_method(name, 2).model, run_method(f"{name}+uniform", 2).model)
    for name in ("fedprox", "moon", "fedproto"):
        assert not is_same(run_method(name, 2).model, run_method(f"{name}+uniform", 2).model)
