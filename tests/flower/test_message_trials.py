"""The messages of a user's term: `absorb` is tried on copies, and what fails costs a client, or else the round."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Array, Message

from fedheal import Method
from fedheal.core.layout import Packed
from fedheal.federation.message_checks import UNLIKE_MOST
from fedheal.local.fedproto import FedProto
from fedheal.local.scaffold import Scaffold
from fedheal.local.term import Arrays, Context, Term
from flower.sites import Sites
from flower.test_bad_replies import BAD, change_arrays, set_array, set_message
from flower.test_cohort import BAD_MESSAGES


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
