"""FedGA by hand: what clients report, and the weights that follow."""

from __future__ import annotations

import numpy as np
import pytest

from fedheal.aggregate import Aggregator
from fedheal.aggregate.whole.fedga import fedga_stage
from fedheal.local.fedga import FedGA
from local.quadratic import make_packed, make_term_context
from local.rounds import AggregatorRounds


def make_metrics(received: list[float], sent: list[float], progress: float) -> dict[str, list[float]]:
    return {"val_received": received, "val_sent": sent, "progress": [progress] * len(sent)}


def test_fedgas_metrics() -> None:
    """The gap that is known in round 3 of 10 is the second round's, 1/10 of the way; losses of the models received and sent."""
    ctx = make_term_context(FedGA(), make_packed(1.0), round=3, validate=lambda at: (10 * at.params.item(), 0.5))
    assert FedGA().metrics(ctx, make_packed(2.0)) == {"val_received": 10.0, "val_sent": 20.0, "progress": 0.1}
    assert FedGA().validates


def test_fedga_by_hand_more_weight_to_whom_averaging_hurts_most() -> None:
    """Equal at first: nothing has been sent. Then gaps 1.5 - 1 = 0.5 and 1.25 - 1 = 0.25, halfway: s = 0.1, s/K = 0.05.

    1/2 + 0.05 * 1 = 0.55 and 1/2 + 0.05 * 0.5 = 0.525, over 1.075.
    """
    weights = AggregatorRounds(Aggregator(fedga_stage(0.2)))
    assert weights("ab", **make_metrics([9.0, 1.0], [1.0, 1.0], 0.0)) == pytest.approx([0.5, 0.5])
    second = weights("ab", **make_metrics([1.5, 1.25], [1.0, 1.0], 0.5))
    assert second == pytest.approx([0.55 / 1.075, 0.525 / 1.075], rel=1e-9)
    assert second[0] > second[1]
    assert weights.report["gap"] == {"a": 0.5, "b": 0.25}


def test_fedga_takes_from_whom_averaging_helps_and_goes_on_from_there() -> None:
    """Gaps -0.5 and 0.25 at s = 0.2: 0.5 - 0.1 and 0.5 + 0.05, over 0.95. Then equal gaps of 1: both + 0.1, over 1.2."""
    weights = AggregatorRounds(Aggregator(fedga_stage(0.2)))
    weights("ab", **make_metrics([1.0, 1.0], [1.0, 1.0], 0.0))
    second = weights("ab", **make_metrics([0.5, 1.25], [2.0, 3.0], 0.0))
    assert second == pytest.approx([0.4 / 0.95, 0.55 / 0.95], rel=1e-9)
    third = weights("ab", **make_metrics([3.0, 4.0], [1.0, 1.0], 0.0))
    assert third == pytest.approx([(second[0] + 0.1) / 1.2, (second[1] + 0.1) / 1.2], rel=1e-9)


def test_fedgas_first_step_is_s0() -> None:
    """s_t = s0 (1 - (t-1)/T) for the gap of round t, which acts in round t+1: with T = 5, 0.2, 0.16, 0.12, 0.08."""
    steps = []
    for number in range(2, 6):
        ctx = make_term_context(FedGA(), make_packed(1.0), round=number, rounds=5, validate=lambda at: (1.0, 0.5))
        steps.append(0.2 * (1 - FedGA().metrics(ctx, make_packed(2.0))["progress"]))
    assert steps == pytest.approx([0.2, 0.16, 0.12, 0.08])


def test_fedga_without_gaps_or_step_stays() -> None:
    weights = AggregatorRounds(Aggregator(fedga_stage(0.2)))
    weights("ab", **make_metrics([1.0, 1.0], [1.0, 2.0], 0.0))
    assert weights("ab", **make_metrics([1.0, 2.0], [1.0, 1.0], 0.5)) == [0.5, 0.5]
    still = AggregatorRounds(Aggregator(fedga_stage(0.0)))
    still("ab", **make_metrics([1.0, 1.0], [1.0, 1.0], 0.0))
    assert still("ab", **make_metrics([9.0, 1.0], [1.0, 1.0], 0.5)) == [0.5, 0.5]


def test_fedga_with_absent_clients_and_a_newcomer() -> None:
    """b keeps its half of the weight while a is alone; c then joins with a third, the others make room."""
    weights = AggregatorRounds(Aggregator(fedga_stage(0.2)))
    weights("ab", **make_metrics([1.0, 1.0], [1.0, 1.0], 0.0))
    assert weights("a", **make_metrics([5.0], [1.0], 0.1)) == [1.0]
    assert weights("abc", **make_metrics([1.0, 1.0, 7.0], [1.0, 1.0, 1.0], 0.2)) == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("clients", ["a", "ab"])
def test_fedga_keeps_its_weights_where_a_step_would_leave_none(clients: str) -> None:
    """s0 = 1: 1/K - 1/K for everyone."""
    weights, k = AggregatorRounds(Aggregator(fedga_stage(1.0))), len(clients)
    weights(clients, **make_metrics([1.0] * k, [1.0] * k, 0.0))
    assert weights(clients, **make_metrics([0.5] * k, [1.0] * k, 0.0)) == [1 / k] * k


def test_fedga_compares_only_models_that_follow_each_other() -> None:
    """c sent a loss of 9 long ago, and b comes for the first time. a's gap is 0.5, and stands in for theirs: nobody moves.

    Then gaps of 0.5, 0.2 and -0.5 at s/K = 0.2/3: 1/3 + (1, 0.4, -1) 0.2/3, over 1 + 0.08/3.
    """
    weights = AggregatorRounds(Aggregator(fedga_stage(0.2)))
    weights("ac", **make_metrics([1.0, 1.0], [1.0, 9.0], 0.0))
    weights("a", **make_metrics([1.5], [1.0], 0.0))
    assert weights("abc", **make_metrics([1.5, 7.0, 1.0], [1.0, 1.0, 1.0], 0.0)) == pytest.approx([1 / 3] * 3)
    assert weights.report["gap"] == {"a": 0.5}
    new_weights = weights("abc", **make_metrics([1.5, 1.2, 0.5], [1.0, 1.0, 1.0], 0.0))
    assert new_weights == pytest.approx([(1 / 3 + g * 0.2 / 3) / (1 + 0.08 / 3) for g in (1, 0.4, -1)], rel=1e-9)
    assert weights.report["gap"] == pytest.approx({"a": 0.5, "b": 0.2, "c": -0.5})


def test_fedga_does_not_take_weight_from_who_is_seldom_there() -> None:
    """Equal clients whose loss falls all the time, four of them there one time in ten and the others three in five."""
    rng, weights = np.random.default_rng(0), AggregatorRounds(Aggregator(fedga_stage(0.2)))
    for t in range(1, 201):
        here = "".join(c for i, c in enumerate("abcdefghijklmnopqrst") if rng.random() < (0.1 if i < 4 else 0.6))
        level = 2.3 * np.exp(-t / 60)
        received, sent = (f * level * (1 + 0.02 * rng.normal(size=len(here))) for f in (1.0, 0.9))
        weights(here, **make_metrics(received.tolist(), sent.tolist(), max(t - 2, 0) / 200))
    weights_by_client = dict(zip(weights.state.stage.clients, 20 * weights.state.stage.a, strict=True))
    assert np.mean([weights_by_client[c] for c in "abcd"]) == pytest.approx(1, abs=0.1)
