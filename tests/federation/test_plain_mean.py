"""A plain mean straight from the replies, beside the same cohort with its matrix of updates: the bits must be equal."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from fedheal import Layout, aggregate, methods
from fedheal.aggregate.server_optimizer import Server
from fedheal.core.layout import Packed
from fedheal.core.state import RunState
from fedheal.federation.cohort import Cohort, CohortBuilder
from fedheal.federation.replies import RejectedReply, ReplyRequirements, TrainReply
from fedheal.federation.reply_checks import match_arrays
from fedheal.federation.reply_limits import find_diverged
from fedheal.federation.reply_updates import BLOCK

MODULE = nn.Sequential(nn.Linear(600, 500), nn.BatchNorm1d(500), nn.Linear(500, 16))  # the first matrix has two blocks
LAYOUT = Layout.of(MODULE)
MODEL = LAYOUT.pack(MODULE.state_dict())
assert BLOCK < 600 * 500


@dataclass(frozen=True)
class RawReply:
    """A reply before it is checked."""

    client: str
    arrays: dict[str, np.ndarray]
    num_examples: float = 10.0
    is_difference: bool = False


def make_reply(client: str, seed: int, scale: float = 0.01) -> RawReply:
    rng = np.random.default_rng(seed)
    state = LAYOUT.unpack(MODEL)
    moved = {k: v + torch.as_tensor(scale * rng.standard_normal(v.shape)).to(v.dtype) for k, v in state.items()}
    moved["1.running_var"] = moved["1.running_var"].abs()
    return RawReply(client, {name: tensor.numpy() for name, tensor in moved.items()}, num_examples=10.0 + seed)


def spoil(reply: RawReply, value: float, name: str = "0.weight") -> RawReply:
    array = reply.arrays[name].copy()
    array.reshape(-1)[-1] = value
    return replace(reply, arrays={**reply.arrays, name: array})


def subtract_model(reply: RawReply) -> RawReply:
    before = LAYOUT.unpack(MODEL)
    params = {e.name for e in LAYOUT.entries if e.kind == "param"}
    arrays = {name: a - before[name].numpy() if name in params else a for name, a in reply.arrays.items()}
    return replace(reply, arrays=arrays, is_difference=True)


def shift_bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(b"." + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)


def read_reply(reply: RawReply, layout: Layout, requirements: ReplyRequirements) -> TrainReply:
    if reply.num_examples > requirements.max_examples:
        raise RejectedReply("too many examples")
    arrays = match_arrays(reply.arrays, lambda array: array, layout)
    return TrainReply(
        reply.client, "home", arrays, reply.num_examples, {"loss": 1.0}, is_difference=reply.is_difference
    )


def build_cohort(
    replies: list[RawReply], model: Packed, layout: Layout, max_norm: float | str | None, budget: int | None
) -> Cohort:
    builder = CohortBuilder(layout, ReplyRequirements(max_norm=max_norm), read_reply, budget=budget)
    started, server = aggregate.uniform().init(layout), Server().init()
    return builder.build(replies, RunState(round=0, seed=0, model=model, aggregator=started, server=server), {})


def compare_with_matrix(
    replies: list[RawReply],
    method: str = "uniform",
    max_norm: float | str | None = None,
    model: Packed = MODEL,
    layout: Layout = LAYOUT,
    budget: int | None = None,
) -> tuple[bool, dict[str, str]]:
    """Aggregate with and without a matrix; return whether the second wrote none after all, and the skipped clients."""
    aggregator = replace(methods.get(method).aggregator, on_bad_update="skip")
    outcomes = []
    for writes_first in (True, False):
        cohort = build_cohort(replies, model, layout, max_norm, budget)
        if writes_first:
            assert cohort.updates.deltas.shape == (len(cohort.updates.clients), layout.sizes().params)
        aggregated = aggregator.apply(model, cohort.updates, aggregator.init(layout))
        outcomes.append((aggregated, cohort))
    (slow, with_matrix), (fast, without) = outcomes
    for name in ("params", "buffers", "counters"):
        assert torch.equal(getattr(slow.model, name), getattr(fast.model, name)), name
    assert torch.equal(slow.weights, fast.weights)
    assert slow.report == fast.report
    assert with_matrix.skipped == without.skipped
    assert with_matrix.find_far_norms().keys() == without.find_far_norms().keys()
    assert without.get_norms() == pytest.approx(with_matrix.get_norms(), rel=1e-5)
    return "deltas" not in vars(without.updates), {**fast.report["skipped"], **without.skipped}


@pytest.mark.parametrize(("number", "method"), [(1, "uniform"), (3, "uniform"), (4, "fedavg"), (6, "afl")])
def test_a_plain_mean_has_the_bits_of_the_matrix_and_writes_none(number, method):
    replies = [make_reply(f"site-{i}", i) for i in range(number)]
    assert compare_with_matrix(replies, method) == (True, {})


def test_differences_and_whole_models_mix():
    replies = [
        make_reply("a", 1),
        subtract_model(make_reply("b", 2)),
        make_reply("c", 3),
        subtract_model(make_reply("d", 4)),
        make_reply("e", 5),
    ]
    assert compare_with_matrix(replies) == (True, {})


def test_methods_that_read_updates_get_the_matrix():
    replies = [make_reply(f"site-{i}", i) for i in range(3)]
    for method in ("fedheal", "qffl:mode=reweight", "fedfv"):
        wrote_none, skipped = compare_with_matrix(replies, method)
        assert not skipped
        assert wrote_none == (method == "qffl:mode=reweight")


@pytest.mark.parametrize("convert", [lambda a: a.astype(np.float64), lambda a: a.astype(">f4"), shift_bytes])
def test_other_arrays_go_through_the_matrix(convert):
    odd = make_reply("b", 2)
    odd = replace(odd, arrays={n: convert(a) if a.dtype == np.float32 else a for n, a in odd.arrays.items()})
    assert compare_with_matrix([make_reply("a", 1), odd, make_reply("c", 3)]) == (False, {})


def test_other_models_go_through_the_matrix():
    module = nn.Linear(16, 16).to(torch.bfloat16)
    layout = Layout.of(module)
    model = layout.pack(module.state_dict())
    arrays = {name: t.detach().float().numpy() + 0.5 for name, t in module.state_dict().items()}
    assert compare_with_matrix([RawReply("a", arrays), RawReply("b", arrays)], model=model, layout=layout) == (
        False,
        {},
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_is_skipped(value):
    replies = [make_reply("a", 1), spoil(make_reply("b", 2), value), make_reply("c", 3)]
    wrote_none, skipped = compare_with_matrix(replies)
    assert not wrote_none
    assert skipped.keys() == {"b"}
    assert "NaN, infinity" in skipped["b"]


def test_a_bad_reply_leaves_the_rest_the_mean():
    wrong = make_reply("b", 2)
    wrong = replace(wrong, arrays={**wrong.arrays, "0.weight": wrong.arrays["0.weight"].T})
    oversized, no_buffer = (
        replace(make_reply("c", 3), num_examples=1e12),
        spoil(make_reply("d", 4), np.nan, "1.running_mean"),
    )
    wrote_none, skipped = compare_with_matrix([make_reply("a", 1), wrong, oversized, make_reply("e", 5)])
    assert wrote_none
    assert skipped.keys() == {"b", "c"}
    wrote_none, skipped = compare_with_matrix([make_reply("a", 1), no_buffer, make_reply("e", 5)])
    assert skipped == {"d": "its buffers hold NaN or infinity"}


@pytest.mark.parametrize("method", ["uniform", "fedavg+fphl", "fedheal"])
@pytest.mark.parametrize("value", [1e4, 1e19, 1e30, -3e38])  # the square of 1e19 is as large as float32 can hold
def test_a_diverged_update_is_left_out_as_if_its_client_were_absent(method, value):
    replies = [make_reply("a", 1), spoil(make_reply("b", 2), value), make_reply("c", 3)]
    _, skipped = compare_with_matrix(replies, method)
    assert skipped.keys() == {"b"}
    assert skipped["b"].startswith(f"its training has diverged: its update has norm {abs(value):.4g}, ")
    outcomes = []
    for present in (replies, [replies[0], replies[2]]):
        aggregator = replace(methods.get(method).aggregator, on_bad_update="skip")
        cohort = build_cohort(present, MODEL, LAYOUT, None, None)
        outcomes.append(aggregator.apply(MODEL, cohort.updates, aggregator.init(LAYOUT)))
    assert torch.equal(outcomes[0].model.params, outcomes[1].model.params)
    assert outcomes[0].weights[[0, 2]].tolist() == outcomes[1].weights.tolist()


def test_an_update_is_diverged_only_if_it_is_far_from_the_others_and_from_the_model():
    model = torch.full((10_000,), 0.5)  # of norm 50
    assert find_diverged({"a": 0.1, "b": 0.1, "c": 499.0}, model) == {}
    assert find_diverged({"a": 0.1, "b": 0.1, "c": 501.0}, model).keys() == {"c"}
    assert find_diverged({"a": 1.0, "b": 1.0, "c": 999.0}, model) == {}
    assert find_diverged({"a": 1.0, "b": 1.0, "c": 1001.0}, model).keys() == {"c"}
    still = {"a": 1e-9, "b": 1e-9, "c": 1e-9}  # these have nothing left to learn
    assert find_diverged(still | {"newcomer": 499.0}, model) == {}
    assert find_diverged({}, model) == find_diverged({"a": 0.0, "b": 0.0}, model) == {}


def test_an_update_that_is_alone_is_compared_with_the_model():
    model = torch.full((10_000,), 0.5)
    assert find_diverged({"a": 49_999.0}, model) == {}
    assert find_diverged({"a": 50_001.0}, model).keys() == {"a"}
    assert find_diverged({"a": 50.0}, torch.zeros(15)) == {}  # a small linear model that starts at zero


def test_diverged_updates_do_not_vouch_for_each_other():
    model = torch.full((10_000,), 0.5)
    assert find_diverged({"a": 1.0, "b": 1.0, "c": 1e15, "d": 1e15}, model).keys() == {"c", "d"}
    assert find_diverged({"a": 1.0, "b": 1.0, "c": 2000.0, "d": 2000.0}, model).keys() == {"c", "d"}
    assert find_diverged({"a": 1e15, "b": 1e15}, model).keys() == {"a", "b"}
    assert find_diverged({"a": 1.0, "b": math.nan, "c": 1.0, "d": 1.0, "e": 1e15}, model).keys() == {"e"}


def test_what_most_clients_were_sent_may_be_why_they_diverge():
    """One client's message may do that to all others. It must not be the only one that is left."""
    model = torch.full((10_000,), 0.5)
    found = find_diverged({"a": 1.0, "b": 1e15, "c": 1e16}, model)
    assert found["a"] == "the training of 2 of 3 clients has diverged, which what they were sent may have caused"
    assert found["c"].startswith("its training has diverged: its update has norm 1e+16")
    assert find_diverged({"a": 1.0, "b": 1e15}, model).keys() == {"b"}
    found = find_diverged({"a": 1.0, "b": math.nan, "c": math.inf, "d": 1.0}, model)
    assert found == {}  # the aggregator names clients whose update is not finite
    found = find_diverged({"a": 1.0, "b": math.nan, "c": math.inf}, model)
    assert found == {"a": "the training of 2 of 3 clients has diverged, which what they were sent may have caused"}


