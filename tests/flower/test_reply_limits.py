"""One client cannot end a round, a run or a disk: everything its reply holds is bounded, and what is not is named."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedheal import Layout, aggregate
from fedheal.core.layout import Packed
from fedheal.federation.extra_checks import (
    check_extras,
    find_far_extras,
    find_far_metrics,
    find_unusable_extras,
    measure_buffer_moves,
)
from fedheal.federation.replies import RejectedReply, TrainReply
from fedheal.federation.reply_limits import MAX_NAME, find_far_norms
from fedheal.flower import FairStrategy, FedHEAL, client
from fedheal.flower.messages import RoundInstructions
from fedheal.flower.reply_reader import _check_term_messages, average_metrics
from fedheal.runs import folder as records
from flower.local_grid import LocalGrid
from flower.sites import Sites
from flower.test_bad_replies import (
    BAD,
    change_arrays,
    run_with_bad_replies,
    run_without_reply,
    set_array,
    set_client_info,
    set_metric,
)

pytestmark = pytest.mark.slow

Spoil = Callable[[Message], list[Message]]


def add_record(name: str, record: ArrayRecord | ConfigRecord | MetricRecord) -> Spoil:
    def spoil(reply: Message) -> list[Message]:
        reply.content[name] = record
        return [reply]

    return spoil


def add_records(number: int) -> Spoil:
    def spoil(reply: Message) -> list[Message]:
        for i in range(number):
            reply.content[f"more {i}"] = MetricRecord({})
        return [reply]

    return spoil


def fill_array(name: str, value: float) -> Callable[[dict[str, Array]], None]:
    def fill(record: dict[str, Array]) -> None:
        record[name] = Array(np.full_like(record[name].numpy(), value))

    return fill


TOO_MUCH = {
    "bytes": (add_record("junk", ArrayRecord({"x": Array(np.zeros(2**22))})), "more than max_reply_bytes = "),
    "records": (add_records(100), "holds 10[23] records"),
    "arrays": (add_record("junk", ArrayRecord({str(i): Array(np.zeros(1)) for i in range(1000)})), "arrays, at most"),
    "a key": (add_record("junk", MetricRecord({"x" * 3000: 1.0})), "has 3000 characters, at most 1000"),
    "text": (add_record("junk", ConfigRecord({"x": "y" * 2**21, "z": "", "e": []})), "metrics and configs hold 2097"),
    "a list": (add_record("junk", ConfigRecord({"x": [0.0] * 2**18})), "metrics and configs hold"),
    "a list of numbers": (add_record("junk", MetricRecord({"x": [0.0] * 5000})), "lists of 5000 numbers, at most 4096"),
    "a long name": (set_client_info(client="x" * 3000), "its name has 3000 characters, at most 200"),
    "a long domain": (set_client_info(domain="x" * 3000), "its domain has 3000 characters"),
    "a name of two lines": (
        set_client_info(client="site\n[round 9] all is well"),
        r"'site\\n\[round 9\] all is well' has char",
    ),
    "a counter": (change_arrays(set_array("body.1.num_batches_tracked", Array(np.array(2**62)))), "counts beyond"),
    "a counter that jumps": (
        change_arrays(set_array("body.1.num_batches_tracked", Array(np.array(2**53)))),
        r"'body.1.num_batches_tracked' counts \d+ more than the server sent, and at most 1000000000",
    ),
    "a running mean": (
        change_arrays(fill_array("body.1.running_mean", 1e30)),
        "'body.1.running_mean' holds 1e.30, beyond",
    ),
    "a running variance": (change_arrays(fill_array("body.1.running_var", -1.0)), "holds a negative variance"),
}


@pytest.mark.parametrize("first", range(0, len(TOO_MUCH), 3))
def test_a_reply_with_too_much_in_it_counts_as_an_absent_client(first, caplog, tmp_path):
    cases = dict(zip((101, 102, 103), list(TOO_MUCH.values())[first : first + 3], strict=False))
    strategy, _ = run_with_bad_replies({node: spoil for node, (spoil, _) in cases.items()}, folder=tmp_path / "run")
    assert torch.equal(strategy.state.model.params, run_without_reply(nodes=tuple(cases))[0])
    names = sorted(strategy.history[0].weights)
    for node, (_, words) in cases.items():
        assert re.search(words, strategy.history[1].report["skipped"][names[node - 100]])
    assert max(len(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) < 10_000
    assert all(record.getMessage().isprintable() and len(record.getMessage()) < 500 for record in caplog.records)


def test_a_clients_words_are_escaped_and_shortened_wherever_they_are_shown(caplog):
    strategy, name = run_with_bad_replies(set_client_info(terms="a\x1b[2J\n" + 900 * "b", round="9\n9"), "fedprox")
    (reason,) = strategy.history[1].report["skipped"].values()
    assert reason.isprintable()
    assert len(reason) <= 300
    strategy, name = run_with_bad_replies(change_arrays(set_array("a\nb" * 300, Array(np.zeros(1)))))
    assert re.search(r"unknown \['a\\nba", strategy.history[1].report["skipped"][name])
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_max_reply_bytes_can_be_set():
    strategy, _ = run_with_bad_replies({}, max_reply_bytes=100, max_empty_rounds=None)
    assert all("max_reply_bytes = 100" in reason for reason in strategy.history[0].report["skipped"].values())
    with pytest.raises(ValueError, match="max_reply_bytes = 0"):
        FedHEAL(max_reply_bytes=0)


def test_a_node_keeps_its_name_during_a_run(tmp_path):
    sites = Sites(rounds=4)
    strategy = sites.strategy(folder=tmp_path / "run", fraction_evaluate=0.0)

    def rename(node: int, reply: Message) -> list[Message]:
        return set_client_info(client=f"site {strategy.rounds.current.number}")(reply) if node == BAD else [reply]

    strategy.start(sites.grid(rename), sites.initial, num_rounds=4)
    known = {*sites.names[:2], *sites.names[3:], "site 1"}
    assert {name for record in strategy.history for name in record.weights} == known
    assert set(strategy.federation.client_domains) == set(strategy.federation.accepted) == known
    assert "is 'site 1' and now calls itself 'site 3'" in strategy.history[2].report["skipped"]["site 1"]
    # An operator who corrects a name resumes the run.
    again = sites.strategy(folder=tmp_path / "run", fraction_evaluate=0.0, resume=True)
    again.start(sites.grid(), sites.initial, num_rounds=5)
    assert again.history[-1].weights[sites.names[2]] > 0


def test_a_client_cannot_add_a_domain_or_change_to_that_of_another():
    strategy, name = run_with_bad_replies(set_client_info(domain="elsewhere"), "fedheal")
    assert "and now 'elsewhere': a client keeps its domain" in strategy.history[1].report["skipped"][name]
    assert strategy.history[2].weights[name] > 0
    assert "elsewhere" not in strategy.federation.client_domains.values()


def change_messages(value: float) -> Spoil:
    def spoil(reply: Message) -> list[Message]:
        record = reply.content["fedheal.messages"]
        record["0.change"] = Array(np.full_like(record["0.change"].numpy(), value))
        return [reply]

    return spoil


@pytest.mark.parametrize("value", [3e38, 1e7, -1e7])
def test_an_absurd_message_of_a_term_costs_its_client_the_round_and_nobody_else(value):
    strategy, name = run_with_bad_replies(change_messages(value), "scaffold")
    assert (
        f"'change' of its local terms holds {abs(value):g}, beyond 1e+06" in strategy.history[1].report["skipped"][name]
    )
    assert torch.equal(strategy.state.model.params, run_without_reply("scaffold")[0])
    assert all("unmoved" not in record.report for record in strategy.history)


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
@pytest.mark.parametrize("dtype", [np.bool_, np.uint16, np.uint32, np.uint64])
def test_a_message_of_a_dtype_that_torch_cannot_compare_costs_its_client_the_round(method, dtype):
    def spoil(reply: Message) -> list[Message]:
        record = reply.content.get("fedheal.messages", ArrayRecord())
        reply.content["fedheal.messages"] = ArrayRecord({**record, "0.more": Array(np.ones(3, dtype))})
        return [reply]

    strategy, name = run_with_bad_replies(spoil, method)
    why = strategy.history[1].report["skipped"][name]
    assert why.startswith("'more' of its local terms is torch.")
    assert why.endswith("send floats or signed integers")
    assert torch.equal(strategy.state.model.params, run_without_reply(method)[0])


def test_the_smallest_integer_is_as_large_as_the_largest():
    smallest = torch.tensor([torch.iinfo(torch.int64).min])
    with pytest.raises(RejectedReply, match=r"'x' of its local terms holds 9\.22\d*e\+18, beyond 1e\+06"):
        _check_term_messages([{"x": smallest}], 1e6)


def test_one_client_does_not_choose_the_shape_of_a_metric():
    contents = [
        RecordDict({"metrics": MetricRecord({"num-examples": examples, "f1": f1})})
        for examples, f1 in ((1000, [0.5, 0.5]), (1, 0.25), (3, 0.75), (5, float("nan")))
    ]
    assert dict(average_metrics(contents, "num-examples")) == {"f1": 0.625}


def test_huge_metrics_do_not_end_a_run(tmp_path):
    """The sum of two finite losses may be infinite, and JSON has no infinity."""
    huge = set_metric("train_loss", 1.7e308)
    strategy, _ = run_with_bad_replies({BAD: huge, BAD + 1: huge}, folder=tmp_path / "run")
    assert math.isfinite(records.read_rounds(tmp_path / "run")[1].train_loss)
    assert strategy.history[1].report["skipped"] == {}


@pytest.mark.parametrize(("method", "name"), [("afl", "loss"), ("qffl", "reach"), ("fedfv", "loss")])
def test_an_absurd_metric_that_the_method_needs_costs_its_client_the_round(method, name):
    strategy, client = run_with_bad_replies(set_metric(name, 1.7e308), method)
    assert f"its metric '{name}' = 1.7e+308 is beyond 1e+10" in strategy.history[1].report["skipped"][client]
    assert torch.equal(strategy.state.model.params, run_without_reply(method)[0])


@pytest.mark.parametrize("budget", [None, 0])
def test_a_norm_far_above_the_median_is_warned_of_and_left_out_if_asked(budget, caplog):
    far = change_arrays(set_array("head.bias", Array(np.full(3, 50, np.float32))))
    warned, name = run_with_bad_replies(far, budget=budget)
    assert list(warned.history[1].report["far_norms"]) == [name]
    assert re.search(
        f"'{name}' has norm .* times the median of this round; max_norm='auto' leaves such out", caplog.text
    )
    assert warned.history[1].report["skipped"] == {}
    bounded, _ = run_with_bad_replies(far, max_norm="auto", budget=budget)
    assert "times the median of this round, and max_norm is 'auto'" in bounded.history[1].report["skipped"][name]
    assert torch.equal(bounded.state.model.params, run_without_reply()[0])
    assert all("far_norms" not in record.report for record in bounded.history)


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("method", ["fedavg", "fedheal", "scaffold"])
@pytest.mark.parametrize("value", [1e6, 1e19, 3e38])
def test_a_diverged_update_costs_its_client_the_round_and_nobody_else(method, value, budget, caplog):
    huge = change_arrays(set_array("head.bias", Array(np.full(3, value, np.float32))))
    strategy, name = run_with_bad_replies(huge, method, budget=budget)
    assert strategy.history[1].report["skipped"][name].startswith("its training has diverged: its update has norm ")
    assert f"'{name}' is skipped: its training has diverged" in caplog.text
    assert all("far_norms" not in record.report for record in strategy.history)
    assert torch.equal(strategy.state.model.params, run_without_reply(method)[0])
    assert strategy.history[2].weights[name] > 0


@pytest.mark.parametrize("method", ["fedavg", "fedheal"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e15])
def test_no_update_counts_if_most_clients_diverge(method, value):
    """One client may have made the others diverge. It must not be the only one that is left."""
    spoil = change_arrays(set_array("head.bias", Array(np.full(3, value, np.float32))))
    strategy, _ = run_with_bad_replies(dict.fromkeys(range(101, 105), spoil), method)
    skipped = strategy.history[1].report["skipped"]
    assert len(skipped) == 5
    assert any(why.startswith("the training of 4 of 5 clients has diverged") for why in skipped.values())
    strategy, _ = run_with_bad_replies(dict.fromkeys((101, 102), spoil), method)
    assert len(strategy.history[1].report["skipped"]) == 2


def test_a_lone_reply_is_compared_with_the_model():
    """The other clients do not reply, so there is no median of theirs."""
    huge = change_arrays(set_array("head.bias", Array(np.full(3, 1e15, np.float32))))
    spoils = {node: (lambda reply: []) for node in range(100, 105)} | {BAD: huge}
    strategy, name = run_with_bad_replies(spoils)
    assert strategy.history[1].report["skipped"][name].startswith("its training has diverged")
    assert len(strategy.history[2].weights) == 5


@pytest.mark.parametrize("value", [math.nan, 1e15])
@pytest.mark.parametrize("method", ["fedavg", "fedheal"])
def test_an_update_that_cannot_be_used_does_not_count_as_a_reply(method, value):
    unusable = change_arrays(set_array("head.bias", Array(np.full(3, value, np.float32))))
    strategy, name = run_with_bad_replies(unusable, method, min_replies=5)
    assert [any(record.weights.values()) for record in strategy.history] == [True, False, True]
    skipped = strategy.history[1].report["skipped"]
    reason = "only 4 updates of this round can be used, fewer than min_updates = 5 (in a federation min_replies)"
    assert [why for client, why in skipped.items() if client != name] == [reason] * 4
    assert reason not in skipped[name]


@pytest.mark.parametrize(
    ("method", "metric", "value", "words"),
    [
        ("afl", "loss", 1e9, r"the metric 'loss' = 1e\+09, far above the median of this round"),
        ("qffl", "reach", 1e-5, "the metric 'reach' = 1e-05, far below the median of this round"),
        ("fedheal:per_step=true", "reach", 1e9, r"the metric 'reach' = 1e\+09, far above the median of this round"),
    ],
)
def test_metrics_far_from_the_others_are_warned_of_and_left_out_if_asked(method, metric, value, words):
    warned, name = run_with_bad_replies(set_metric(metric, value), method)
    assert re.search(words, warned.history[1].report["far_norms"][name])
    bounded, _ = run_with_bad_replies(set_metric(metric, value), method, max_norm="auto")
    assert re.search(f"it sends {words}", bounded.history[1].report["skipped"][name])
    assert torch.equal(bounded.state.model.params, run_without_reply(method)[0])


@pytest.mark.parametrize("value", [1e-12, 1e-165, 1e-320])
@pytest.mark.parametrize("max_norm", [None, "auto"])
@pytest.mark.parametrize("method", ["qffl", "fedheal:per_step=true", "fedheal:per_step=true,variant=released"])
def test_a_metric_that_cannot_be_divided_by_costs_its_client_the_round(method, max_norm, value):
    strategy, name = run_with_bad_replies(set_metric("reach", value), method, max_norm=max_norm)
    assert "reach" in strategy.history[1].report["skipped"][name]
    assert strategy.history[2].weights[name] > 0
    assert torch.equal(strategy.state.model.params, run_without_reply(method)[0])


def test_a_loss_is_not_far_because_the_other_sites_have_nothing_left_to_learn():
    others = {"a": 1e-6, "b": 1e-6, "c": 1e-6}
    assert find_far_metrics("loss", others | {"newcomer": 900.0}) == {}
    assert find_far_metrics("loss", others | {"newcomer": 1100.0}).keys() == {"newcomer"}
    assert find_far_metrics("loss", {"a": 2.0, "b": 2.0, "c": 1900.0}) == {}
    assert find_far_metrics("reach", others | {"newcomer": 900.0}).keys() == {"newcomer"}
    assert find_far_metrics("reach", {"a": 1.0, "b": 1.0, "c": 1.1e-3}) == {}
    assert find_far_metrics("reach", {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.9e-3, "e": 0.0}).keys() == {
        "d"
    }  # 0 is rejected


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(("name", "value", "far"), [("reach", 1e-9, "below"), ("loss", 1e9, "above")])
def test_a_metric_that_is_no_number_neither_hides_a_far_one_nor_makes_others_far(place, name, value, far):
    honest = {"a": 1.0, "b": 1.0, "c": 1.0}
    clients = [*honest.items(), ("hostile", value)]
    clients.insert(place, ("broken", math.nan))
    found = find_far_metrics(name, dict(clients))
    assert found.keys() == {"hostile"}
    assert f"far {far} the median" in found["hostile"]


def test_a_veteran_among_newcomers_is_not_far():
    def reply(client: str, rounds: float) -> TrainReply:
        return TrainReply(client, client, {}, 1, {"measured_rounds": rounds, "accuracy_without": 0.5}, (), None)

    replies = {client: reply(client, rounds) for client, rounds in (("a", 0.0), ("b", 1.0), ("c", 5000.0))}
    layout = Layout.of(torch.nn.Linear(1, 1))
    model = layout.pack(torch.nn.Linear(1, 1).state_dict())
    moved = measure_buffer_moves(replies, layout, model)
    assert find_far_extras(replies, moved, ("accuracy_without", "measured_rounds")) == {}


def test_the_reason_of_a_client_that_is_far_in_several_metrics_is_the_same_in_every_process():
    names = [f"metric-{i}" for i in range(20)]
    clients = {c: TrainReply(c, c, {}, 1, dict.fromkeys(names, 1.0), (), None) for c in "abc"}
    clients["far"] = TrainReply("far", "far", {}, 1, dict.fromkeys(names, 1e9), (), None)
    assert "'metric-9'" in find_far_extras(clients, dict.fromkeys(clients, 0.0), names)["far"]


def test_a_number_as_max_norm_replaces_the_limit_of_diverged_training():
    """A model that starts at zero and learns large values, such as prices, moves by far more than its own norm."""
    module = torch.nn.Linear(1, 1)
    initial = ArrayRecord({name: torch.zeros_like(value) for name, value in module.state_dict().items()})
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        price = torch.tensor([1e5 + context.node_config["partition-id"]])
        arrays = ArrayRecord({"weight": torch.zeros(1, 1), "bias": price})
        metrics = MetricRecord({"num-examples": 1, "train_loss": 0.0})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    def train_once(max_norm: float | None) -> FairStrategy:
        strategy = FairStrategy("uniform", fraction_evaluate=0.0, max_norm=max_norm)
        strategy.start(LocalGrid(app, {node: {"partition-id": node} for node in (1, 2, 3)}), initial, num_rounds=1)
        return strategy

    reasons = train_once(None).history[0].report["skipped"].values()
    assert all(re.fullmatch("its training has diverged: .*; max_norm sets another limit", why) for why in reasons)
    assert len(reasons) == 3
    allowed = train_once(1e6)
    assert len(allowed.history[0].weights) == 3
    assert allowed.state.model.params.tolist() == [0.0, 100_002.0]
    assert len(train_once(100_002.5).history[0].report["skipped"]) == 1  # its own limit


def test_an_aggregators_own_min_updates_counts_if_it_is_more_than_min_replies():
    aggregator = replace(aggregate.uniform(), min_updates=4)
    assert [FairStrategy(aggregator, min_replies=n).rounds.aggregator.min_updates for n in (1, 5)] == [4, 5]


@pytest.mark.parametrize("method", ["ditto", "ditto:feedback=true"])
def test_a_model_that_has_counted_many_batches_can_go_on(method):
    sites = Sites(method=method, rounds=2)
    initial = ArrayRecord({**sites.initial, "body.1.num_batches_tracked": Array(np.array(2_000_000))})
    strategy = sites.strategy(fraction_evaluate=0.0)
    strategy.start(sites.grid(), initial, num_rounds=2)
    assert [len(record.weights) for record in strategy.history] == [5, 5]
    assert strategy.state.model.counters.item() > 2_000_000


def test_a_client_that_sends_no_accuracy_although_others_do_is_named():
    sites = Sites(rounds=1)

    def drop_accuracy(node: int, reply: Message) -> list[Message]:
        if node == BAD and reply.metadata.message_type == "evaluate":
            reply.content["metrics"] = MetricRecord({"num-examples": 3})
        return [reply]

    strategy = sites.strategy()
    strategy.start(sites.grid(drop_accuracy), sites.initial, num_rounds=1)
    not_evaluated = strategy.history[0].report["not_evaluated"]
    assert not_evaluated == {sites.names[2]: "it sent no 'accuracy' that is a number, and others did"}


FAR_EXTRAS = {
    "buffers": ("fedheal", change_arrays(fill_array("body.1.running_mean", 700))),
    "messages": ("scaffold", change_messages(9e5)),
}


@pytest.mark.parametrize("kind", FAR_EXTRAS)
def test_buffers_and_messages_far_above_the_median_are_warned_of_and_left_out_if_asked(kind, caplog):
    method, far = FAR_EXTRAS[kind]
    warned, name = run_with_bad_replies(far, method)
    assert list(warned.history[1].report["far_norms"]) == [name]
    assert f"the update of '{name}' has {kind} with norm " in caplog.text
    assert warned.history[1].report["skipped"] == {}
    bounded, _ = run_with_bad_replies(far, method, max_norm="auto")
    skipped = bounded.history[1].report["skipped"]
    assert re.search(
        f"it sends {kind} with norm .* times the median of this round, and max_norm is 'auto'", skipped[name]
    )
    assert torch.equal(bounded.state.model.params, run_without_reply(method)[0])


@pytest.mark.parametrize("name", ["body.1.running_mean", "body.1.running_var"])
@pytest.mark.parametrize("value", [1e8, 1e15])
def test_buffers_that_would_spoil_those_of_all_cost_their_client_the_round(name, value):
    far = change_arrays(fill_array(name, value))
    strategy, bad = run_with_bad_replies(far)
    assert strategy.history[1].report["skipped"][bad].startswith("its buffers moved by ")
    assert torch.equal(strategy.state.model.buffers, run_without_reply()[1])
    strategy, bad = run_with_bad_replies(far, max_norm=1e9)  # a limit of parameters
    assert list(strategy.history[1].report["skipped"]) == [bad]


@pytest.mark.parametrize("still", [1, 2])
def test_clients_whose_buffers_do_not_move_exclude_nobody_unless_they_are_the_majority(still):
    """Features that are not normalised move running statistics far in the first rounds."""
    replies = {c: TrainReply(c, c, {}, 1, {}, (), None) for c in "abcd"[: 2 * still]}
    moved = {client: 0.0 if i < still else 1e12 for i, client in enumerate(replies)}
    model = Layout.of(torch.nn.BatchNorm1d(4)).pack(torch.nn.BatchNorm1d(4).state_dict())
    assert find_unusable_extras(replies, moved, model) == {}
    assert find_unusable_extras(replies, moved | {"x": 0.0, "y": 0.0}, model).keys() == set("abcd"[still : 2 * still])
    assert find_unusable_extras(replies, {"a": 0.0, "b": 0.0, "c": 1e6}, model) == {}  # the sent buffers have norm 2
    zeros = Packed(model.params, torch.zeros(8), model.counters)
    assert find_unusable_extras(replies, {"a": 0.0, "b": 0.0, "c": 1e-3}, zeros) == {}


def test_moves_of_float16_buffers_are_measured_without_overflow():
    module = torch.nn.BatchNorm1d(4).half()
    layout = Layout.of(module)
    arrays = {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}
    arrays["running_mean"] += np.float16(3e4)
    reply = TrainReply("a", "a", arrays, 1, {}, (), None)
    moved = measure_buffer_moves({"a": reply}, layout, layout.pack(module.state_dict()))["a"]
    assert moved == pytest.approx(6e4, rel=1e-3)


def test_half_of_the_clients_cannot_exclude_the_others_by_their_reach():
    def reply(client: str, reach: float) -> TrainReply:
        return TrainReply(client, client, {}, 1, {"reach": reach}, (), None)

    model = Layout.of(torch.nn.Linear(1, 1)).pack(torch.nn.Linear(1, 1).state_dict())
    replies = {client: reply(client, reach) for client, reach in zip("abcd", (1e10, 1e10, 0.1, 0.3), strict=True)}
    assert find_unusable_extras(replies, {}, model, ("reach",)) == {}
    replies["e"] = reply("e", 1e-9)
    assert find_unusable_extras(replies, {}, model, ("reach",)).keys() == {"e"}


def test_a_number_of_examples_far_above_the_others_is_warned_of_and_left_out_if_asked():
    spoil = set_metric("num-examples", 1e8)
    warned, name = run_with_bad_replies(spoil, "fedavg")
    assert warned.history[1].report["far_norms"] == {name: "1e+08 examples, far above the median of this round"}
    bounded, _ = run_with_bad_replies(spoil, "fedavg", max_norm="auto")
    assert "it sends 1e+08 examples, far above" in bounded.history[1].report["skipped"][name]
    assert torch.equal(bounded.state.model.params, run_without_reply("fedavg")[0])


@pytest.mark.parametrize("max_norm", [None, "auto"])
def test_a_message_within_the_wide_limits_counts_without_a_word(max_norm):
    """docs/flower.md says so: a message of SCAFFOLD times -30 is neither stopped nor named."""

    def lie(reply: Message) -> list[Message]:
        change = reply.content["fedheal.messages"]["0.change"].numpy()
        reply.content["fedheal.messages"]["0.change"] = Array(-30 * change)
        return [reply]

    strategy, name = run_with_bad_replies(lie, "scaffold", max_norm=max_norm)
    report = strategy.history[1].report
    assert name in strategy.history[1].weights
    assert "far_norms" not in report
    assert report["skipped"] == {}


def test_an_evaluation_on_far_more_examples_than_the_others_is_warned_of(caplog):
    sites = Sites(method="fedavg", rounds=2)
    strategy = sites.strategy()

    def spoil(node: int, reply: Message) -> list[Message]:
        if reply.metadata.message_type == "evaluate" and node == BAD and strategy.rounds.current.number == 2:
            return set_metric("num-examples", 1e8)(reply)
        return [reply]

    strategy.start(sites.grid(spoil), sites.initial, num_rounds=2)
    first, second = strategy.history
    name = sites.names[BAD - 100]
    assert "far_evaluations" not in first.report
    assert second.report["far_evaluations"] == {name: "1e+08 examples, far above the median of this round"}
    assert f"round 2: '{name}' evaluated on 1e+08 examples, far above the median" in caplog.text
    assert set(second.clients) == set(sites.names)  # it counts


def test_a_huge_running_mean_does_not_end_a_run_with_total_variance():
    """The law of total variance squares the means, and the sum would overflow float32."""
    method = "fedavg+total-variance"
    strategy, name = run_with_bad_replies(change_arrays(fill_array("body.1.running_mean", 1e30)), method)
    assert "'body.1.running_mean' holds 1e+30, beyond 1e+15" in strategy.history[1].report["skipped"][name]
    assert torch.equal(strategy.state.model.buffers, run_without_reply(method)[1])


def test_buffers_that_overflow_together_leave_the_model_as_it_was():
    """In float16 the variance of one client's running mean overflows, although the mean does not."""
    module = torch.nn.BatchNorm1d(4).half()
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = client.read_model(message)
        if context.node_config["name"] == "bad" and RoundInstructions.from_message(message).round == 2:
            model["running_mean"] += 3e4
        return client.reply(message, context, {name: value + 1 for name, value in model.items()}, 10)

    grid = LocalGrid(app, {i: {"name": name} for i, name in enumerate(("a", "b", "bad"), 1)})
    strategy = FairStrategy("fedheal+total-variance", model=module, fraction_evaluate=0.0)
    strategy.start(grid, ArrayRecord(module.state_dict()), num_rounds=3)
    first, second, third = strategy.history
    assert "overflow torch.float16" in second.report["unmoved"]
    assert "unmoved" not in first.report | third.report
    assert strategy.state.model.counters.item() == 2  # of the two rounds that count
    assert len(third.weights) == 3


