"""A method's local terms in a federation: which clients trained with them, and what their messages hold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Array, Message

from fedheal import Method, methods
from fedheal.core.layout import Packed
from fedheal.federation.message_checks import UNLIKE_MOST
from fedheal.flower import reply_reader
from fedheal.flower.messages import describe_terms, record_to_tensors
from fedheal.flower.round_log import restore_federation
from fedheal.local.fedproto import FedProto
from fedheal.local.scaffold import Scaffold
from fedheal.local.term import Arrays, Context, Term
from flower.sites import Sites
from flower.test_bad_replies import (
    BAD,
    change_arrays,
    run_with_bad_replies,
    run_without_reply,
    set_array,
    set_client_info,
)


@pytest.mark.slow
def test_the_messages_of_local_terms_are_checked():
    def send_nan(reply: Message) -> list[Message]:
        record = reply.content["fedheal.messages"]
        record["0.change"] = Array(record["0.change"].numpy() * math.nan)
        return [reply]

    def send_short(reply: Message) -> list[Message]:
        reply.content["fedheal.messages"]["0.change"] = Array(np.zeros(2, np.float32))
        return [reply]

    def send_nothing(reply: Message) -> list[Message]:
        del reply.content["fedheal.messages"]
        return [reply]

    def send_values(values: np.ndarray) -> Callable[[Message], list[Message]]:
        return lambda reply: (reply.content["fedheal.messages"].update({"0.change": Array(values)}), [reply])[1]

    words, long = send_values(np.array(["a", "b"])), send_values(np.zeros(2, np.longdouble))
    for spoil in (send_nan, send_short, send_nothing, words, long):
        strategy, name = run_with_bad_replies(spoil, "scaffold")
        assert list(strategy.history[1].report["skipped"]) == [name]
        assert torch.equal(strategy.state.model.params, run_without_reply("scaffold")[0])


def test_messages_whose_mean_overflows_are_refused_and_clients_drop_that_round(monkeypatch):
    """Each message is finite, but their sum overflows."""
    monkeypatch.setattr(reply_reader, "MAX_MESSAGE", math.inf)

    def send_huge(reply: Message) -> list[Message]:
        record = reply.content["fedheal.messages"]
        record["0.change"] = Array(np.full_like(record["0.change"].numpy(), 3e38))
        return [reply]

    strategy, _ = run_with_bad_replies({BAD: send_huge, BAD + 1: send_huge}, "scaffold")
    assert ["unmoved" in record.report for record in strategy.history] == [False, True, False]
    assert "'c' of Scaffold" in strategy.history[1].report["unmoved"]
    assert torch.isfinite(strategy.state.terms[0].shared["c"]).all()
    # Everyone discards what it learnt in round 2, so that c stays the mean of the clients' controls.
    nodes = range(BAD - 2, BAD + 3)
    absent, _ = run_with_bad_replies(dict.fromkeys(nodes, lambda reply: []), "scaffold")
    assert torch.equal(strategy.state.terms[0].shared["c"], absent.state.terms[0].shared["c"])
    assert torch.equal(strategy.state.model.params, absent.state.model.params)


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_the_servers_control_stays_the_mean_of_the_clients_controls_as_they_join(method):
    sites = Sites(method=method, rounds=4)
    strategy, grid = sites.strategy(clients=None, fraction_evaluate=0.0), sites.grid()
    late = {node: grid.contexts.pop(node) for node in list(grid.contexts)[2:]}

    def join(node: int, reply: Message) -> list[Message]:
        if strategy.rounds.current.number == 2:
            grid.contexts.update(late)
        return [reply]

    grid.spoil = join
    strategy.start(grid, sites.initial, num_rounds=4)
    assert [record.cohort for record in strategy.history] == [2, 2, 5, 5]
    mean, own = {"scaffold": ("c", "c"), "feddyn": ("h", "g")}[method]
    saved = [context.state.array_records["fedheal.memory.4"] for context in grid.contexts.values()]
    expected = torch.stack([record_to_tensors(record)[f"slots.0.{own}"] for record in saved]).mean(dim=0)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(strategy.state.terms[0].shared[mean], expected, rtol=1e-4, atol=1e-7)


def drop_terms(reply: Message) -> list[Message]:
    """Reply like a client with its own training loop, without the method's local terms."""
    del reply.content["fedheal"]["terms"]
    reply.content.pop("fedheal.messages", None)
    return [reply]


