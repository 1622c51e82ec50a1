"""A method's local terms in a federation: which clients trained with them, and what their messages hold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from flwr.app import Array, Message

from fedheal import methods
from fedheal.flower import reply_reader
from fedheal.flower.messages import describe_terms, record_to_tensors
from fedheal.local.term import Term
from flower.sites import Sites
from flower.test_bad_replies import (
    BAD,
    run_with_bad_replies,
    run_without_reply,
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
