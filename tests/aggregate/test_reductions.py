"""What FedHEAL becomes at the ends of its parameters, and over long times."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedheal import Layout, Updates
from fedheal.aggregate import fedavg, fedheal, uniform
from fedheal.aggregate.reduce import find_finite, is_finite

G = 40


def make_cohorts(rounds=6, clients=5, seed=0, keep=1.0):
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        present = [m for m in range(clients) if m == 0 or rng.random() < keep]
        yield Updates([f"c{m}" for m in present], rng.normal(size=(len(present), G)), rng.integers(1, 90, len(present)))


def run_rounds(aggregator, sequence):
    model, state = torch.zeros(G, dtype=torch.float64), aggregator.init(Layout.flat(G))
    for updates in sequence:
        out = aggregator.apply(model, updates, state)
        model, state = out.model, out.state
    return model.numpy(), state


@pytest.mark.parametrize(
    "settings",
    [
        {"tau": 0.0, "beta": 0.0},
        {"fphl": False, "fael": False},
        {"tau": 0.0, "fael": False},
        {"fphl": False, "beta": 0.0},
        {"fphl": False, "fael": False, "variant": "released"},
    ],
)
def test_these_are_fedavg(settings):
    ours, _ = run_rounds(fedheal(**settings), make_cohorts(keep=0.6))
    theirs, _ = run_rounds(fedavg(), make_cohorts(keep=0.6))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_released_with_beta_0_is_uniform_and_its_tau_0_is_not_nothing():
    ours, _ = run_rounds(fedheal(beta=0.0, fphl=False, variant="released"), make_cohorts())
    theirs, _ = run_rounds(uniform(), make_cohorts())
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    masked, _ = run_rounds(fedheal(beta=0.0, tau=0.0, variant="released"), make_cohorts())
    assert np.abs(masked - theirs).max() > 1e-3


def test_tau_0_keeps_everything_in_the_paper_variant():
    ours, _ = run_rounds(fedheal(tau=0.0), make_cohorts())
    theirs, _ = run_rounds(fedheal(fphl=False), make_cohorts())
    assert np.array_equal(ours, theirs)


def test_fphl_alone_uses_example_shares():
    _, state = run_rounds(fedheal(fael=False), make_cohorts())
    assert [s.kind for s in state.stage.states] == ["consistency"]
    aggregator = fedheal(fael=False)
    (updates,) = make_cohorts(rounds=1)
    out = aggregator.apply(torch.zeros(G, dtype=torch.float64), updates, aggregator.init(Layout.flat(G)))
    np.testing.assert_allclose(out.weights, updates.num_examples / updates.num_examples.sum(), rtol=1e-15)


@pytest.mark.parametrize("beta", [0.05, 0.4, 1.0])
def test_with_everyone_present_it_is_the_papers_rule_to_the_letter(beta):
    rng = np.random.default_rng(3)
    examples = rng.integers(1, 90, 7).astype(float)
    p, dp = examples / examples.sum(), np.zeros(7)
    aggregator = fedheal(fphl=False, beta=beta)
    state = aggregator.init(Layout.flat(3))
    for _ in range(200):
        rows = rng.normal(size=(7, 3)) * rng.uniform(0.1, 3, (7, 1))
        out = aggregator.apply(np.zeros(3), Updates(range(7), rows, examples), state)
        state = out.state
        d = (rows**2).sum(axis=1)
        dp = (1 - beta) * dp + beta * d / d.sum()
        p = (p + dp) / (p + dp).sum()
        np.testing.assert_allclose(out.weights.numpy(), p, rtol=0, atol=3e-15)


@pytest.mark.parametrize(("variant", "late"), [("paper", 0), ("paper", 40), ("released", 40)])
def test_equal_clients_stay_equal_when_ten_of_a_hundred_come_each_round(variant, late):
    """In 500 rounds of equal distances clients differ only in when they take part."""
    rng = np.random.default_rng(4)
    aggregator = fedheal(fphl=False, variant=variant)
    state = aggregator.init(Layout.flat(2))
    for t in range(200):
        known = 100 - late if t < 50 else 100
        here = rng.choice(known, 10, replace=False)
        rows = rng.choice([-1.0, 1.0], size=(10, 2))
        out = aggregator.apply(np.zeros(2), Updates(here.tolist(), rows, [50] * 10), state)
        state = out.state
        np.testing.assert_allclose(out.weights.numpy(), 0.1, rtol=1e-6)
    (stored,) = state.stage.states
    assert len(stored.clients) == 100
    if variant == "paper":
        np.testing.assert_allclose(stored.p, 0.01, rtol=1e-6)


def test_unequal_distances_move_weight_and_only_within_the_cohort():
    aggregator = fedheal(fphl=False)
    state = aggregator.init(Layout.flat(1))
    state = aggregator.apply(np.zeros(1), Updates("abc", [[1.0], [1.0], [1.0]], [1, 1, 1]), state).state
    out = aggregator.apply(np.zeros(1), Updates("ab", [[3.0], [1.0]], [1, 1]), state)
    p = dict(zip(out.state.stage.states[0].clients, out.state.stage.states[0].p, strict=True))
    assert p["a"] > p["b"]
    assert p["c"] == pytest.approx(1 / 3, abs=1e-15)
    assert sum(p.values()) == pytest.approx(1, abs=1e-15)


@pytest.mark.slow
def test_a_client_that_never_moves_does_not_break_the_rule():
    """Its stored weight halves each round until it underflows; a cohort of only such clients does not change the model."""
    aggregator = fedheal(fphl=False, beta=1.0)
    state = aggregator.init(Layout.flat(1))
    for _ in range(1200):
        state = aggregator.apply(np.zeros(1), Updates("ab", [[1.0], [0.0]], [1, 1]), state).state
    assert state.stage.states[0].p[1] < 1e-300
    out = aggregator.apply(np.ones(1), Updates("b", [[2.0]], [1]), state)
    assert np.isfinite(out.model).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_not_finite_is_found_among_tensors(dtype):
    sound = torch.zeros(3, 4, dtype=dtype)
    flawed = [sound.clone(), sound.clone(), sound.clone()]
    for tensor, value in zip(flawed, (math.nan, math.inf, -math.inf), strict=True):
        tensor[1, 2] = value
    tensors = [sound, flawed[0], sound[:0], flawed[1][1], flawed[1][0], flawed[2], sound.float()]
    assert find_finite(*tensors) == [True, False, True, False, True, False, True]
    assert is_finite(sound, sound[0])
    assert not is_finite(sound, flawed[2])
