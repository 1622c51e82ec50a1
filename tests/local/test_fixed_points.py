"""Where drift-corrected methods converge: weights of the average alone do not decide it, those of the controls do.

Three clients with losses `1/2 (w - a)^T H (w - a)`; the optimum for weights q solves `sum q H w = sum q H a`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedheal.local.feddyn import FedDyn
from fedheal.local.fedprox import FedProx
from fedheal.local.scaffold import Scaffold
from fedheal.local.term import Term
from fedheal.simulate.evaluation import select_evaluated_model
from fedheal.simulate.round import drops_out, initial_state, run_round
from local.quadratic import make_engine, make_gradient, make_quadratic_federation, vector

pytestmark = pytest.mark.slow

P = {"a": 0.7, "b": 0.2, "c": 0.1}
UNIFORM = dict.fromkeys(P, 1 / 3)
CENTRES = {"a": vector(2.0, -1.0), "b": vector(-1.0, 2.0), "c": vector(0.0, 2.0)}
CURVATURES = {
    "a": torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=torch.float64),
    "b": torch.tensor([[0.6, -0.2], [-0.2, 1.5]], dtype=torch.float64),
    "c": torch.tensor([[2.0, 0.1], [0.1, 0.8]], dtype=torch.float64),
}
GRADIENTS = {name: make_gradient(CENTRES[name], CURVATURES[name]) for name in P}


def solve_optimum(q: dict[str, float]) -> Tensor:
    h = sum(q[c] * CURVATURES[c] for c in q)
    return torch.linalg.solve(h, sum(q[c] * CURVATURES[c] @ CENTRES[c] for c in q))


def find_limit(term: Term | None, p: dict[str, float], rounds: int, **keys: Any) -> tuple[Tensor, Tensor]:
    """Return the broadcast and the evaluated parameters after many rounds with the weights p."""
    fed = make_quadratic_federation(term, p, 2, **keys)
    state, engine = initial_state(fed), make_engine(fed, GRADIENTS)
    for _ in range(rounds):
        state, _ = run_round(fed, state, engine, evaluate=False)
    return state.model.params, select_evaluated_model(fed, state.model, state.terms).params


def find_last_distance(term: Term, p: dict[str, float], rounds: int, **keys: Any) -> float:
    """Return the largest distance to the optimum of p in the last 20 rounds, with clients that drop out."""
    fed = replace(make_quadratic_federation(term, p, 2, **keys), dropout=0.4)
    state, engine, distances = initial_state(fed), make_engine(fed, GRADIENTS), []
    for _ in range(rounds):
        state, _ = run_round(fed, state, engine, evaluate=False)
        distances.append(measure_distance(state.model.params, solve_optimum(p)))
    return max(distances[-20:])


def measure_distance(first: Tensor, other: Tensor) -> float:
    return float((first - other).norm())


def test_the_two_optima_are_apart() -> None:
    assert measure_distance(solve_optimum(P), solve_optimum(UNIFORM)) > 0.5
    for q in (P, UNIFORM):
        assert sum(q[c] * GRADIENTS[c](solve_optimum(q)) for c in q).tolist() == pytest.approx([0, 0], abs=1e-12)


def test_fedavg_goes_near_the_optimum_of_its_weights_but_drifts() -> None:
    w, _ = find_limit(None, P, 80, lr=0.05)
    assert 1e-3 < measure_distance(w, solve_optimum(P)) < 0.15
    assert measure_distance(w, solve_optimum(UNIFORM)) > 0.4
    w, _ = find_limit(FedProx(1.0), P, 100, lr=0.05)
    assert measure_distance(w, solve_optimum(P)) < 0.15


def test_one_step_a_round_has_no_drift() -> None:
    w, _ = find_limit(None, P, 100, steps=1, lr=0.4)
    assert measure_distance(w, solve_optimum(P)) < 1e-6


CORRECTED = [
    pytest.param(Scaffold, {}, {}, id="scaffold"),
    pytest.param(Scaffold, {"option": 1}, {"lr": 0.3}, id="scaffold-option-1"),
    pytest.param(Scaffold, {}, {"momentum": 0.9, "lr": 0.03}, id="scaffold-momentum"),
    pytest.param(FedDyn, {"alpha": 0.5, "clip": 0.0}, {"lr": 0.4}, id="feddyn"),
    pytest.param(FedDyn, {"alpha": 0.5, "clip": 0.0}, {"momentum": 0.8, "lr": 0.05, "steps": 10}, id="feddyn-momentum"),
]
PARTIAL = [
    pytest.param(Scaffold, {}, {}, id="scaffold"),
    pytest.param(FedDyn, {"alpha": 0.5, "clip": 0.0}, {"lr": 0.4}, id="feddyn"),
]


@pytest.mark.parametrize(("term", "parameters", "keys"), CORRECTED)
def test_uniform_controls_reach_the_uniform_optimum_whatever_the_averages_weights(
    term: type[Term], parameters: dict[str, Any], keys: dict[str, Any]
) -> None:
    for w in find_limit(term(**parameters), P, 80, **keys):
        assert measure_distance(w, solve_optimum(UNIFORM)) < 1e-8
        assert measure_distance(w, solve_optimum(P)) > 0.5


@pytest.mark.parametrize(("term", "parameters", "keys"), CORRECTED)
def test_weighted_controls_reach_the_optimum_of_the_weights(
    term: type[Term], parameters: dict[str, Any], keys: dict[str, Any]
) -> None:
    for w in find_limit(term(fair_controls="p", **parameters), P, 80, **keys):
        assert measure_distance(w, solve_optimum(P)) < 1e-8
        assert measure_distance(w, solve_optimum(UNIFORM)) > 0.5


@pytest.mark.parametrize("fair_controls", ["uniform", "p"])
@pytest.mark.parametrize(("term", "parameters", "keys"), PARTIAL)
def test_cohorts_of_every_size_with_equal_weights_converge_too(
    term: type[Term], parameters: dict[str, Any], keys: dict[str, Any], fair_controls: str
) -> None:
    """With equal weights p is uniform, however many come: a client that was alone once does not count for more."""
    assert find_last_distance(term(fair_controls=fair_controls, **parameters), UNIFORM, 120, **keys) < 1e-6


@pytest.mark.parametrize(("term", "parameters", "keys"), PARTIAL)
def test_weighted_controls_reach_the_optimum_of_the_weights_whoever_is_missing(
    term: type[Term], parameters: dict[str, Any], keys: dict[str, Any]
) -> None:
    """In the first rounds not everyone has been seen yet; where it ends does not depend on who has."""
    fed = replace(make_quadratic_federation(None, P, 2), dropout=0.4)
    assert any(drops_out(fed, 0, 1, client) for client in P), "everyone comes first: take another seed"
    assert find_last_distance(term(fair_controls="p", **parameters), P, 120, **keys) < 1e-6
