"""FedCE by hand: what clients report, and the weights that follow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import fedheal
from fedheal.aggregate import Aggregator
from fedheal.aggregate.whole.fedce import cosines_to_others, fedce_stage
from fedheal.engine import serial
from fedheal.local.fedce import FedCE
from local.quadratic import absorb_updates, make_packed, make_term_context, vector
from local.rounds import AggregatorRounds
from tiny_data import quick


def make_slot(params: float, accuracies: tuple[float, float] = (0, 0), last: int = 1) -> dict[str, torch.Tensor]:
    """Return a client's slot: its model, the number and sum of its accuracies, and its last round."""
    return {
        "params": vector(params),
        "buffers": torch.empty(0),
        "accuracies": vector(*accuracies),
        "round": torch.tensor(last),
    }


def test_the_model_without_a_client_by_hand() -> None:
    """W = 2 holds a quarter of this client's model 5: the others are at (2 - 1.25) / 0.75 = 1. Buffers alike."""
    calls = []

    def validate(model):
        calls.append((model.params.item(), model.buffers.tolist()))
        return 0.1, 0.75

    keys = {"slot": make_slot(5.0), "shared": {"e.a": vector(0.25)}, "validate": validate, "round": 2}
    ctx = make_term_context(FedCE(), make_packed(2.0), **keys)
    assert FedCE().metrics(ctx, make_packed(3.0)) == {"accuracy_without": 0.75, "measured_rounds": 1}
    assert calls == [(pytest.approx(1.0), [])]
    new_slot, message = FedCE().finish(ctx, make_packed(3.0))
    assert {name: value.tolist() for name, value in new_slot.items()} == {
        "params": [3.0],
        "buffers": [],
        "accuracies": [1.0, 0.75],
        "round": 2,
    }
    assert message == {}


def test_a_client_starts_without_an_accuracy() -> None:
    ctx = make_term_context(FedCE(), make_packed(2.0))
    assert FedCE().metrics(ctx, make_packed(3.0)) == {"accuracy_without": 0.0, "measured_rounds": 0}
    assert FedCE().finish(ctx, make_packed(3.0))[0]["accuracies"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("e", "number", "loss"),
    [(0.25, 4, 0.1), (1.0, 3, 0.1), (None, 3, 0.1), (0.25, 3, math.nan), (0.25, 3, math.inf)],
    ids=["it was away", "it was alone", "it has no weight", "nan", "inf"],
)
def test_where_the_model_without_a_client_cannot_be_told_it_repeats_its_mean(e, number, loss) -> None:
    """It was there in round 2 with 3 accuracies that sum to 1.2; none joins them now, and the next one makes the fourth."""
    shared = {} if e is None else {"e.a": vector(e)}
    keys = {
        "slot": make_slot(5.0, (3, 1.2), last=2),
        "shared": shared,
        "validate": lambda at: (loss, 0.1),
        "round": number,
    }
    ctx = make_term_context(FedCE(), make_packed(2.0), **keys)
    assert FedCE().metrics(ctx, make_packed(3.0)) == {"accuracy_without": pytest.approx(0.4), "measured_rounds": 3}
    new_slot, _ = FedCE().finish(ctx, make_packed(3.0))
    assert new_slot["accuracies"].tolist() == [3, 1.2]
    keys = {"slot": new_slot, "shared": {"e.a": vector(0.25)}, "validate": lambda at: (0.1, 0.8), "round": number + 1}
    after = FedCE().metrics(make_term_context(FedCE(), make_packed(2.0), **keys), make_packed(3.0))
    assert after == {"accuracy_without": 0.5, "measured_rounds": 4}


