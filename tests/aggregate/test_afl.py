"""AFL: the projection against other ways to find it, golden values, and what becomes of lambda over time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from aggregate.rounds import apply_rounds
from fedheal import Layout, Packed, Updates
from fedheal.aggregate import Aggregator, afl, chain, uniform
from fedheal.aggregate.registry import STAGES
from fedheal.aggregate.weights.afl import project

ONE = Layout.flat(1)


def make_updates(clients, losses, rows=None):
    rows = [[1.0]] * len(clients) if rows is None else rows
    return Updates(clients, np.array(rows, float), [1] * len(clients), metrics={"loss": losses})


def get_last_result(aggregator, cohorts, layout=ONE):
    return apply_rounds(aggregator, cohorts, layout)[-1]


def get_stored_weights(out):
    return dict(zip(out.state.stage.clients, out.state.stage.weights.tolist(), strict=True))


def project_by_bisection(v, mass, floor):
    """Return the projection `max(v - theta, floor)`, with the theta that gives this mass found by bisection."""
    low, high = v.min() - mass - 1, v.max()
    for _ in range(200):
        theta = (low + high) / 2
        low, high = (theta, high) if np.maximum(v - theta, floor).sum() > mass else (low, theta)
    return np.maximum(v - theta, floor)


@pytest.mark.parametrize(("mass", "floor"), [(1.0, 0.0), (0.3, 0.0), (1.0, 0.01), (0.7, 0.05)])
def test_the_projection_is_the_nearest_point(mass, floor):
    rng = np.random.default_rng(0)
    for _ in range(200):
        k = int(rng.integers(1, 8))
        v = rng.normal(size=k) * rng.choice([0.01, 1, 100])
        x = project(v, mass, floor)
        assert x.sum() == pytest.approx(mass, rel=1e-14)
        assert x.min() >= floor
        np.testing.assert_allclose(x, project_by_bisection(v, mass, floor), rtol=0, atol=1e-12)
        # Nearest in a convex set: no feasible direction y - x has a positive product with v - x. The corners are enough.
        corners = floor + (mass - k * floor) * np.eye(k)
        assert ((corners - x) @ (v - x)).max() <= 1e-12 * max(1, np.abs(v).max())


def test_the_projection_against_a_grid():
    grid = np.array([(a, b, 60 - a - b) for a, b in itertools.product(range(61), repeat=2) if a + b <= 60]) / 60
    rng = np.random.default_rng(1)
    for _ in range(30):
        v = rng.normal(size=3)
        x = project(v)
        assert np.linalg.norm(x - v) <= np.linalg.norm(grid - v, axis=1).min() + 1e-15


def test_the_projection_leaves_the_simplex_alone_and_takes_ties_infinities_and_no_mass():
    assert project(np.array([0.25, 0.75])).tolist() == [0.25, 0.75]
    assert project(np.array([7.0, 7.0, -np.inf])).tolist() == [0.5, 0.5, 0.0]
    assert project(np.array([1.0, 2.0]), 0.0).tolist() == [0.0, 0.0]
    assert project(np.array([1.0, 5.0]), 0.2, 0.1).tolist() == [0.1, 0.1]


def test_two_rounds_by_hand():
    # gamma 0.1, no floor. Round 1: 1/2 + (0.1, 0.3), less 0.2 each: 0.4, 0.6.  W = 0.4 * 1 + 0.6 * 3 = 2.2.
    # Round 2, losses 9 and 0: 0.4 + 0.9, 0.6: the difference 0.7 is below 1, so both stay in: less 0.45: 0.85, 0.15.
    #   W = 2.2 + 0.85 * 1 + 0.15 * 3 = 3.5.
    rows = [[1.0], [3.0]]
    aggregator = afl(gamma=0.1, floor=0.0)
    first = get_last_result(aggregator, [make_updates("ab", [1, 3], rows)])
    second = get_last_result(aggregator, [make_updates("ab", [1, 3], rows), make_updates("ab", [9, 0], rows)])
    assert first.weights.tolist() == pytest.approx([0.4, 0.6], rel=1e-15)
    assert first.model.tolist() == pytest.approx([2.2], rel=1e-15)
    assert second.weights.tolist() == pytest.approx([0.85, 0.15], rel=1e-14)
    assert second.model.tolist() == pytest.approx([3.5], rel=1e-15)
    assert second.report["loss"] == {"a": 9.0, "b": 0.0}


def test_without_memory_each_round_starts_from_uniform():
    # Round 2 of the above from 1/2, 1/2: 0.5 + 0.9 against 0.5: less 0.45: 0.95, 0.05.
    out = get_last_result(
        afl(gamma=0.1, floor=0.0, reset=True), [make_updates("ab", [1, 3]), make_updates("ab", [9, 0])]
    )
    assert out.weights.tolist() == pytest.approx([0.95, 0.05], rel=1e-14)
    assert out.state.to_arrays()[0] == {}


def test_a_cohort_redistributes_what_it_holds_and_a_newcomer_is_an_average_client():
    # a, b, c at 1/3 each. Then a and b alone: mass 2/3; 1/3 + 0.1 against 1/3, less 0.05: 1/3 +- 0.05. c keeps 1/3.
    aggregator = afl(gamma=0.1, floor=0.0)
    rounds = [make_updates("abc", [1, 1, 1]), make_updates("ab", [2, 1])]
    out = get_last_result(aggregator, rounds)
    assert get_stored_weights(out) == pytest.approx({"a": 1 / 3 + 0.05, "b": 1 / 3 - 0.05, "c": 1 / 3}, rel=1e-14)
    assert out.weights.tolist() == pytest.approx([0.5 + 0.075, 0.5 - 0.075], rel=1e-14)
    # d comes: 1/4, the others shrink to 3/4 of what they had. It is alone, so nothing else changes.
    out = get_last_result(aggregator, [*rounds, make_updates("d", [5])])
    assert get_stored_weights(out) == pytest.approx({"a": 0.2875, "b": 0.2125, "c": 0.25, "d": 0.25}, rel=1e-14)
    assert out.weights.tolist() == [1.0]


def test_equal_losses_leave_everyone_equal_when_ten_of_a_hundred_come_each_round():
    rng = np.random.default_rng(2)
    aggregator = afl(gamma=0.1)
    state = aggregator.init(ONE)
    for t in range(300):
        here = rng.choice(60 if t < 100 else 100, 10, replace=False)
        out = aggregator.apply(np.zeros(1), make_updates(here.tolist(), [rng.random()] * 10), state)
        state = out.state
        np.testing.assert_allclose(out.weights.numpy(), 0.1, rtol=1e-9)
    np.testing.assert_allclose(state.stage.weights, 0.01, rtol=1e-9)


@pytest.mark.parametrize("floor", [0.0, 1e-3])
@pytest.mark.parametrize("reset", [False, True])
def test_gamma_0_is_uniform_averaging(floor, reset):
    layout = Layout.flat(20)

    def make_cohorts():
        rng = np.random.default_rng(3)
        for _ in range(8):
            here = [c for c in "abcdef" if rng.random() < 0.6] or ["a"]
            yield make_updates(here, rng.uniform(0, 3, len(here)), rng.normal(size=(len(here), 20)))

    ours = get_last_result(afl(gamma=0.0, floor=floor, reset=reset), make_cohorts(), layout).model
    theirs = get_last_result(uniform(), make_cohorts(), layout).model
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_it_concentrates_on_the_worst_and_comes_back():
    # c's loss is 1 larger: at gamma 0.01 the two others lose 0.01/3 each a round. Their 1/3 is gone after 100 rounds.
    aggregator, floor = afl(), 1e-3 / 3
    worst = [make_updates("abc", [1, 1, 2])] * 110
    out = get_last_result(aggregator, worst)
    assert out.weights.tolist() == pytest.approx([floor, floor, 1 - 2 * floor], rel=1e-9)
    # Equal losses are an equilibrium: lambda stays.
    assert (
        get_last_result(aggregator, [*worst, *[make_updates("abc", [1, 1, 1])] * 9]).weights.tolist()
        == out.weights.tolist()
    )
    # What came first returns as soon as the others are the worse ones; thanks to the floor, even where c is absent.
    back = get_last_result(aggregator, [*worst, *[make_updates("abc", [2, 2, 1])] * 300])
    assert back.weights.tolist() == pytest.approx([0.5 - floor / 2, 0.5 - floor / 2, floor], rel=1e-9)
    alone = get_last_result(aggregator, [*worst, make_updates("ab", [1, 1])])
    assert alone.weights.tolist() == pytest.approx([0.5, 0.5], rel=1e-9)
    assert alone.model[0] > 0


def test_it_finds_the_model_whose_worst_loss_is_least():
    # F_m = (W - c_m)^2 / 2 with c = 0, 1, 4, one gradient step of 0.1: the worst is least at W = 2, the mean at 5/3.
    centres = np.array([0.0, 1.0, 4.0])
    aggregator = afl(gamma=0.01)
    model, state = np.zeros(1), aggregator.init(ONE)
    for _ in range(2000):
        losses, rows = (model - centres) ** 2 / 2, 0.1 * (centres - model)
        out = aggregator.apply(model, make_updates("abc", losses, rows[:, None]), state)
        model, state = out.model, out.state
    assert model[0] == pytest.approx(2, abs=1e-2)


def test_a_cohort_without_weight_leaves_the_model_as_it_was():
    """Without a floor c takes all weight, and then a and b come alone."""
    aggregator = afl(gamma=1.0, floor=0.0)
    out = get_last_result(aggregator, [make_updates("abc", [0, 0, 9])])
    assert out.weights.tolist() == [0, 0, 1]
    again = aggregator.apply(out.model, make_updates("ab", [1, 1]), out.state)
    assert again.model.tolist() == out.model.tolist()
    assert again.weights.tolist() == [0, 0]


def test_losses_beyond_all_measure():
    out = get_last_result(afl(gamma=1e9, floor=0.0), [make_updates("abc", [0, 1e308, 1e308])])
    assert out.weights.tolist() == [0, 0.5, 0.5]


def test_with_fphl_the_weights_go_into_the_masked_mean():
    # gamma 0.1: weights 0.4, 0.6. Entry 1 of a went up, then goes down: at tau 0.6 (1 of 2) b alone moves it, by 3.
    aggregator = Aggregator(chain(STAGES["afl"](gamma=0.1, floor=0.0), STAGES["fphl"](tau=0.6)))
    layout = Layout.flat(2)
    rounds = [make_updates("ab", [1, 1], [[1, 1], [1, 1]]), make_updates("ab", [1, 3], [[-1, 1], [3, 3]])]
    out = get_last_result(aggregator, rounds, layout)
    assert out.model.tolist() == pytest.approx([1 + 3, 1 + 0.4 + 1.8], rel=1e-14)


def test_buffers_follow_the_weights():
    layout = Layout.of(torch.nn.BatchNorm1d(1))
    model = Packed(torch.zeros(2), torch.zeros(2), torch.zeros(1, dtype=torch.int64))
    cohort = Updates("ab", torch.zeros(2, 2), [1, 1], [[0.0, 0.0], [1.0, 2.0]], [[3], [4]], {"loss": [1.0, 3.0]})
    aggregator = afl(gamma=0.1, floor=0.0)
    out = aggregator.apply(model, cohort, aggregator.init(layout))
    assert out.model.buffers.tolist() == pytest.approx([0.6, 1.2], rel=1e-6)
    assert out.model.counters.tolist() == [4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": -0.1}, "gamma = -0.1: use a finite number that is not negative"),
        ({"gamma": float("nan")}, "gamma = nan: use"),
        ({"gamma": float("inf")}, "gamma = inf: use"),
        ({"gamma": True}, "gamma = True: use"),
        ({"floor": 1.5}, "floor = 1.5: use a number from 0 to 1"),
        ({"reset": 1}, "reset = 1: use True or False"),
    ],
)
def test_parameters_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        afl(**settings)
