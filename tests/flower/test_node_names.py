"""Whose a name is, if several nodes use it over a run."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedheal.flower import FairStrategy, FedHEAL, client
from fedheal.flower.node_registry import MAX_NODES, NodeRegistry, ReceivedReply
from flower.local_grid import LocalGrid

START = ArrayRecord({"w": torch.zeros(3)})
OWNED = "it calls itself 'c3', but node {} uses this name: give each site its own name"


def make_app() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = {"w": client.read_model(message)["w"] + 1.0}
        if not context.node_config:  # a stock client
            content = {"arrays": ArrayRecord(model), "metrics": MetricRecord({"num-examples": 10})}
            return Message(RecordDict(content), reply_to=message)
        return client.reply(message, context, model, 10)

    return app


class ChangingGrid(LocalGrid):
    """Sites whose connected nodes change: `plan` has, by round, those that leave and those that join under a name."""

    def __init__(self, nodes: dict[int, str], plan: dict[int, tuple[list[int], dict[int, str]]]) -> None:
        super().__init__(make_app(), {node: {"name": name} for node, name in nodes.items()})
        self.plan, self.number = plan, 0

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        replies = super().send_and_receive(messages, timeout=timeout)
        self.number += 1
        leaving, joining = self.plan.get(self.number, ([], {}))
        for node in leaving:
            del self.contexts[node]
        for node, name in joining.items():
            self.contexts[node] = Context(1, node, {"name": name}, RecordDict(), {})
        return replies


def run(grid: LocalGrid, rounds: int, **settings: Any) -> FairStrategy:
    strategy = FedHEAL(fraction_evaluate=0.0, **settings)
    strategy.start(grid, START, num_rounds=rounds)
    return strategy


SITES = {1: "c1", 2: "c2", 3: "c3"}


def test_a_node_cannot_take_the_default_name_of_another():
    """Node 2 gives no name, so it is called after its id. A site may have such a name if no other node has that id."""
    grid = LocalGrid(make_app(), {1: {"name": "node-2"}, 2: {}, 3: {"name": "node-7"}})
    strategy = run(grid, rounds=2)
    for record in strategy.history:
        assert record.weights.keys() == {"node-2", "node-7"}
        assert "as another node is called" in record.report["skipped"]["node-1"]


def test_a_node_that_returns_gets_its_name_back():
    strategy = run(ChangingGrid(SITES, {1: ([3], {9: "c3"}), 2: ([], {3: "c3"})}), rounds=5)
    assert strategy.history[1].report["skipped"] == {}  # its owner is gone: it may be the same site with a new id
    for record in strategy.history[2:]:
        assert set(record.weights) == {"c1", "c2", "c3"}
        assert record.report["skipped"] == {"node-9": OWNED.format(3)}


def test_also_in_a_resumed_run(tmp_path):
    folder = tmp_path / "run"
    run(ChangingGrid(SITES, {1: ([3], {9: "c3"})}), rounds=2, folder=folder)
    everyone = ChangingGrid({9: "c3", **SITES}, {})
    strategy = run(everyone, rounds=4, folder=folder, resume=True)
    for record in strategy.history[2:]:
        assert record.report["skipped"] == {"node-9": OWNED.format(3)}


def test_also_if_it_is_not_the_names_first_node():
    """A site with a new key has as much right to its name as with its first one."""
    plan = {1: ([3], {5: "c3"}), 2: ([5], {9: "c3"}), 3: ([], {5: "c3"})}
    strategy = run(ChangingGrid(SITES, plan), rounds=5)
    for record in strategy.history[3:]:
        assert set(record.weights) == {"c1", "c2", "c3"}
        assert record.report["skipped"] == {"node-9": OWNED.format(5)}


def test_a_site_that_restarts_under_new_ids_keeps_its_name():
    plan = {number: ([2 + number], {3 + number: "c3"}) for number in range(1, 13)}
    strategy = run(ChangingGrid(SITES, plan), rounds=13)
    for record in strategy.history:
        assert set(record.weights) == {"c1", "c2", "c3"}
        assert record.report["skipped"] == {}
    of_c3 = [node for node, name in strategy.registry.names.items() if name == "c3"]
    assert of_c3 == [3, *range(17 - MAX_NODES, 16)]


def test_both_nodes_that_use_a_new_name_are_recorded_until_one_is_gone():
    strategy = run(ChangingGrid({1: "c1", 2: "c2", 7: "c2", 8: "c8"}, {2: ([7], {})}), rounds=3)
    same = "it calls itself 'c2', as does node {}: give each site its own name"
    for record in strategy.history[:2]:
        assert record.report["skipped"] == {"node-2": same.format(7), "node-7": same.format(2)}
        assert (record.cohort, record.replied, set(record.weights)) == (4, 4, {"c1", "c8"})
    assert strategy.history[2].report["skipped"] == {}
    assert set(strategy.history[2].weights) == {"c1", "c2", "c8"}


def test_the_reason_stays_short_however_many_nodes_use_a_name():
    strategy = run(ChangingGrid({1: "c1", 2: "c2"} | dict.fromkeys(range(10, 40), "c3"), {}), rounds=1)
    skipped = strategy.history[0].report["skipped"]
    assert set(skipped) == {f"node-{node}" for node in range(10, 40)}
    assert skipped["node-10"] == "it calls itself 'c3', as do nodes 11, 12, 13 and 26 more: give each site its own name"


def make_reply(node: int, name: str) -> ReceivedReply:
    return ReceivedReply(None, node, name, "here", is_named=True)


def test_a_corrected_name_gives_no_right_over_its_earlier_nodes():
    registry = NodeRegistry({1: "c1", 2: "c2"})  # of a checkpoint
    registry.remember([make_reply(1, "c2")], connected={1})  # a resumed run accepts a new name, and node 2 is away
    assert registry._find_owners({1, 2})["c2"] == 2


def test_a_name_keeps_its_first_node_and_the_latest():
    registry = NodeRegistry()
    for node in range(100):
        registry.remember([make_reply(node, "clinic")], connected={node})
        assert len(registry.names) <= MAX_NODES
    assert list(registry.names) == [0, *range(101 - MAX_NODES, 100)]
    assert registry._named_in_this_run == set(registry.names)
