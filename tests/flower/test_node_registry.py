"""Who a reply comes from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedheal.flower import FairStrategy, FedHEAL, client
from fedheal.runs import folder as records
from flower.local_grid import LocalGrid
from flower.sites import Sites
from flower.test_bad_replies import reply_with_superlink_error


def rename_client(reply: Message, name: str | None) -> list[Message]:
    about = {k: v for k, v in reply.content["fedheal"].items() if k != "client"}
    reply.content["fedheal"] = ConfigRecord(about | ({} if name is None else {"client": name}))
    return [reply]


def test_the_name_in_the_reply_is_the_clients_name():
    strategy = Sites(rounds=1).run(lambda node, reply: rename_client(reply, f"hospital {node}"))
    assert sorted(strategy.history[0].weights) == [f"hospital {node}" for node in range(100, 105)]


@pytest.mark.parametrize("where", ["config", "metrics"])
def test_otherwise_the_partition_id_is_the_name(where):
    def spoil(node: int, reply: Message) -> list[Message]:
        if where == "config":
            reply.content["mine"] = ConfigRecord({"partition-id": node - 100})
        else:
            reply.content["metrics"] = MetricRecord({**reply.content["metrics"], "partition-id": node - 100})
        return rename_client(reply, None)

    strategy = Sites(rounds=1).run(spoil)
    assert sorted(strategy.history[0].weights) == [f"partition-{i}" for i in range(5)]


def test_otherwise_the_node_id_is_the_name_with_one_warning_a_node(caplog):
    with caplog.at_level(logging.WARNING, "flwr.fedheal"):
        strategy = Sites(rounds=2).run(lambda node, reply: rename_client(reply, None))
    assert sorted(strategy.history[0].weights) == [f"node-{i}" for i in range(100, 105)]
    assert caplog.text.count("sends no client name") == 5


def test_two_nodes_with_one_name_are_refused_with_both_ids():
    sites = Sites(rounds=2)
    same = lambda node, reply: rename_client(reply, "clinic") if node in (101, 103) else [reply]  # noqa: E731
    strategy = sites.run(same)
    for record in strategy.history:
        assert "it calls itself 'clinic', as does node 103" in record.report["skipped"]["node-101"]
        assert "it calls itself 'clinic', as does node 101" in record.report["skipped"]["node-103"]
        assert sorted(record.weights) == sorted(sites.names[i] for i in (0, 2, 4))


@pytest.mark.slow
def test_a_name_moves_when_its_node_is_gone_or_silent():
    sites = Sites(rounds=4)
    strategy = sites.strategy(fraction_evaluate=0.0)
    grid = sites.grid()
    own = sites.names[4]

    def spoil(node: int, reply: Message) -> list[Message]:
        number = strategy.rounds.current.number
        if number == 2 and node == 104:
            grid.contexts[204] = grid.contexts[104]  # restarted under a new id; the old one is still listed
        return [] if number == 3 and node == 104 else [reply]  # asked, and silent

    grid.spoil = spoil
    strategy.start(grid, sites.initial, num_rounds=4)
    third, fourth = strategy.history[2], strategy.history[3]
    assert third.weights[own] > 0  # node 204 speaks for it now
    assert (third.report["missing"], third.cohort, third.replied) == ([], 5, 5)  # the name counts once
    assert fourth.weights[own] > 0  # both answer: the first one wins
    assert "'" + own + "', but node 104 uses this name" in fourth.report["skipped"]["node-204"]
    assert (fourth.cohort, fourth.replied) == (6, 6)
    assert list(strategy.registry.names.items())[-2:] == [(104, own), (204, own)]


def test_a_registered_site_cannot_silence_another_by_its_name():
    """Neither a new node nor a site with another name can take a name that is in use."""
    sites = Sites(rounds=3)
    strategy, grid, victim = sites.strategy(fraction_evaluate=0.0), sites.grid(), sites.names[4]

    def spoil(node: int, reply: Message) -> list[Message]:
        if strategy.rounds.current.number == 1:
            grid.contexts[205] = grid.contexts[100]
            return [reply]
        return rename_client(reply, victim) if node in (101, 205) else [reply]

    grid.spoil = spoil
    strategy.start(grid, sites.initial, num_rounds=3)
    absent = sites.strategy(fraction_evaluate=0.0)
    silent = sites.grid(lambda node, reply: [] if node == 101 and absent.rounds.current.number > 1 else [reply])
    absent.start(silent, sites.initial, num_rounds=3)
    assert torch.equal(strategy.state.model.params, absent.state.model.params)
    for record in strategy.history[1:]:
        assert set(record.report["skipped"]) == {sites.names[1], "node-205"}
        assert record.weights[victim] > 0
        assert (record.cohort, record.replied) == (6, 6)


@pytest.mark.slow
def test_every_node_of_a_name_is_saved_in_the_order_of_their_use(tmp_path):
    sites, nodes = Sites(rounds=3), {}
    for number, first in enumerate((500, 100, 900), 1):
        strategy = sites.strategy(fraction_evaluate=0.0, roll_call=True, folder=tmp_path / "run", resume=number > 1)
        strategy.start(sites.grid(first=first), sites.initial, num_rounds=number)
        nodes |= {str(first + i): name for i, name in enumerate(sites.names)}
        assert list(strategy.federation.nodes.items()) == list(nodes.items())


@pytest.mark.slow
def test_an_error_of_the_old_node_does_not_skip_a_client_that_replies_from_a_new_one():
    sites = Sites(method="scaffold", rounds=3)
    strategy, grid, own = sites.strategy(fraction_evaluate=0.0), sites.grid(), sites.names[4]

    def spoil(node: int, reply: Message) -> list[Message]:
        number = strategy.rounds.current.number
        if number == 2 and node == 104:
            grid.contexts[204] = grid.contexts[104]
        return reply_with_superlink_error(reply) if number == 3 and node == 104 else [reply]

    grid.spoil = spoil
    strategy.start(grid, sites.initial, num_rounds=3)
    third = strategy.history[2]
    assert third.weights[own] > 0
    assert third.report["skipped"] == {}
    assert (third.report["missing"], third.cohort, third.replied) == ([], 5, 5)
    assert strategy.federation.accepted[own] == 3


def make_half_named_app(evaluate: Callable[[Message, Context], Message]) -> ClientApp:
    """Return an app whose training replies have a name and a domain, with this evaluation."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        i, number = context.node_config["partition-id"], message.content["config"]["server-round"]
        step = torch.tensor([1.0, (-1.0) ** (number + i), 1.0 if number % (i + 2) else -1.0])
        model = {"w": client.read_model(message)["w"] + step}
        return client.reply(message, context, model, 10, name=f"site{i}", domain="rural" if i else "city")

    app.evaluate()(evaluate)
    return app


