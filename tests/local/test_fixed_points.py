"""Where drift-corrected methods converge: weights of the average alone do not decide it, those of the controls do.

Three clients with losses `1/2 (w - a)^T H (w - a)`; the optimum for weights q solves `sum q H w = sum q H a`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedheal.local.feddyn import Dynamic
from fedheal.local.fedprox import Proximal
from fedheal.local.scaffold import ControlVariates
from fedheal.local.term import Term
from fedheal.simulate.evaluation import select_evaluated_model
from fedheal.simulate.round import drops_out, initial_state, run_round
from local.quadratic import bowl, federation, trainer, vector

P = {"a": 0.7, "b": 0.2, "c": 0.1}
UNIFORM = dict.fromkeys(P, 1 / 3)
CENTRES = {"a": vector(2.0, -1.0), "b": vector(-1.0, 2.0), "c": vector(0.0, 2.0)}
CURVATURES = {
    "a": torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=torch.float64),
    "b": torch.tensor([[0.6, -0.2], [-0.2, 1.5]], dtype=torch.float64),
    "c": torch.tensor([[2.0, 0.1], [0.1, 0.8]], dtype=torch.float64),
}
GRADIENTS = {name: bowl(CENTRES[name], CURVATURES[name]) for name in P}


def optimum(q: dict[str, float]) -> Tensor:
    h = sum(q[c] * CURVATURES[c] for c in q)
    return torch.linalg.solve(h, sum(q[c] * CURVATURES[c] @ CENTRES[c] for c in q))


def limit(term: Term | None, p: dict[str, float], rounds: int, **keys: Any) -> tuple[Tensor, Tensor]:
    """The broadcast and the judged parameters after many rounds in which the average has the weights p."""
    fed = federation(term, p, 2, **keys)
    state, train = initial_state(fed), trainer(fed, GRADIENTS)
    for _ in range(rounds):
        state, _ = run_round(fed, state, train, evaluate=False)
    return state.model.params, select_evaluated_model(fed, state.model, state.terms).params


def settled(term: Term, p: dict[str, float], rounds: int, **keys: Any) -> float:
    """The largest distance to the optimum of p in the last 50 rounds, in each of which a client is missing now and then."""
    fed = replace(federation(term, p, 2, **keys), dropout=0.4)
    state, train, found = initial_state(fed), trainer(fed, GRADIENTS), []
    for _ in range(rounds):
        state, _ = run_round(fed, state, train, evaluate=False)
        found.append(far(state.model.params, optimum(p)))
    return max(found[-50:])


def far(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm())


def test_the_two_optima_are_apart() -> None:
    assert far(optimum(P), optimum(UNIFORM)) > 0.5
    for q in (P, UNIFORM):
        assert sum(q[c] * GRADIENTS[c](optimum(q)) for c in q).tolist() == pytest.approx([0, 0], abs=1e-12)


def test_fedavg_goes_near_the_optimum_of_its_weights_but_drifts() -> None:
    w, _ = limit(None, P, 200, lr=0.05)
    assert 1e-3 < far(w, optimum(P)) < 0.15
    assert far(w, optimum(UNIFORM)) > 0.4
    w, _ = limit(Proximal(1.0), P, 300, lr=0.05)
    assert far(w, optimum(P)) < 0.15


def test_one_step_a_round_has_no_drift() -> None:
    w, _ = limit(None, P, 400, steps=1)
    assert far(w, optimum(P)) < 1e-6


CORRECTED = [
    pytest.param(ControlVariates, {}, {}, 250, id="scaffold"),
    pytest.param(ControlVariates, {"option": 1}, {}, 250, id="scaffold-option-1", marks=pytest.mark.slow),
    pytest.param(
        ControlVariates, {}, {"momentum": 0.9, "lr": 0.01}, 250, id="scaffold-momentum", marks=pytest.mark.slow
    ),
    pytest.param(Dynamic, {"alpha": 0.5, "clip": None}, {"steps": 20}, 250, id="feddyn"),
    pytest.param(
        Dynamic,
        {"alpha": 0.5, "clip": None},
        {"momentum": 0.9, "lr": 0.02, "steps": 20},
        250,
        id="feddyn-m",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("term", "parameters", "keys", "rounds"), CORRECTED)
@pytest.mark.parametrize("p", [P, pytest.param(UNIFORM, marks=pytest.mark.slow)], ids=["p", "uniform"])
def test_uniform_controls_reach_the_uniform_optimum_whatever_the_averages_weights(
    term: type[Term], parameters: dict[str, Any], keys: dict[str, Any], rounds: int, p: dict[str, float]
) -> None:
    for w in limit(term(**parameters), p, rounds, **keys):
        assert far(w, optimum(UNIFORM)) < 1e-5
        assert far(w, optimum(P)) > 0.5


@pytest.mark.parametrize(("term", "parameters", "keys", "rounds"), CORRECTED)
def test_weighted_controls_reach_the_optimum_of_the_weights(
    term: type[Term], parameters: dict[str, Any], keys: dict[str, Any], rounds: int
) -> None:
    for w in limit(term(fair_controls="p", **parameters), P, rounds, **keys):
        assert far(w, optimum(P)) < 1e-5
        assert far(w, optimum(UNIFORM)) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("fair_controls", ["uniform", "p"])
@pytest.mark.parametrize(
    ("term", "parameters", "keys"),
    [(ControlVariates, {}, {}), (Dynamic, {"alpha": 0.5, "clip": None}, {"steps": 20})],
    ids=["scaffold", "feddyn"],
)
def test_two_of_three_clients_a_round_with_equal_weights_converge_too(
    term: type[Term], parameters: dict[str, Any], keys: dict[str, Any], fair_controls: str
) -> None:
    w, _ = limit(term(fair_controls=fair_controls, **parameters), UNIFORM, 1500, participation=0.67, **keys)
    assert far(w, optimum(UNIFORM)) < 1e-3


@pytest.mark.parametrize("fair_controls", ["uniform", "p"])
@pytest.mark.parametrize(
    ("term", "parameters", "keys"),
    [(ControlVariates, {}, {}), (Dynamic, {"alpha": 0.5, "clip": None}, {"steps": 20})],
    ids=["scaffold", "feddyn"],
)
def test_cohorts_of_every_size_with_equal_weights_converge_too(
    term: type[Term], parameters: dict[str, Any], keys: dict[str, Any], fair_controls: str
) -> None:
    """With equal weights p is uniform, however many come: a client that was alone once does not count for more."""
    assert settled(term(fair_controls=fair_controls, **parameters), UNIFORM, 400, **keys) < 1e-3


@pytest.mark.parametrize(
    ("term", "parameters", "keys"),
    [(ControlVariates, {}, {}), (Dynamic, {"alpha": 0.5, "clip": None}, {"steps": 20})],
    ids=["scaffold", "feddyn"],
)
def test_weighted_controls_reach_the_optimum_of_the_weights_whoever_is_missing(
    term: type[Term], parameters: dict[str, Any], keys: dict[str, Any]
) -> None:
    """In the first rounds not everyone has been seen yet; where it ends does not depend on who has."""
    fed = replace(federation(None, P, 2), dropout=0.4)
    assert any(drops_out(fed, 0, 1, client) for client in P), "everyone comes first: take another seed"
    assert settled(term(fair_controls="p", **parameters), P, 400, **keys) < 1e-3