def test_models_without_a_client_are_sound_when_few_take_part(monkeypatch) -> None:
    """Every model that is evaluated for the means has a loss, with clients that are away for many rounds."""
    losses = []
    evaluate = serial.evaluate_split

    def record_loss(*arguments: Any) -> tuple[float, float]:
        loss, accuracy = evaluate(*arguments)
        losses.append(loss)
        return loss, accuracy

    monkeypatch.setattr(serial, "evaluate_split", record_loss)
    keys: dict[str, Any] = {"rounds": 12, "participation": 0.5, "lr": 0.5, "steps": 5, "validation": 0.25}
    result = fedheal.run(quick(method="fedce", model="tiny_data:conv_batchnorm", **keys), progress=False)
    assert len(losses) > 5
    assert all(map(math.isfinite, losses))
    assert all(record.report["skipped"] == {} for record in result.history)


def test_each_client_is_told_its_weight_and_the_absent_keep_theirs() -> None:
    term = FedCE()
    locals_ = {"a": vector(1.0), "b": vector(2.0)}
    _, shared = absorb_updates(term, make_packed(0.0), locals_, [{}, {}], {"e.z": vector(0.9)}, weights=[0.25, 0.75])
    assert {name: value.item() for name, value in shared.items()} == {"e.z": 0.9, "e.a": 0.25, "e.b": 0.75}


def test_cosines_by_hand() -> None:
    """(1, 0), (0, 1), (1, 1) with equal weights: the others' sums are along (1, 2), (2, 1) and (1, 1)."""
    d = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert cosines_to_others(d @ d.T, np.full(3, 1 / 3)) == pytest.approx([5**-0.5, 5**-0.5, 1.0])
    # weights 1/2, 1/4, 1/4: (0, 1) and (1, 1) alike for the first; (3, 1) / 4 and (2, 1) / 4 for the others
    e = np.array([0.5, 0.25, 0.25])
    assert cosines_to_others(d @ d.T, e) == pytest.approx([5**-0.5, 10**-0.5, 3 / 10**0.5])


def test_cosines_of_updates_that_do_not_move_are_zero() -> None:
    assert cosines_to_others(np.zeros((2, 2)), np.full(2, 0.5)).tolist() == [0.0, 0.0]
    assert cosines_to_others(np.diag([1.0, 0.0]), np.full(2, 0.5)).tolist() == [0.0, 0.0]
    assert cosines_to_others(np.ones((1, 1)), np.ones(1)).tolist() == [0.0]


DELTAS = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]


def test_fedce_by_hand() -> None:
    """a: shares (1/2, 1/2, 0) floored at 0.001 and normalised. Nothing is known of the data yet, so b is equal; e is floored.

    The new weights are those of this round's average.
    """
    weights = AggregatorRounds(Aggregator(fedce_stage("times")), 2)
    new_weights = weights("abc", DELTAS, accuracy_without=[0.0, 0.0, 0.0], measured_rounds=[0, 0, 0])
    share = 0.5 / 1.001  # and 0.001 / 1.001 of the last, which is below the floor of the weights themselves
    whole = 2 * share + 0.001
    assert new_weights == pytest.approx([share / whole, share / whole, 0.001 / whole], rel=1e-9)
    assert weights.model.tolist() == pytest.approx([(share + 0.001) / whole] * 2, rel=1e-9)


def test_weights_themselves_have_a_floor() -> None:
    """c is at the floor in both spaces: the product of its shares is about 1e-6, its weight is not."""
    weights = AggregatorRounds(Aggregator(fedce_stage("times")), 2)
    for _ in range(50):
        *_, last = weights("abc", DELTAS, accuracy_without=[0.0, 0.0, 1.0], measured_rounds=[1, 1, 1])
    assert last == pytest.approx(1e-3, rel=0.01)