def make_accuracy(context: Context) -> dict[str, float]:
    return {"accuracy": 0.5 + 0.1 * context.node_config["partition-id"]}


def evaluate_unnamed(message: Message, context: Context) -> Message:
    return Message(
        RecordDict({"metrics": MetricRecord({**make_accuracy(context), "num-examples": 10})}), reply_to=message
    )


def evaluate_with_partition(message: Message, context: Context) -> Message:
    reply = evaluate_unnamed(message, context)
    reply.content["who"] = ConfigRecord({"partition-id": context.node_config["partition-id"]})
    return reply


def evaluate_with_helper(message: Message, context: Context) -> Message:
    i = context.node_config["partition-id"]
    return client.reply_evaluation(
        message, context, 10, make_accuracy(context), name=f"site{i}", domain="rural" if i else "city"
    )


@pytest.mark.parametrize("evaluate", [evaluate_unnamed, evaluate_with_partition, evaluate_with_helper])
def test_an_evaluation_without_a_name_keeps_the_known_name_domain_and_state(evaluate, tmp_path):
    def run(**settings: Any) -> FairStrategy:
        strategy = FedHEAL(tau=0.6, placement="client", **settings)
        grid = LocalGrid(make_half_named_app(evaluate), {7 + i: {"partition-id": i} for i in range(3)})
        strategy.start(grid, ArrayRecord({"w": torch.zeros(3)}), num_rounds=6)
        return strategy

    evaluated, blind = run(folder=tmp_path / "run"), run(fraction_evaluate=0.0)
    assert evaluated.registry.names == {7: "site0", 8: "site1", 9: "site2"}
    assert min(evaluated.history[-1].report["kept"].values()) < 1  # the clients' sign counts are still there
    assert torch.equal(evaluated.state.model.params, blind.state.model.params)
    result = records.read_json(tmp_path / "run" / "result.json")
    assert result["clients"] == pytest.approx({"site0": 50, "site1": 60, "site2": 70})
    assert result["domains"] == pytest.approx({"city": 50, "rural": 65})
    assert result["trained"] == {"site0": "city", "site1": "rural", "site2": "rural"}


@pytest.mark.slow
def test_history_belongs_to_the_name_whatever_the_node():
    """A restart under new node ids changes nothing."""
    sites = Sites(rounds=4)
    whole = sites.run(fraction_evaluate=0.0)
    strategy = sites.strategy(fraction_evaluate=0.0)
    strategy._num_rounds = 4
    arrays = strategy.begin(sites.initial)
    old, new = sites.grid(), sites.grid(first=900)
    for number in (1, 2, 3, 4):
        grid = old if number < 3 else new
        messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        arrays, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
        strategy.aggregate_evaluate(number, ())
    assert torch.equal(strategy.state.model.params, whole.state.model.params)


@pytest.mark.parametrize(("first", "named", "warned"), [(900, False, 1), (900, True, 0), (100, False, 0)])
def test_a_resumed_run_says_at_its_start_which_clients_it_will_not_find_again(first, named, warned, tmp_path, caplog):
    """Stock clients without keys, and those of a simulation, have new node ids in every run."""
    sites = Sites(rounds=2)

    def spoil(node: int, reply: Message) -> list[Message]:
        return [reply] if named else rename_client(reply, None)

    settings = {"folder": tmp_path / "run", "fraction_evaluate": 0.0}
    sites.strategy(**settings).start(sites.grid(spoil), sites.initial, num_rounds=1)
    sites.strategy(**settings, resume=True).start(sites.grid(spoil, first), sites.initial, num_rounds=3)
    words = "5 of 5 clients were known by node ids that are gone (node-100, node-101, node-102 and 2 more)"
    assert caplog.text.count(words) == warned
