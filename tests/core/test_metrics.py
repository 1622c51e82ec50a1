"""Numbers on paper, and what happens at the edges."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedheal.core.metrics import count_averaged, fairness, last_mean


def test_four_domains_by_hand() -> None:
    scores = fairness({"a": 80.0, "b": 60.0, "c": 40.0, "d": 20.0})
    assert scores["avg"] == 50.0
    # deviations 30, 10, -10, -30: squares 900 + 100 + 100 + 900 = 2000, over 3
    assert scores["std"] == pytest.approx(math.sqrt(2000 / 3))
    assert (scores["worst"], scores["best"], scores["gap"]) == (20.0, 80.0, 60.0)
    assert scores["cov"] == pytest.approx(math.sqrt(2000 / 3) / 50)
    # |differences| over ordered pairs: 2 (20 + 40 + 60 + 20 + 40 + 20) = 400; 400 / (2 * 16 * 50)
    assert scores["gini"] == pytest.approx(0.25)
    # 200^2 / (4 (6400 + 3600 + 1600 + 400)) = 40000 / 48000
    assert scores["jain"] == pytest.approx(5 / 6)
    # shares 0.4, 0.3, 0.2, 0.1
    assert scores["entropy"] == pytest.approx(-sum(s * math.log(s) for s in (0.4, 0.3, 0.2, 0.1)))


def test_gini_of_many_units_is_that_of_all_pairs() -> None:
    x = np.random.default_rng(0).uniform(0, 100, 57)
    pairs = np.abs(x[:, None] - x).sum() / (2 * 57 * 57 * x.mean())
    assert fairness({str(i): value for i, value in enumerate(x)})["gini"] == pytest.approx(pairs, rel=1e-12)


def test_the_deviation_is_the_samples_not_the_populations() -> None:
    assert fairness({"a": 0.0, "b": 2.0})["std"] == pytest.approx(math.sqrt(2))  # not 1


def test_one_unit_is_perfectly_even() -> None:
    assert fairness({"a": 70.0}) == {
        "avg": 70.0, "std": 0.0, "worst": 70.0, "best": 70.0, "gap": 0.0, "cov": 0.0, "gini": 0.0, "jain": 1.0, "entropy": 0.0,
    }  # fmt: skip


def test_all_zero_is_even_too() -> None:
    scores = fairness({"a": 0.0, "b": 0.0, "c": 0.0})
    assert (scores["avg"], scores["std"], scores["cov"], scores["gini"], scores["jain"]) == (0.0, 0.0, 0.0, 0.0, 1.0)
    assert scores["entropy"] == pytest.approx(math.log(3))


def test_equal_units_are_even_to_rounding() -> None:
    scores = fairness({str(i): 100 / 3 for i in range(7)})
    assert scores["std"] == pytest.approx(0.0, abs=1e-12)
    assert scores["gini"] == 0.0
    assert scores["jain"] == pytest.approx(1.0)
    assert scores["entropy"] == pytest.approx(math.log(7))


def test_all_at_one_unit_is_as_uneven_as_can_be() -> None:
    scores = fairness({"a": 100.0, "b": 0.0, "c": 0.0, "d": 0.0})
    assert scores["jain"] == pytest.approx(1 / 4)
    assert scores["gini"] == pytest.approx(3 / 4)  # (K - 1) / K
    assert scores["entropy"] == 0.0
    assert scores["cov"] == pytest.approx(2.0)  # sqrt(K)


def test_units_may_come_in_any_order() -> None:
    assert fairness({"a": 1.0, "b": 5.0, "c": 2.0}) == pytest.approx(fairness({"c": 2.0, "a": 1.0, "b": 5.0}))


def test_no_units_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="there are no accuracies"):
        fairness({})


def test_the_mean_is_over_the_last_five() -> None:
    rounds = [{"a": float(i), "b": -float(i)} for i in range(1, 21)]
    assert last_mean(rounds) == {"a": 18.0, "b": -18.0}  # (16 + 17 + 18 + 19 + 20) / 5
    assert last_mean(rounds[:8], 5) == {"a": 6.0, "b": -6.0}


def test_the_mean_is_over_a_quarter_of_the_rounds_at_most() -> None:
    assert all(count_averaged(rounds) <= max(1, rounds / 4) for rounds in range(1, 100))
    assert last_mean([{"a": 1.0}, {"a": 2.0}, {"a": 3.0}, {"a": 4.0}, {"a": 6.0}]) == {"a": 6.0}
    # A unit that came late counts its own rounds: its first evaluation is no part of its result.
    late = [{"a": 1.0}] * 16 + [{"a": 1.0, "b": 0.0}] + [{"a": 1.0, "b": 9.0}] * 3
    assert last_mean(late) == {"a": 1.0, "b": 9.0}


def test_fewer_rounds_than_wanted_and_none() -> None:
    assert last_mean([{"a": 1.0}, {"a": 2.0}], 5) == {"a": 1.5}
    assert last_mean([]) == {}


def test_results_are_plain_numbers() -> None:
    assert {type(value) for value in fairness({"a": 1, "b": 2}).values()} == {float}
    assert {type(value) for value in last_mean([{"a": 1}]).values()} == {float}
