"""Who a reply comes from."""

from __future__ import annotations

import logging

import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord

from flower.sites import Sites


def renamed(reply: Message, name: str | None) -> list[Message]:
    about = {k: v for k, v in reply.content["fedheal"].items() if k != "client"}
    reply.content["fedheal"] = ConfigRecord(about | ({} if name is None else {"client": name}))
    return [reply]


def test_the_name_in_the_reply_is_the_clients_name():
    strategy = Sites(rounds=1).run(lambda node, reply: renamed(reply, f"hospital {node}"))
    assert sorted(strategy.history[0].weights) == [f"hospital {node}" for node in range(100, 105)]


@pytest.mark.parametrize("where", ["config", "metrics"])
def test_else_the_partition_id_that_a_reply_holds(where):
    def spoil(node: int, reply: Message) -> list[Message]:
        if where == "config":
            reply.content["mine"] = ConfigRecord({"partition-id": node - 100})
        else:
            reply.content["metrics"] = MetricRecord({**reply.content["metrics"], "partition-id": node - 100})
        return renamed(reply, None)

    strategy = Sites(rounds=1).run(spoil)
    assert sorted(strategy.history[0].weights) == [f"partition-{i}" for i in range(5)]


def test_else_the_node_id_with_one_warning_a_node(caplog):
    with caplog.at_level(logging.WARNING, "flwr.fedheal"):
        strategy = Sites(rounds=2).run(lambda node, reply: renamed(reply, None))
    assert sorted(strategy.history[0].weights) == [f"node-{i}" for i in range(100, 105)]
    assert caplog.text.count("gives no name") == 5


def test_two_nodes_with_one_name_are_refused_with_both_ids():
    sites = Sites(rounds=2)
    same = lambda node, reply: renamed(reply, "clinic") if node in (101, 103) else [reply]  # noqa: E731
    strategy = sites.run(same)
    for record in strategy.history:
        assert "nodes 101 and 103 both use this name" in record.report["skipped"]["clinic"]
        assert sorted(record.weights) == sorted(sites.names[i] for i in (0, 2, 4))


def test_a_name_moves_when_its_node_is_gone_or_silent():
    sites = Sites(rounds=4)
    strategy = sites.strategy(fraction_evaluate=0.0)
    grid = sites.grid()
    own, moved = sites.names[4], 104

    def spoil(node: int, reply: Message) -> list[Message]:
        number = strategy._round.number
        if number == 2 and node == 104:
            grid.contexts[204] = grid.contexts[104]  # restarted under a new id; the old one is still listed
        return [] if number == 3 and node == 104 else [reply]  # asked, and silent

    grid.spoil = spoil
    strategy.start(grid, sites.initial, num_rounds=4)
    third, fourth = strategy.history[2], strategy.history[3]
    assert third.weights[own] > 0  # node 204 speaks for it now
    assert third.report["missing"] == [own]
    assert "nodes 104 and 204 both use this name" in fourth.report["skipped"][own]  # both answer: nobody can tell
    assert moved in grid.contexts


def test_history_belongs_to_the_name_whatever_the_node():
    """A restart under new node ids changes nothing."""
    sites = Sites(rounds=4)
    whole = sites.run(fraction_evaluate=0.0)
    strategy = sites.strategy(fraction_evaluate=0.0)
    strategy._rounds = 4
    arrays = strategy.begin(sites.initial)
    old, new = sites.grid(), sites.grid(first=900)
    for number in (1, 2, 3, 4):
        grid = old if number < 3 else new
        asked = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        arrays, _ = strategy.aggregate_train(number, grid.send_and_receive(asked))
        strategy.aggregate_evaluate(number, ())
    assert torch.equal(strategy.state.model.params, whole.state.model.params)