LOCAL = ["scaffold", "feddyn", "fedproto", "fedproc", "fpl", "moon", "ditto", "fedprox", "fedbn", "fccl", "fcclplus"]


@pytest.mark.parametrize("method", ["scaffold", "fedproto", "moon", "fedprox"])
def test_local_terms_that_no_client_trains_with_are_an_error_of_the_app(method):
    with pytest.raises(
        ValueError, match=rf"'{method}' needs clients that train with .*: train with fedheal.flower.client"
    ):
        Sites(method=method).run(lambda node, reply: drop_terms(reply), fraction_evaluate=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (drop_terms, "without the method's local terms"),
        (
            set_client_info(terms=["FedProx(mu=9.0)"]),
            r"with \['FedProx\(mu=9.0\)'\]; .* trains with FedProx\(mu=0.01\)",
        ),
        (set_client_info(terms=7), "it trained with 7"),
    ],
)
def test_a_client_that_trains_with_other_terms_is_skipped(spoil, words):
    strategy, name = run_with_bad_replies(spoil, "fedprox")
    assert re.search(words, strategy.history[1].report["skipped"][name])
    assert torch.equal(strategy.state.model.params, run_without_reply("fedprox")[0])


def test_a_method_without_terms_accepts_any_local_training():
    sites, plain = Sites(method="fedprox", rounds=1), Sites(method="fedavg", rounds=1)
    strategy = plain.strategy(fraction_evaluate=0.0)
    strategy.start(sites.grid(), sites.initial, num_rounds=1)
    assert len(strategy.history[0].weights) == 5


def change_messages(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message], list[Message]]:
    def spoil(reply: Message) -> list[Message]:
        record = reply.content["fedheal.messages"]
        record.update({key: Array(change(record[key].numpy())) for key in list(record)})
        return [reply]

    return spoil


def drop_messages(reply: Message) -> list[Message]:
    del reply.content["fedheal.messages"]
    return [reply]


BAD_MESSAGES = {
    "none": drop_messages,
    "short": change_messages(lambda values: np.zeros(2, np.float32)),
    "integers": change_messages(lambda values: values.astype(np.int8)),
    "stacked": change_messages(lambda values: np.stack([values] * 3)),
    "halves": change_messages(lambda values: values.astype(np.float16)),
    "doubles": change_messages(lambda values: values.astype(np.float64)),
    "complex": change_messages(lambda values: values.astype(np.complex64)),
    "negative": change_messages(lambda values: -abs(values) - 1),
    "empty": change_messages(lambda values: values[:0]),
}