@pytest.mark.parametrize("echo", [0.0, 1e-12, 1e-6])
def test_a_client_that_hardly_moves_excludes_nobody_from_a_model_of_zeros(echo):
    model = torch.zeros(10_000)
    assert find_diverged({"echo": echo, "honest": 9_999.0}, model) == {}
    assert find_diverged({"echo": echo, "honest": 10_001.0}, model).keys() == {"honest"}  # entries of size 100
    assert find_diverged({"echo": echo, "honest": 5_000.0, "other": 5_000.0}, model) == {}
    honest = dict.fromkeys("abcde", 5000.0)
    assert find_diverged(honest | {f"echo-{i}": echo for i in range(4)}, model) == {}
    assert find_diverged({"echo": echo, "other": echo, "honest": 90.0}, model + 1e-9) == {}
    assert find_diverged({"echo": echo, "other": echo, "honest": 101.0}, model).keys() == {"honest"}


@pytest.mark.parametrize("max_norm", [10.0, "auto"])
@pytest.mark.parametrize("budget", [None, 0])
def test_long_updates_are_left_out_before_the_mean(max_norm, budget):
    replies = [make_reply("a", 1), make_reply("b", 2, scale=1.0), make_reply("c", 3), make_reply("d", 4)]
    wrote_none, skipped = compare_with_matrix(replies, max_norm=max_norm, budget=budget)
    assert wrote_none
    assert skipped.keys() == {"b"}
    assert "max_norm" in skipped["b"]
    assert compare_with_matrix(replies, budget=budget)[1] == {}


def test_a_long_update_is_named_by_the_pass_that_averages():
    cohort = build_cohort(
        [make_reply("a", 1), make_reply("b", 2, scale=1.0), make_reply("c", 3)], MODEL, LAYOUT, None, None
    )
    aggregator = aggregate.uniform()
    aggregator.apply(MODEL, cohort.updates, aggregator.init(LAYOUT))
    assert "times the median" in cohort.find_far_norms()["b"]
    assert "deltas" not in vars(cohort.updates)
