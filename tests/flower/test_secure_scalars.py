"""Scalars and counters that a site claims in the clear: none may spoil the sum of the others, or end the run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp

from fedheal.aggregate import fedheal as make_fedheal
from fedheal.core.layout import Layout, Packed
from fedheal.core.updates import Updates
from fedheal.flower import client
from fedheal.flower.messages import record_to_model
from fedheal.flower.secure import SecureFedHEAL, SecureStrategy, SecureSumMod, make_summed_mean
from fedheal.flower.secure_cohort import find_far_buffers
from fedheal.flower.secure_vector import SecureSums
from flower.secure_sites import LAYOUT, START, CopyingGrid, make_grid, make_updates

TAU = 0.6


def run(
    metrics: dict[str, float] | None = None, counters: list[int] | None = None, rounds: int = 1, **settings: Any
) -> SecureStrategy:
    """Run four sites, of which the first one claims these values."""

    def change(partition: int, reply: Message) -> None:
        if partition or reply.has_error():
            return
        for record in reply.content.metric_records.values():
            record.update({name: value for name, value in (metrics or {}).items() if name in record})
        if counters is not None and "fedheal.counters" in reply.content.array_records:
            reply.content["fedheal.counters"] = ArrayRecord({"counters": Array(np.array(counters))})

    strategy = SecureFedHEAL(tau=TAU, fraction_evaluate=0.0, **settings)
    strategy.start(make_grid(4, change=change), START, num_rounds=rounds)
    return strategy


def compute_core(partitions: list[int]) -> Packed:
    aggregator = make_fedheal(tau=TAU)
    updates = make_updates(partitions, 1, START)
    return aggregator.apply(record_to_model(LAYOUT, START), updates, aggregator.init(LAYOUT)).model


@pytest.mark.parametrize("value", [1e4, 1e10, 1.1e10, 1e300, 1.7e308])
def test_a_buffer_norm_far_beyond_the_others_is_skipped_and_freezes_nobody(value):
    strategy = run({"buffer-norm": value})
    (record,) = strategy.history
    assert set(record.report["skipped"]) == {"partition-0"}
    wrong = "its metric 'buffer-norm' = " if value > 1e10 else "more than 1000 times the median of this round"
    assert wrong in record.report["skipped"]["partition-0"]
    assert record.report["secure_sum"]["clients"] == 3
    assert float((strategy.state.model.buffers - compute_core([1, 2, 3]).buffers).abs().max()) < 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("examples", [1e-9, 1e11])
def test_an_extreme_number_of_examples_is_skipped_and_leaves_the_others_sum(examples):
    strategy = run({"num-examples": examples}, fael=False, max_examples=1e12)
    (record,) = strategy.history
    assert set(record.report["skipped"]) == {"partition-0"}
    assert "too far from it for a secure sum" in record.report["skipped"]["partition-0"]
    assert record.report["secure_sum"]["clients"] == 3


def test_a_client_that_is_left_out_before_the_sum_counts_against_min_replies():
    strategy = run({"num-examples": 1e11}, fael=False, max_examples=1e12, min_replies=4)
    skipped = strategy.history[0].report["skipped"]
    assert "too far from it for a secure sum" in skipped["partition-0"]
    assert skipped["partition-1"] == "this round has only 3 usable replies, fewer than min_replies = 4"
    assert torch.equal(strategy.state.model.params, record_to_model(LAYOUT, START).params)


@pytest.mark.parametrize("value", [0.0, 5e-324, 100.0])
def test_a_buffer_norm_within_the_bound_counts_and_costs_no_precision_that_matters(value):
    strategy = run({"buffer-norm": value})
    assert strategy.history[0].report["skipped"] == {}
    assert float((strategy.state.model.buffers - compute_core([0, 1, 2, 3]).buffers).abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("norms", "model_norm", "far"),
    [
        ({}, 8.0, set()),
        ({"a": 0.0, "b": 0.0, "c": 900.0}, 0.0, set()),
        ({"a": 0.0, "b": 0.0, "c": 1100.0}, 0.0, {"c"}),
        ({"a": 1e6, "b": 2e6, "c": 3e6}, 8.0, set()),  # the first round of data that is not normalised
        ({"a": 0.5, "b": 1.0, "c": 100.0}, 1.0, set()),  # a domain with other statistics
        ({"a": 1e-6, "b": 1e-6, "c": 20.0}, 8.0, set()),  # a newcomer when the others' hardly move
        ({"a": 5e-324, "b": 50.0}, 8.0, set()),  # a low claim does not exclude the only other one
        ({"a": 1.0, "b": 1e9}, 8.0, {"b"}),
    ],
)
def test_honest_buffers_are_not_far(norms, model_norm, far):
    assert set(find_far_buffers(norms, model_norm)) == far


def test_a_counter_that_jumps_is_skipped_and_the_others_count_on():
    strategy = run(counters=[2**53], rounds=3)
    for record in strategy.history:
        assert set(record.report["skipped"]) == {"partition-0"}
        assert "more than the server sent" in record.report["skipped"]["partition-0"]
    assert strategy.state.model.counters.tolist() == [3 + 3 * 3]  # partition 3 adds 3 in each round


def test_a_smaller_counter_changes_nothing():
    strategy = run(counters=[-5], rounds=2)
    assert [record.report["skipped"] for record in strategy.history] == [{}, {}]
    assert strategy.state.model.counters.tolist() == [3 + 2 * 3]


@pytest.mark.parametrize("value", [1.7e308, float("nan"), -1.0, 1.0])
def test_a_model_without_buffers_ignores_a_buffer_norm(value):
    app = ClientApp(mods=[SecureSumMod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        step = 0.1 * (1 + int(context.node_config["partition-id"]))
        return client.reply(message, context, {"w": client.read_model(message)["w"] + step}, 10)

    def spoil(node: int, reply: Message) -> list[Message]:
        if node == 7 and "fedheal.sum" in reply.content.metric_records:
            scalars = reply.content.metric_records["fedheal.sum"]
            reply.content["fedheal.sum"] = MetricRecord({**scalars, "buffer-norm": value})
        return [reply]

    strategy = SecureFedHEAL(tau=0.0, fraction_evaluate=0.0)
    grid = CopyingGrid(app, {7 + i: {"partition-id": i} for i in range(3)}, spoil)
    strategy.start(grid, ArrayRecord({"w": torch.zeros(5)}), num_rounds=1)
    assert strategy.history[0].report["skipped"] == {}
    assert strategy.history[0].report["secure_sum"]["clients"] == 3


class Normalised(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)


def reduce_sums(totals: list[float]) -> Packed:
    """Return the model that two equal clients' sum makes of a new batch normalisation."""
    layout = Layout.of(Normalised())
    model = layout.pack(Normalised().state_dict())
    aggregator = make_fedheal(tau=0.0, fael=False)
    sums = SecureSums({"a": 1.0, "b": 1.0}, {"a": 0.5, "b": 0.5}, 1.0, 4.0, np.array(totals))
    updates = Updates(
        ["a", "b"], torch.zeros(2, 4), [1, 1], buffers=model.buffers.expand(2, -1), counters=np.zeros((2, 1), np.int64)
    )
    aggregator = dataclasses.replace(aggregator, reduce=make_summed_mean(sums, layout))
    return aggregator.apply(model, updates, aggregator.init(layout)).model


def test_a_variance_never_becomes_negative():
    buffers = reduce_sums([0.0] * 4 + [2.0] * 4 + [-1.0, 0.5, -1.0, -0.25]).buffers  # two means, two variances
    assert buffers.tolist() == [-2.0, 1.0, 0.0, 0.5]