def send_prototypes(features: int, classes: int = 3) -> Callable[[Message], list[Message]]:
    """Send prototypes of another model, or of other classes."""

    def spoil(reply: Message) -> list[Message]:
        messages = {"0.prototypes": np.ones((classes, features)), "0.count": np.ones(classes)}
        arrays = {name: Array(values.astype(np.float32)) for name, values in messages.items()}
        reply.content["fedheal.messages"].update(arrays)
        return [reply]

    return spoil


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "spoil", "words"),
    [
        (
            "fedproto",
            send_prototypes(7),
            r"shape \(3, 7\), but the model's head has 36 features and 3 classes",
        ),
        ("fedproc", send_prototypes(36, 4), r"shape \(4, 36\), but the model's head"),
        (
            "fpl",
            BAD_MESSAGES["short"],
            r"got torch.float32 of shape \(2,\) with torch.float32 counts of shape \(2,\)",
        ),
        ("fedproto", BAD_MESSAGES["integers"], "prototypes must be float32 .*, got torch.int8"),
        ("fedproc", send_prototypes(36, 2), None),
    ],
    ids=["features", "classes", "short", "integers", "fewer"],
)
def test_the_first_prototypes_do_not_set_the_shape_for_all_clients(method, spoil, words):
    sites, first = Sites(method=method, rounds=6), []

    def spoil_first_node(node: int, reply: Message) -> list[Message]:
        first.append(node)
        return spoil(reply) if node == first[0] else [reply]

    strategy = sites.strategy(fraction_evaluate=0.0, fraction_train=0.2, min_train_nodes=1, seed=1)
    strategy.start(sites.grid(spoil_first_node), sites.initial, num_rounds=6)
    bad = sites.names[first[0] - 100]
    if words:
        assert re.search(words, strategy.history[0].report["skipped"][bad])
    # A model may tell more classes apart than there are: it takes two clients to say that two are too few.
    counted = [name for record in strategy.history[1 if words else 2 :] for name in record.weights]
    assert len(set(counted) - {bad}) >= 2
    assert tuple(strategy.state.terms[0].shared["prototypes"].shape) == (3, 36)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "case"),
    [
        ("scaffold", "none"),
        ("scaffold", "short"),
        ("scaffold", "integers"),
        ("fedproto", "none"),
        ("fedproc", "short"),
        ("fpl", "integers"),
        ("scaffold", "stacked"),
        ("fpl", "halves"),
        ("fedproc", "doubles"),
        ("fedproto:proto_weights=count", "negative"),
        ("ditto", "short"),
        ("ditto", "empty"),
        ("ditto:feedback=true", "complex"),
        ("ditto:feedback=true", "stacked"),
        ("ditto:feedback=true", "negative"),
        ("ditto", "negative"),
        ("feddg", "short"),
        ("feddg", "negative"),
    ],
)
def test_in_cohorts_of_one_a_bad_term_message_does_not_end_the_run(method, case):
    sites = Sites(method=method, rounds=8)
    strategy = sites.strategy(fraction_evaluate=0.0, fraction_train=0.2, min_train_nodes=1)

    def spoil(node: int, reply: Message) -> list[Message]:
        return BAD_MESSAGES[case](reply) if node == BAD else [reply]

    strategy.start(sites.grid(spoil), sites.initial, num_rounds=8)
    bad = sites.names[BAD - 100]
    counted = [[c for c, weight in record.weights.items() if weight] for record in strategy.history]
    skipped = [record.report["skipped"] for record in strategy.history]
    assert any(skipped)  # its turn came
    assert all(list(left_out) in ([], [bad]) for left_out in skipped)
    assert [len(names) for names in counted] == [int(not left_out) for left_out in skipped]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["feddg", "fedproto", "scaffold", "checking"])
@pytest.mark.parametrize("first", [0, 4])
def test_a_message_with_usual_shapes_and_unusable_values_costs_its_client_the_round(method, first):
    """A message is checked for itself, not by its shape, so the order of names does not matter."""
    case = "negative" if method != "scaffold" else "stacked"
    sites = Sites(method=Method(local=(Checking(),), name="checking") if method == "checking" else method, rounds=3)
    strategy = sites.strategy(fraction_evaluate=0.0)
    bad = sites.names.index(sorted(sites.names)[first])

    def spoil(node: int, reply: Message) -> list[Message]:
        return BAD_MESSAGES[case](reply) if node == 100 + bad else [reply]

    strategy.start(sites.grid(spoil), sites.initial, num_rounds=3)
    for record in strategy.history:
        assert list(record.report["skipped"]) == [sites.names[bad]]
        assert len(record.weights) == 4


class Checking(Term):
    """A user's term whose server part rejects negative values."""

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        return {}, {"size": local.params.abs().mean()[None]}

    def absorb(self, before, aggregated, messages, shared, ctx):
        if any((message["size"] < 0).any() for message in messages):
            raise ValueError("a size is negative")
        return aggregated, shared


