"""Counting directions, on updates small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedheal import Layout, Updates, aggregate, methods
from fedheal.aggregate import Aggregator
from fedheal.aggregate.masks.sign_agreement import bin_consistency, count_agreeing, sign_agreement_report
from fedheal.core.state import State

LAYOUT = Layout.of(torch.nn.Linear(1, 2))  # weight [2], bias [2]
# Entry by entry over four rounds: always up, up three times, up and down in turn, always down.
ROUNDS = [[1.0, 1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0], [1.0, 1.0, 1.0, -1.0], [1.0, -1.0, -1.0, -1.0]]


def apply_rounds(aggregator, rounds, clients=("a",), state=None):
    model = torch.zeros(4)
    state = state or aggregator.init(LAYOUT)
    reports = []
    for values in rounds:
        rows = torch.tensor([values] * len(clients)) * torch.arange(1.0, 1 + len(clients))[:, None]
        losses = {"loss": [1.0 + i for i in range(len(clients))]}
        out = aggregator.apply(model, Updates(list(clients), rows, [1] * len(clients), metrics=losses), state)
        model, state = out.model, out.state
        reports.append(out.report.get("directions"))
    return model, state, reports


def test_blocks_and_the_long_window_by_client_and_tensor():
    _, _, reports = apply_rounds(Aggregator(sign_agreement_report(block=2, long=4)), ROUNDS)
    assert reports[0] is None
    assert reports[2] is None
    # Rounds 1 and 2: entries 0, 1 and 3 kept their direction (2 of 2), entry 2 did not (1 of 2). Weight: 0, 1; bias: 2, 3.
    assert reports[1] == {"block": {"a": {"weight": [0, 2], "bias": [1, 1]}}}
    # Rounds 3 and 4: entries 0 and 3 kept theirs.
    assert reports[3]["block"] == {"a": {"weight": [1, 1], "bias": [1, 1]}}
    # Over all four: entry 0 and 3 four times, entry 1 three times, entry 2 twice. Bins: 2, 3, 4 of 4.
    assert reports[3]["long"] == {"a": {"weight": [0, 1, 1], "bias": [1, 0, 1]}}


def test_a_clients_rounds_are_those_it_took_part_in():
    aggregator = Aggregator(sign_agreement_report(block=2, long=9))
    _, state, reports = apply_rounds(aggregator, ROUNDS[:1], ("a", "b"))
    _, state, reports = apply_rounds(aggregator, ROUNDS[1:2], ("b",), state)
    assert set(reports[0]["block"]) == {"b"}
    _, _, reports = apply_rounds(aggregator, ROUNDS[1:2], ("a",), state)
    assert set(reports[0]["block"]) == {"a"}


def test_watching_changes_nothing():
    rounds = [np.random.default_rng(i).normal(size=4).tolist() for i in range(5)]
    models = []
    for name in ("fedavg", "fedheal", "fedavg+afl"):
        plain, watched = methods.get(name).aggregator, methods.get(f"{name}+directions").aggregator
        models.append(apply_rounds(plain, rounds, ("a", "b", "c"))[0])
        assert torch.equal(models[-1], apply_rounds(watched, rounds, ("a", "b", "c"))[0])
    assert len({tuple(model.tolist()) for model in models}) == len(models)


def test_the_state_goes_through_arrays_and_on_from_there():
    aggregator = Aggregator(sign_agreement_report(block=2, long=4))
    _, whole, reports = apply_rounds(aggregator, ROUNDS)
    _, half, _ = apply_rounds(aggregator, ROUNDS[:3])
    arrays, json = half.to_arrays()
    back = State.from_arrays({k: v.clone() for k, v in arrays.items()}, json)
    _, resumed, again = apply_rounds(aggregator, ROUNDS[3:], state=back)
    assert again[0] == reports[3]
    assert all(
        torch.equal(a, b) for a, b in zip(whole.to_arrays()[0].values(), resumed.to_arrays()[0].values(), strict=True)
    )


def test_folding_is_symmetric_and_complete():
    for n in range(1, 12):
        up = torch.randint(0, n + 1, (500,), generator=torch.Generator().manual_seed(n))
        actual = count_agreeing(up, n)
        assert actual.sum() == 500
        assert len(actual) == n - (n + 1) // 2 + 1
        assert (actual == count_agreeing(n - up, n)).all()


def test_the_spread_of_fphls_own_counts():
    _, state, _ = apply_rounds(aggregate.fedheal(tau=0.3), ROUNDS)
    shares = bin_consistency(state)["a"]
    # 4 of 4 rounds twice, 3 of 4 (75 %, bin 5) once, 2 of 4 (50 %, bin 0) once.
    assert shares == [0.25, 0, 0, 0, 0, 0.25, 0, 0, 0, 0.5]
    assert bin_consistency(apply_rounds(aggregate.fedavg(), ROUNDS)[1]) is None


@pytest.mark.parametrize(("name", "number"), [("block", 1), ("long", 0), ("block", True)])
def test_windows_of_less_than_two_rounds_are_refused(name, number):
    with pytest.raises(ValueError, match=f"{name} = {number}"):
        sign_agreement_report(**{name: number})