def test_fedces_second_round_averages_over_a_clients_rounds() -> None:
    """Accuracies 0.8, 0.4, 0 and the first round's 0: 0.4, 0.2, 0 on average, b ~ (0.6, 0.8, 1) / 2.4.

    With the weights of round 1, (500, 500, 1)/1001: the others' sums are (1, 501), (501, 1), (500, 500), all over 1001.
    """
    for mode in ("times", "plus"):
        weights = AggregatorRounds(Aggregator(fedce_stage(mode)), 2)
        first = weights("abc", DELTAS, accuracy_without=[0.0, 0.0, 0.0], measured_rounds=[0, 0, 0])
        if mode == "times":
            e = np.array(first)
        else:  # a + b, with b a third each
            a = np.array([0.5, 0.5, 0.001]) / 1.001
            e = (a + 1 / 3) / 2
            assert first == pytest.approx(e.tolist(), rel=1e-9)
        now = []
        for m in range(3):
            others = sum(e[j] * np.array(DELTAS[j]) for j in range(3) if j != m)
            now.append(others @ DELTAS[m] / np.linalg.norm(others) / np.linalg.norm(DELTAS[m]))
        a = 1 - (np.array([5**-0.5, 5**-0.5, 1.0]) + now) / 2
        a = np.maximum(a / a.sum(), 1e-3)
        a, b = a / a.sum(), np.array([0.6, 0.8, 1.0]) / 2.4
        expected = a * b if mode == "times" else a + b
        new_weights = weights("abc", DELTAS, accuracy_without=[0.8, 0.4, 0.0], measured_rounds=[1, 1, 1])
        assert new_weights == pytest.approx((expected / expected.sum()).tolist(), rel=1e-6), mode


def test_fedce_gives_more_weight_to_whom_the_others_cannot_replace() -> None:
    """Equal directions; the model without a does well on its data, the one without b does not."""
    weights = AggregatorRounds(Aggregator(fedce_stage()), 2)
    orthogonal = [[1.0, 0.0], [0.0, 1.0]]
    assert weights("ab", orthogonal, accuracy_without=[0.0, 0.0], measured_rounds=[0, 0]) == pytest.approx([0.5, 0.5])
    new_weights = weights("ab", orthogonal, accuracy_without=[0.8, 0.0], measured_rounds=[1, 1])
    assert new_weights == pytest.approx([0.6 / 1.6, 1.0 / 1.6])
    assert math.isclose(sum(new_weights), 1.0)