def train_with(
    term: Term, spoil: Callable[[Message], list[Message]] | None = None, rounds: int = 3, **settings: Any
) -> Any:
    """Train five sites with this term, one of them with other messages, and return the strategy and that site."""
    sites = Sites(method=Method(local=(term,), name="mine"), rounds=rounds)
    strategy = sites.strategy(fraction_evaluate=0.0, **settings)

    def change(node: int, reply: Message) -> list[Message]:
        return spoil(reply) if spoil is not None and node == BAD else [reply]

    strategy.start(sites.grid(change), sites.initial, num_rounds=rounds)
    return strategy, sites.names[BAD - 100]


def set_message(name: str, values: Any) -> Callable[[Message], list[Message]]:
    def spoil(reply: Message) -> list[Message]:
        reply.content["fedheal.messages"][f"0.{name}"] = Array(np.asarray(values))
        return [reply]

    return spoil


class InPlace(Term):
    """A user's term that writes into what `absorb` gets."""

    def init(self, layout):
        return {"total": torch.zeros(1)}

    def finish(self, ctx, local):
        return {}, {"one": torch.ones(1)}

    def absorb(self, before, aggregated, messages, shared, ctx):
        aggregated.params.add_(0.5)
        for message in messages:
            shared["total"].add_(message["one"])
            message["one"].mul_(2)
        return aggregated, shared


def test_trying_a_message_changes_nothing():
    strategy, _ = train_with(InPlace(), rounds=2, min_replies=6, max_empty_rounds=None)
    initial = {name: torch.from_numpy(array.numpy().copy()) for name, array in Sites(rounds=2).initial.items()}
    assert torch.equal(strategy.state.model.params, strategy.rounds.layout.pack(initial).params)
    assert strategy.state.terms[0].shared["total"].item() == 0
    strategy, _ = train_with(InPlace(), rounds=2)
    assert strategy.state.terms[0].shared["total"].item() == 10


class Best(FedProto):
    """A user's term that inherits a check of messages, and sends more than that knows."""

    def finish(self, ctx, local):
        slot, message = super().finish(ctx, local)
        return slot, {**message, "best": torch.zeros(1)}

    def absorb(self, before, aggregated, messages, shared, ctx):
        counts = [["a", "b"][int(message["best"])] for message in messages]
        assert counts
        return super().absorb(before, aggregated, messages, shared, ctx)


def test_a_term_that_inherits_a_check_is_tried_too():
    strategy, bad = train_with(Best(), set_message("best", np.array([7.0], np.float32)))
    assert [list(record.report["skipped"]) for record in strategy.history] == [[bad]] * 3
    strategy, bad = train_with(Best(), set_message("count", np.array([-1.0] * 3, np.float32)))
    assert "count from 0 for each class" in strategy.history[0].report["skipped"][bad]


class ReadsContext(Term):
    """A user's term that reads what a simulation offers."""

    def finish(self, ctx, local):
        return {}, {"one": torch.ones(1)}

    def absorb(self, before, aggregated, messages, shared, ctx):
        updates = ctx.updates
        if len(messages):
            assert updates.domains is not None
            read = [1 / ctx.rounds, updates.metrics["train_loss"].sum(), updates.deltas.sum(), updates.buffers.sum()]
            assert all(math.isfinite(value) for value in read)
            assert len(updates.domains) == len(messages) == len(updates.deltas)
        return aggregated, shared


@pytest.mark.parametrize(("value", "reason"), [(math.nan, "AssertionError"), (1e15, "its training has diverged")])
def test_a_term_reads_in_a_federation_what_it_reads_in_a_simulation(value, reason):
    strategy, _ = train_with(ReadsContext())
    assert [record.report["skipped"] for record in strategy.history] == [{}] * 3
    spoil = change_arrays(set_array("head.bias", Array(np.full(3, value, np.float32))))
    strategy, bad = train_with(ReadsContext(), spoil)
    assert [list(record.report["skipped"]) for record in strategy.history] == [[bad]] * 3
    assert reason in strategy.history[0].report["skipped"][bad]


