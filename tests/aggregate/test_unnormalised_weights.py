"""Standing: weights before they are made shares of a cohort, so that one round's can be compared with another's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedheal import Layout, Updates
from fedheal.aggregate import Aggregator, afl, fedavg, fedheal, fedpw, qffl, uniform
from fedheal.aggregate.stage import stateless
from fedheal.aggregate.whole.fedce import fedce_stage

LOSSES = {"a": 2.0, "b": 0.5, "c": 1.0}


def make_updates(clients: str, losses: dict[str, float] | None = None) -> Updates:
    """Return orthogonal updates of the same length from clients with 10, 20 and 30 examples."""
    loss = [(losses or LOSSES)[c] for c in clients]
    metrics = {
        "loss": loss,
        "train_loss": loss,
        "accuracy_without": [0.5] * len(clients),
        "measured_rounds": [1] * len(clients),
    }
    metrics["reach"] = [1.0] * len(clients)
    axes = np.eye(3)[["abc".index(c) for c in clients]]
    return Updates(clients, axes, [10.0 * (1 + "abc".index(c)) for c in clients], metrics=metrics)


def compute_unnormalised_weights(
    aggregator: Aggregator, clients: str, losses: dict[str, float] | None = None
) -> list[float]:
    out = aggregator.apply(np.zeros(3), make_updates(clients, losses), aggregator.init(Layout.flat(3)))
    assert torch.allclose(out.unnormalised_weights / out.unnormalised_weights.sum(), out.weights, rtol=1e-12)
    return out.unnormalised_weights.tolist()


@pytest.mark.parametrize(
    ("aggregator", "expected"),
    [
        (fedavg(), {"a": 10, "b": 20, "c": 30}),
        (uniform(), dict.fromkeys("abc", 1)),
        (qffl(q=2.0), {"a": 4, "b": 0.25, "c": 1}),
        (fedheal(fael=False), {"a": 10, "b": 20, "c": 30}),
    ],
    ids=["fedavg", "uniform", "qffl", "fphl"],
)
def test_who_else_comes_does_not_change_it(aggregator: Aggregator, expected: dict[str, float]) -> None:
    for cohort in ("abc", "ab", "c"):
        assert compute_unnormalised_weights(aggregator, cohort) == pytest.approx(
            [expected[c] for c in cohort], rel=1e-9
        )


@pytest.mark.parametrize(
    "aggregator",
    [afl(reset=True), fedheal(fphl=False, fael="exact-reg"), fedpw(), Aggregator(fedce_stage())],
    ids=["afl, reset", "exact", "fedpw", "fedce"],
)
def test_where_only_a_cohort_shares_an_equal_part_stands_for_one(aggregator: Aggregator) -> None:
    for cohort in ("abc", "ab", "c"):
        assert compute_unnormalised_weights(aggregator, cohort, dict.fromkeys("abc", 1.0)) == pytest.approx(
            [1] * len(cohort)
        )


@pytest.mark.parametrize("aggregator", [afl(), fedheal(fphl=False)], ids=["afl", "fael"])
def test_where_all_clients_share_it_is_the_share_of_all(aggregator: Aggregator) -> None:
    """A cohort redistributes only its own weight, so all clients' last weights sum to 1."""
    state, last = aggregator.init(Layout.flat(3)), {}
    for cohort in ("abc", "ab", "c", "bc"):
        out = aggregator.apply(np.zeros(3), make_updates(cohort), state)
        last |= dict(zip(cohort, out.unnormalised_weights.tolist(), strict=True))
        state = out.state
        assert sum(last.values()) == pytest.approx(1)


def test_losses_beyond_all_powers_can_still_be_added_up() -> None:
    weights = compute_unnormalised_weights(qffl(q=50.0), "ab", {"a": 1e30, "b": 1e-30})
    assert weights == [1e200, pytest.approx(0, abs=1e-100)]
    assert weights[1] > 0


def test_a_skipped_client_stands_for_nothing_and_an_empty_round_for_nobody() -> None:
    aggregator = fedavg(on_bad_update="skip")
    updates = make_updates("abc")
    updates.deltas[1, 0] = torch.nan
    assert aggregator.apply(np.zeros(3), updates, aggregator.init(Layout.flat(3))).unnormalised_weights.tolist() == [
        10,
        0,
        30,
    ]
    updates.deltas.fill_(torch.nan)
    assert aggregator.apply(np.zeros(3), updates, aggregator.init(Layout.flat(3))).unnormalised_weights.tolist() == [
        0,
        0,
        0,
    ]


@pytest.mark.parametrize("wrong", [[1.0], [1.0, -1.0, 0.0], [1.0, np.inf, 0.0]], ids=str)
def test_a_stage_that_gives_nonsense_is_refused(wrong: list[float]) -> None:
    aggregator = Aggregator(stateless(lambda draft: replace(draft, unnormalised_weights=np.array(wrong))))
    with pytest.raises(ValueError, match="must give 3 finite, non-negative unnormalised_weights, got"):
        compute_unnormalised_weights(aggregator, "abc")