@pytest.mark.parametrize("scales", [(1.0, 2.0, 3.0), (1.0, 1000.0, 0.001), (1.0, 1e6, 1e-6)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_parallel_updates_count_alike_however_far_they_go(scales: tuple[float, ...], dtype: type) -> None:
    """All cosines are 1, so 1 - cos is a rounding error, and its shares would be weights."""
    direction = np.random.default_rng(0).normal(size=50)
    weights = AggregatorRounds(Aggregator(fedce_stage()), 50)
    deltas = [(scale * direction).astype(dtype).tolist() for scale in scales]
    zeros = {"accuracy_without": [0.0] * 3, "measured_rounds": [0] * 3}
    assert weights("abc", deltas, **zeros) == pytest.approx([1 / 3] * 3)


def test_fedces_newcomers_and_cohorts_of_any_size_start_from_equal_parts(monkeypatch) -> None:
    """All directions are orthogonal and all accuracies equal, so nobody has reason to count for more than another."""
    starts = []

    def record_starts(gram: np.ndarray, e: np.ndarray) -> np.ndarray:
        starts.append(e.tolist())
        return cosines_to_others(gram, e)

    monkeypatch.setattr("fedheal.aggregate.whole.fedce.cosines_to_others", record_starts)
    weights = AggregatorRounds(Aggregator(fedce_stage()), 8)
    axes = dict(zip("abcdefgh", np.eye(8).tolist(), strict=True))
    for cohort in ("abcde", "f", "abfgh", "gf"):
        new_weights = weights(
            cohort, [axes[c] for c in cohort], accuracy_without=[0.0] * len(cohort), measured_rounds=[0] * len(cohort)
        )
        assert new_weights == pytest.approx([1 / len(cohort)] * len(cohort))
        assert starts[-1] == pytest.approx([1 / len(cohort)] * len(cohort))


def test_fedces_weights_are_kept_as_multiples_of_an_equal_part() -> None:
    """0.6 and 1 over 1.6 among two are 0.75 and 1.25 of a half. Alone, a has an equal part of one, all of it; b keeps its."""
    weights = AggregatorRounds(Aggregator(fedce_stage()), 2)
    for accuracy_without, measured_rounds in (([0.0, 0.0], [0, 0]), ([0.8, 0.0], [1, 1])):
        weights("ab", [[1.0, 0.0], [0.0, 1.0]], accuracy_without=accuracy_without, measured_rounds=measured_rounds)
    assert weights.state.stage.e.tolist() == pytest.approx([0.75, 1.25])
    assert weights("a", [[1.0, 0.0]], accuracy_without=[0.4], measured_rounds=[1]) == [1.0]
    assert weights.state.stage.e.tolist() == pytest.approx([1.0, 1.25])


def test_fedce_with_everyone_there_takes_the_first_rounds_accuracy_for_nothing() -> None:
    """In round t an accuracy of 0.8 in every round but the first is 0.8 (t-1)/t on average, as in the original."""
    weights = AggregatorRounds(Aggregator(fedce_stage()), 2)
    orthogonal = [[1.0, 0.0], [0.0, 1.0]]
    for t in range(1, 6):
        new_weights = weights("ab", orthogonal, accuracy_without=[0.8 * (t > 1), 0.0], measured_rounds=[t - 1, t - 1])
        b = np.array([1 - 0.8 * (t - 1) / t, 1.0])
        assert new_weights == pytest.approx((b / b.sum()).tolist())


def test_a_client_without_an_accuracy_takes_the_cohorts_mean() -> None:
    """0.8 and 0.4 are known, so c, a newcomer, counts with 0.6: in round 2, 1 - (0.4, 0.2, 0.3) over 2.1."""
    weights = AggregatorRounds(Aggregator(fedce_stage()), 3)
    axes = np.eye(3).tolist()
    weights("ab", axes[:2], accuracy_without=[0.0, 0.0], measured_rounds=[0, 0])
    new_weights = weights("abc", axes, accuracy_without=[0.8, 0.4, 0.0], measured_rounds=[1, 1, 0])
    assert new_weights == pytest.approx([0.6 / 2.1, 0.8 / 2.1, 0.7 / 2.1])


def test_fedce_gives_equal_clients_equal_weights_however_seldom_they_come() -> None:
    """Four of them come one time in ten, the others four in five; without any of them the others are right in 4 of 5."""
    rng, weights, term = np.random.default_rng(0), AggregatorRounds(Aggregator(fedce_stage()), 20), FedCE()
    names, axes, slots, shared = "abcdefghijklmnopqrst", np.eye(20).tolist(), {}, {}
    for number in range(1, 61):
        here = [c for i, c in enumerate(names) if rng.random() < (0.1 if i < 4 else 0.8)]
        messages = []
        for c in here:
            keys = {"client": c, "slot": slots.get(c, {}), "shared": shared, "validate": lambda at: (0.1, 0.8)}
            ctx = make_term_context(term, make_packed(0.0), round=number, **keys)
            messages.append(term.metrics(ctx, make_packed(1.0)))
            slots[c], _ = term.finish(ctx, make_packed(1.0))
        metrics = {name: [message[name] for message in messages] for name in ("accuracy_without", "measured_rounds")}
        new_weights = weights("".join(here), [axes[names.index(c)] for c in here], **metrics)
        shared |= {f"e.{c}": vector(weight) for c, weight in zip(here, new_weights, strict=True)}
        assert new_weights == pytest.approx([1 / len(here)] * len(here))
    assert {int(slot["accuracies"][0]) for slot in slots.values()} >= {0, 40}, "take another seed"