class NamesUnknown(Term):
    def finish(self, ctx, local):
        return {}, {"one": torch.ones(1)}

    def absorb(self, before, aggregated, messages, shared, ctx):
        for message in messages:
            for name in message.keys() - {"one"}:
                raise ValueError(f"unknown value {name}")
        return aggregated, shared


def test_structure_is_checked_before_a_trial():
    strategy, bad = train_with(NamesUnknown(), set_message("junk", np.ones(1, np.float32)), rounds=1)
    assert strategy.history[0].report["skipped"] == {bad: UNLIKE_MOST}


def test_a_name_in_the_error_of_a_term_is_escaped():
    """Of two clients neither is the majority, so `absorb` decides."""
    spoil, sites = (
        set_message("\x1b[2J\n", np.ones(1, np.float32)),
        Sites(method=Method((NamesUnknown(),), name="mine")),
    )
    present = {100: lambda reply: [reply], BAD: spoil}
    strategy = sites.strategy(fraction_evaluate=0.0)
    strategy.start(sites.grid(lambda node, reply: present[node](reply) if node in present else []), sites.initial, 1)
    reason = strategy.history[0].report["skipped"][sites.names[BAD - 100]]
    assert "unknown value \\x1b[2J" in reason
    assert reason.isprintable()


class MeanOfSome(Term):
    """A user's term that divides by a sum, to which a client may add nothing, and counts the clients."""

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        count = 0.0 if ctx.client.startswith("dark") else 5.0
        return {}, {"total": torch.tensor([2 * count]), "count": torch.tensor([count]), "version": torch.ones(1)}

    def absorb(self, before, aggregated, messages, shared, ctx):
        if len({float(message["version"]) for message in messages}) > 1:
            raise ValueError("clients have different versions")
        if int(shared.get("clients", torch.zeros(1))) > ctx.clients:
            raise ValueError("a client is gone")
        total, count = (sum(float(message[name]) for message in messages) for name in ("total", "count"))
        return aggregated, {"mean": torch.tensor([total / count]), "clients": torch.tensor([ctx.clients])}


def test_messages_are_tried_together_and_one_by_one_only_if_that_fails():
    strategy, bad = train_with(MeanOfSome())
    assert [record.report["skipped"] for record in strategy.history] == [{}] * 3
    assert any(name.startswith("dark") for name in strategy.history[0].weights)
    assert strategy.state.terms[0].shared["mean"].item() == 2
    for spoil in (set_message("version", np.array([7.0], np.float32)), set_message("count", np.zeros(2, np.float32))):
        strategy, bad = train_with(MeanOfSome(), spoil)  # at odds with the others; unusable for itself
        assert [list(record.report["skipped"]) for record in strategy.history] == [[bad]] * 3


class Together(Term):
    """A user's term that needs several messages, and messages that agree."""

    least: int = 2

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        return {}, {"version": torch.ones(1)}

    def absorb(self, before, aggregated, messages, shared, ctx):
        shared["rounds"] = shared.get("rounds", torch.zeros(1)).add_(1)  # lost if the round is refused
        before.params.zero_()
        versions = {float(message["version"]) for message in messages}
        if len(messages) < self.least:
            raise ValueError("too few messages")
        if len(versions) > 1:
            raise ValueError("versions differ")
        return aggregated, shared


OTHER_VERSION = set_message("version", np.array([7.0], np.float32))


class Counted(Term):
    """A user's term that needs eight examples in all, of which a client has five, and versions that agree."""

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        return {}, {"sent": torch.tensor([5.0, 1.0])}  # the examples and the version

    def absorb(self, before, aggregated, messages, shared, ctx):
        counts, versions = torch.stack([message["sent"] for message in messages]).T
        if counts.sum() < 8 or len(versions.unique()) > 1:
            raise ValueError("too few examples, or versions differ")
        return aggregated, shared