def test_a_constant_buffer_of_the_model_may_be_large():
    """Attention masks hold the lowest number of their dtype."""
    module = torch.nn.Linear(2, 1)
    module.register_buffer("mask", torch.full((2,), torch.finfo(torch.float32).min))
    layout = Layout.of(module)
    model = layout.pack(module.state_dict())
    arrays = {name: tensor.numpy().copy() for name, tensor in layout.unpack(model).items()}
    reply = TrainReply("a", "home", arrays, 1.0, {})
    check_extras(reply, layout, model)
    arrays["mask"][1] = np.inf  # the aggregator names it
    check_extras(reply, layout, model)
    arrays["mask"][1] = 1e16
    check_extras(reply, layout, model)
    below = layout.pack({name: tensor / 1e30 for name, tensor in layout.unpack(model).items()})
    with pytest.raises(RejectedReply, match=r"'mask' holds 3.40282e.38, beyond 1e.15"):
        check_extras(reply, layout, below)


def test_a_counter_must_fit_its_dtype():
    module = torch.nn.Linear(1, 1)
    module.register_buffer("steps", torch.tensor(7, dtype=torch.int32))
    layout = Layout.of(module)
    model = layout.pack(module.state_dict())
    arrays = {name: tensor.numpy() for name, tensor in layout.unpack(model).items()}
    with pytest.raises(RejectedReply, match=r"'steps' holds 1099511627783, beyond torch\.int32"):
        check_extras(TrainReply("a", "home", {**arrays, "steps": np.array(2**40 + 7)}, 1.0, {}), layout, model)


def test_norms_need_others_to_be_far_from():
    assert find_far_norms({"a": 1.0, "b": 1e9}) == {}  # which of the two is wrong?
    assert find_far_norms({"a": 0.0, "b": 0.0, "c": 5.0}) == {}  # the others have converged
    assert list(find_far_norms({"a": 1.0, "b": 1.0, "c": 10.0, "d": 10.1})) == ["d"]


def test_names_at_the_limit_are_kept():
    sites = Sites(rounds=1)
    longest = "ä" * MAX_NAME
    strategy = sites.run(lambda node, reply: set_client_info(client=longest)(reply) if node == BAD else [reply])
    assert longest in strategy.history[0].weights
    assert json.loads(strategy.history[0].to_json())["weights"][longest] > 0