def test_a_message_that_suffices_alone_does_not_leave_out_most_clients():
    strategy, bad = train_with(Counted(), set_message("sent", np.array([100.0, 7.0], np.float32)))
    assert [record.report["skipped"].keys() for record in strategy.history] == [{bad}] * 3


def test_one_bad_message_is_found_if_no_message_suffices_alone():
    strategy, bad = train_with(Together(), OTHER_VERSION)
    assert [record.report["skipped"].keys() for record in strategy.history] == [{bad}] * 3
    assert "versions differ" in strategy.history[0].report["skipped"][bad]
    assert strategy.state.terms[0].shared["rounds"].item() == 3


class Versions:
    """A part of a term that is no term itself."""

    def absorb(self, before, aggregated, messages, shared, ctx):
        if len({float(message["version"]) for message in messages}) > 1:
            raise ValueError("versions differ")
        return aggregated, shared


class Mixed(Versions, Term):
    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        return {}, {"version": torch.ones(1)}


def test_a_hook_that_a_term_inherits_from_another_class_costs_the_round_only():
    sites = Sites(method=Method((Mixed(),), name="mine"), rounds=3)
    strategy = sites.strategy(fraction_evaluate=0.0)

    def spoil(node: int, reply: Message) -> list[Message]:
        is_bad = node == BAD and strategy.rounds.current.number == 2
        return [] if node not in (100, BAD) else OTHER_VERSION(reply) if is_bad else [reply]

    strategy.start(sites.grid(spoil), sites.initial, num_rounds=3)
    assert ["unmoved" in record.report for record in strategy.history] == [False, True, False]


@pytest.mark.parametrize("bad", [{102}, {101, 102}])
def test_a_round_whose_messages_are_at_odds_leaves_all_as_it_was(bad):
    """Of two clients, or of two pairs, nobody can say who is wrong. The round is lost, not the run."""
    present = {100, 102} if len(bad) == 1 else {100, 101, 102, 103}
    sites = Sites(method=Method((Together(),), name="mine"), rounds=3)
    strategy = sites.strategy(fraction_evaluate=0.0)

    def spoil(node: int, reply: Message) -> list[Message]:
        is_bad = node in bad and strategy.rounds.current.number == 2
        return [] if node not in present else OTHER_VERSION(reply) if is_bad else [reply]

    strategy.start(sites.grid(spoil), sites.initial, num_rounds=3)
    assert ["unmoved" in record.report for record in strategy.history] == [False, True, False]
    assert "Together` raised ValueError: versions differ" in strategy.history[1].report["unmoved"]
    assert strategy.state.terms[0].shared["rounds"].item() == 2
    absent = sites.strategy(fraction_evaluate=0.0)
    only_two = lambda node, reply: [reply] if absent.rounds.current.number != 2 and node in present else []  # noqa: E731
    absent.start(Sites(method=Method((Together(),), name="mine"), rounds=3).grid(only_two), sites.initial, 3)
    assert torch.equal(strategy.state.model.params, absent.state.model.params)


class Recorded(Term):
    """A user's term that records what its `absorb` gets."""

    seen: ClassVar[list[torch.Tensor]] = []

    def finish(self, ctx, local):
        return {}, {"one": torch.ones(1)}

    def absorb(self, before, aggregated, messages, shared, ctx):
        self.seen.append(before.params.clone())
        return aggregated, shared


def test_a_trial_gets_the_model_of_the_round():
    Recorded.seen.clear()
    train_with(Recorded(), rounds=2)
    tried, real = Recorded.seen[::2], Recorded.seen[1::2]
    assert len(tried) == len(real) == 2
    assert all(torch.equal(a, b) for a, b in zip(tried, real, strict=True))


class Quantised(Scaffold):
    """A user's term that sends something else than the built-in term it inherits from."""

    def finish(self, ctx, local):
        slot, message = super().finish(ctx, local)
        return slot, {"change": (message["change"] * 1000).round().to(torch.int8)}

    def absorb(self, before, aggregated, messages, shared, ctx):
        messages = [{"change": message["change"].float() / 1000} for message in messages]
        return super().absorb(before, aggregated, messages, shared, ctx)


class Checked(Quantised):
    def check_message(self, message, shared, layout):
        assert message["change"].dtype == torch.int8


def test_an_inherited_check_that_does_not_fit_is_named():
    why = r"'mine' needs messages .*torch.int8.*; `.*:Quantised` inherits check_message from Scaffold: override it"
    with pytest.raises(ValueError, match=why):
        train_with(Quantised())
    strategy, bad = train_with(Checked(), set_message("change", np.zeros(231, np.float32)), rounds=2)
    assert [list(record.report["skipped"]) for record in strategy.history] == [[bad]] * 2


@pytest.mark.parametrize("method", ["scaffold", "fedproto"])
def test_one_of_two_clients_that_changes_its_messages_is_left_out_alone(method):
    """Earlier rounds decide between the two, and what was left out counts as no earlier round."""
    sites = Sites(method=method, rounds=6)
    strategy = sites.strategy(fraction_evaluate=0.0)
    junk = set_message("junk", np.ones(1, np.float32))

    def spoil(node: int, reply: Message) -> list[Message]:
        if node not in (100, BAD):
            return []
        return junk(reply) if node == BAD and strategy.rounds.current.number > 2 else [reply]

    strategy.start(sites.grid(spoil), sites.initial, num_rounds=6)
    assert [len(record.weights) for record in strategy.history] == [2, 2, 1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("present", "bad", "expected"),
    [
        ([{100}, {100}, {100, 101}, {100, 101}, {100, 101}], {101}, [1, 1, 1, 1, 1]),
        ([{100}, {100}, {100, 101}, {100, 101}, {100, 101}], {100}, [1, 1, 1, 1, 1]),  # they cannot be told apart
        ([{100, 101}, {100, 101, 102, 103}, {100, 101, 102, 103}, {100, 101}], {102, 103}, [2, 2, 2, 2]),
        ([{100}, {101}, {100}, {100}], {101}, [1, 0, 1, 1]),
        ([{101}, {100}, {102}, {100}, {101}], {101}, [1, 0, 1, 1, 0]),  # the bad one came first
        ([{101}, {100}, {102}, {100, 101, 102, 103}], {101, 103}, [1, 0, 1, 2]),
    ],
)
def test_newcomers_with_other_messages_cannot_stop_those_that_counted(present, bad, expected):
    """As many newcomers as others leave the structure as it is that was used last."""
    sites, junk = Sites(method="scaffold", rounds=len(present)), set_message("junk", np.ones(1, np.float32))
    strategy = sites.strategy(fraction_evaluate=0.0, max_empty_rounds=None, min_available_nodes=1)

    def spoil(node: int, reply: Message) -> list[Message]:
        if node not in present[strategy.rounds.current.number - 1]:
            return []
        return junk(reply) if node in bad else [reply]

    strategy.start(sites.grid(spoil), sites.initial, num_rounds=len(present))
    assert [len(record.weights) for record in strategy.history] == expected


@pytest.mark.slow
def test_nodes_under_ever_new_names_are_no_majority():
    sites, junk = Sites(method="scaffold", rounds=6), set_message("junk", np.ones(1, np.float32))
    strategy = sites.strategy(fraction_evaluate=0.0, min_available_nodes=1)
    grid = sites.grid()
    grid.contexts |= {200 + i: grid.contexts.pop(104 - i) for i in range(2)}

    def spoil(node: int, reply: Message) -> list[Message]:
        if node < 200:
            return [reply]
        grid.contexts[node + 2] = grid.contexts.pop(node)  # it comes back under another id
        reply.content["fedheal"]["client"] = f"evil-{node}"
        return junk(reply)

    grid.spoil = spoil
    strategy.start(grid, sites.initial, num_rounds=6)
    assert [len(record.weights) for record in strategy.history] == [3] * 6
    assert [record.cohort for record in strategy.history] == [5] * 6


@pytest.mark.slow
def test_clients_that_counted_count_when_they_are_away():
    sites, junk = Sites(method="scaffold", rounds=4), set_message("junk", np.ones(1, np.float32))
    strategy = sites.strategy(fraction_evaluate=0.0, min_available_nodes=1, max_empty_rounds=None)
    grid = sites.grid()
    newcomers = {node: grid.contexts.pop(node) for node in (103, 104)}

    def spoil(node: int, reply: Message) -> list[Message]:
        if strategy.rounds.current.number == 2 and node == 102:  # two of three leave, and two others come
            for gone in (101, 102):
                grid.contexts.pop(gone)
            grid.contexts.update(newcomers)
        return junk(reply) if node in newcomers else [reply]

    grid.spoil = spoil
    strategy.start(grid, sites.initial, num_rounds=4)
    assert [sorted(record.weights) == [sites.names[0]] for record in strategy.history] == [False, False, True, True]


def test_a_run_of_an_earlier_version_knows_what_was_used():
    digests = {"a": "x", "b": "x"} | dict.fromkeys(["stranger", "other", "third"], "y")
    state = restore_federation(accepted={"a": 2, "b": 2}, message_digests=digests)
    assert state.used_digest == "x"
    assert restore_federation(accepted={}).used_digest == ""


@pytest.mark.slow
def test_an_update_of_all_apps_may_change_the_messages():
    """Each round asks two of five clients: until most have sent the new structure, it does not count."""
    sites, more = Sites(method="scaffold", rounds=12), set_message("version", np.ones(1, np.float32))
    strategy = sites.strategy(fraction_evaluate=0.0, fraction_train=0.4, max_empty_rounds=None)

    def spoil(node: int, reply: Message) -> list[Message]:
        return more(reply) if strategy.rounds.current.number > 5 else [reply]

    strategy.start(sites.grid(spoil), sites.initial, num_rounds=12)
    counted = [len(record.weights) for record in strategy.history]
    assert counted[:6] == [2, 2, 2, 2, 2, 0]
    assert counted[-5:] == [2, 2, 2, 2, 2]


def test_a_bank_of_another_size_is_left_alone():
    """One site alone in the first round may have filled it, and then be gone."""
    sites = Sites(method="feddg:window=0.2", rounds=4)
    strategy = sites.strategy(fraction_evaluate=0.0, min_available_nodes=1)

    def spoil(node: int, reply: Message) -> list[Message]:
        if strategy.rounds.current.number == 1:
            large = Array(np.full((8, 3, 9, 9), 0.5, np.float32))
            reply.content["fedheal.messages"]["0.amplitudes"] = large
            return [reply] if node == 100 else []
        return [reply] if node != 100 else []

    strategy.start(sites.grid(spoil), sites.initial, num_rounds=4)
    assert [len(record.weights) for record in strategy.history] == [1, 4, 4, 4]
    assert strategy.state.terms[0].shared["bank"].shape[2:] == (3, 3)


@dataclass(frozen=True)
class Shrinking(Term):
    """A user's term that has a function among its fields."""

    mu: float
    by: Callable[[float], float]


def test_descriptions_of_terms_are_the_same_in_every_process():
    for name in LOCAL:
        terms = methods.get(name).local
        assert describe_terms(terms) == [repr(term) for term in terms]
    assert describe_terms(methods.get("fedbn").local) == ["FedBN()"]
    (word,) = describe_terms([Shrinking(0.5, math.sqrt)])
    assert word == "Shrinking(mu=0.5, by=sqrt)"
    first, second = (describe_terms([Shrinking(0.5, lambda x: x)]) for _ in range(2))
    assert first == second
    assert " at 0x" not in first[0]
