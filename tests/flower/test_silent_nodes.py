"""A dead or hung client costs one timeout, and a federation in which nothing happens ends with an error."""

from __future__ import annotations

import logging
import math
import re
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Error, Message
from flwr.clientapp import ClientApp

from fedheal.flower import FairStrategy, NotEnoughNodes, TooManyEmptyRounds
from fedheal.flower.silent_nodes import SUM, SilentNodes
from fedheal.runs import folder as records
from flower.local_grid import LocalGrid
from flower.sites import Sites
from flower.test_bad_replies import CASES

pytestmark = pytest.mark.slow

DEAD = 102


class NodeOutages:
    """Kills and revives nodes as rounds go by: `dead_from` says which nodes are dead from a round on."""

    def __init__(self, rounds: int, dead_from: dict[int, set[int]], **settings: Any) -> None:
        self.sites = Sites(rounds=rounds)
        self.strategy = self.sites.strategy(**{"fraction_evaluate": 0.0, **settings})
        self.grid, self.dead_from = self.sites.grid(), dead_from
        configure = self.strategy.configure_train

        def configure_train(number: int, *args: Any) -> list[Message]:
            self.grid.dead = self.dead_from.get(number, self.grid.dead)
            return configure(number, *args)

        self.strategy.configure_train = configure_train

    def run(self) -> FairStrategy:
        self.strategy.start(self.grid, self.sites.initial, num_rounds=self.sites.experiment.rounds)
        return self.strategy


def test_a_dead_node_costs_one_timeout_and_returns_when_it_answers():
    clock = NodeOutages(10, {2: {DEAD}, 5: set()})
    history = clock.run().history
    name = clock.sites.names[DEAD - 100]
    dead_is_asked = [DEAD in nodes for nodes in clock.grid.asked]
    assert dead_is_asked[:4] == [True, True, False, False]
    # Alive again in round 5, it answers the next query, which come ever more rarely.
    assert all(dead_is_asked[6:])
    assert [record.report["missing"] for record in history] == [[], [name], *[[]] * 8]
    assert [record.cohort for record in history] == [4 + here for here in dead_is_asked]
    # A record names who counted before and is not asked.
    assert [record.report.get("absent") for record in history] == [None if here else [name] for here in dead_is_asked]
    assert history[-1].weights[name] > 0


def test_a_node_that_does_not_evaluate_is_not_asked_to_train():
    clock = NodeOutages(2, {}, fraction_evaluate=1.0)

    def hang(node: int, reply: Message) -> list[Message]:
        if node == DEAD and reply.metadata.message_type == "evaluate":
            clock.grid.dead = {DEAD}
            return []
        return [reply]

    clock.grid.spoil = hang
    clock.run()
    assert [DEAD in nodes for nodes in clock.grid.asked] == [True, True, False, False]


def test_a_record_names_a_node_that_does_not_evaluate(caplog):
    clock = NodeOutages(2, {}, fraction_evaluate=1.0)
    name = clock.sites.names[DEAD - 100]

    def hang(node: int, reply: Message) -> list[Message]:
        is_silent = node == DEAD and reply.metadata.message_type == "evaluate"
        return [] if is_silent and clock.strategy.rounds.current.number == 1 else [reply]

    clock.grid.spoil = hang
    first, second = clock.run().history
    assert first.report["not_evaluated"] == {name: "it did not reply"}
    assert first.report["missing"] == []
    assert (first.cohort, first.replied) == (5, 5)  # of the training
    assert set(first.clients) == set(clock.sites.names) - {name}
    assert "not_evaluated" not in second.report
    assert f"round 1: no evaluation from {name}" in caplog.text


def test_a_round_that_nobody_can_evaluate_is_saved_before_the_run_ends(tmp_path):
    clock = NodeOutages(4, {}, fraction_evaluate=1.0, folder=tmp_path / "run", wait_seconds=0.0)

    def leave(node: int, reply: Message) -> list[Message]:
        current = clock.strategy.rounds.current
        if current.number == 3 and reply.metadata.message_type == "train":
            clock.grid.get_node_ids = lambda: [DEAD]
        return [reply]

    clock.grid.spoil = leave
    with pytest.raises(NotEnoughNodes, match=r"only 1 of the 2 nodes .*; finished rounds are saved"):
        clock.run()
    third = records.read_rounds(tmp_path / "run")[2]
    assert (third.round, third.domains, len(third.weights)) == (3, None, 5)
    assert third.report["ended"].startswith("only 1 of the 2 nodes")
    assert int(records.list_checkpoints(tmp_path / "run")[0].stem) == 3
    resumed = clock.sites.run(folder=tmp_path / "run", resume=True)
    assert torch.equal(resumed.state.model.params, Sites(rounds=4).run().state.model.params)
    assert [record.domains is None for record in resumed.history] == [False, False, True, False]


def test_an_error_of_the_superlink_is_no_answer_and_one_of_the_node_is(monkeypatch):
    clock = NodeOutages(4, {2: {DEAD}})
    answer = LocalGrid.answer

    def answer_with_error(grid: LocalGrid, message: Message) -> Message | None:
        reply = answer(grid, message)
        if reply is None and message.metadata.message_type == "query":
            return Message(Error(code=code, reason="from the SuperLink"), reply_to=message)
        return reply

    monkeypatch.setattr(LocalGrid, "answer", answer_with_error)
    code = 5  # node unavailable
    clock.run()
    assert [DEAD in nodes for nodes in clock.grid.asked] == [True, True, False, False]
    code, clock = 2, NodeOutages(4, {2: {DEAD}})  # a stock app has no function for queries, and raises
    clock.run()
    assert [DEAD in nodes for nodes in clock.grid.asked] == [True, True, True, False]


@pytest.mark.parametrize("fraction_evaluate", [0.0, 1.0])
def test_a_node_that_answers_queries_and_never_trains_is_asked_ever_more_rarely(fraction_evaluate):
    clock, timeouts = NodeOutages(40, {}, fraction_evaluate=fraction_evaluate), []

    def crash(node: int, reply: Message) -> list[Message]:
        number = clock.strategy.rounds.current.number if clock.strategy.rounds.current else 0
        if node != DEAD or reply.metadata.message_type != "train" or number >= 30:
            return [reply]
        timeouts.append(number)
        return []

    clock.grid.spoil = crash
    history = clock.run().history
    assert timeouts == [1, 2, 5, 10, 19]  # one timeout may be bad luck; then it rests for 2, 4, 8 and 16 rounds
    name = clock.sites.names[DEAD - 100]
    trained = [record.round for record in history if name in record.weights]
    assert trained == [36, 37, 38, 39, 40]  # then it trains again


def test_a_node_that_is_late_for_every_roll_call_is_asked_ever_more_rarely():
    clock, roll_calls = NodeOutages(20, {}, fraction_evaluate=0.0, roll_call=True), []

    def delay(node: int, reply: Message) -> list[Message]:
        if node == DEAD and reply.metadata.message_type == "query":
            roll_calls.append(node)
            return []  # it answers the queries that nobody waits for
        return [reply]

    clock.grid.spoil = delay
    clock.run()
    assert len(roll_calls) == 5  # in the rounds 1, 2, 5, 10 and 19


def test_a_node_rests_by_the_kind_of_message_that_it_times_out_on():
    silent = SilentNodes()
    for number in (1, 2):
        silent.record_replies([100, 101], [100], "train", number)
        silent.record_replies([100, 101], [100, 101], "evaluate", number)
    present = partial(silent.leave_out_resting, [100, 101], needed=1)
    assert [present("train", number) for number in (3, 4, 5)] == [[100], [100], [100, 101]]
    assert present("evaluate", 3) == [100, 101]
    silent.record_replies([101], [], SUM, 5)
    silent.record_replies([101], [], SUM, 6)
    assert present("train", 7) == [100]  # as it stalls what follows the training
    assert silent.leave_out_resting([100, 101], "train", 7, needed=2) == [100, 101]  # better than to end the run
    silent.record_replies([101], [101], SUM, 9)
    silent.record_replies([101], [], SUM, 10)
    assert present("train", 11) == [100, 101]  # a reply starts the count again


def test_nodes_that_are_gone_are_forgotten():
    silent, grid = SilentNodes(), LocalGrid(ClientApp(), {100: {}, 101: {}})
    for number in (1, 2):
        silent.record_replies([100, 101], [], "train", number)
    assert silent.list_responsive(grid, lambda nodes: []) == []
    grid.contexts.clear()
    assert silent.list_responsive(grid, lambda nodes: []) == []
    assert silent.nodes == frozenset()
    assert silent.leave_out_resting([100, 101], "train", 3, needed=0) == [100, 101]  # connected again


def test_a_node_that_connects_again_is_asked_at_once():
    clock = NodeOutages(4, {2: {DEAD}, 4: set()})
    context = clock.grid.contexts[DEAD]

    def spoil(node: int, reply: Message) -> list[Message]:
        if clock.strategy.rounds.current.number == 3 and DEAD in clock.grid.contexts:
            del clock.grid.contexts[DEAD]
        return [reply]

    clock.grid.spoil = spoil
    listed = clock.grid.get_node_ids

    def get_node_ids() -> list[int]:
        nodes = list(listed())
        if DEAD not in nodes:
            clock.grid.contexts[DEAD] = context  # from the next look on
        return nodes

    clock.grid.get_node_ids = get_node_ids
    clock.run()
    assert DEAD not in clock.grid.asked[2]
    assert clock.strategy._silent.nodes == frozenset()


def test_a_dead_node_without_a_name_costs_the_roll_call_one_timeout():
    sites = Sites(rounds=3)
    sites.app = ClientApp()
    sites.app.train()(sites.train)  # it knows no queries
    strategy, grid = sites.strategy(fraction_evaluate=0.0, roll_call=True), sites.grid()
    grid.dead = {DEAD}
    strategy.start(grid, sites.initial, num_rounds=3)
    assert grid.asked[0] == [100, 101, 102, 103, 104]  # by the roll call
    assert all(DEAD not in nodes for nodes in grid.asked[1:])


def test_too_few_nodes_that_answer_end_the_run():
    clock = NodeOutages(4, {2: {DEAD, 103, 104}}, min_available_nodes=3, wait_seconds=0.2)
    with pytest.raises(NotEnoughNodes, match=r"only 2 of the 3 nodes .* are connected and answer"):
        clock.run()
    assert len(clock.strategy.history) == 2


def test_rounds_without_a_usable_reply_end_the_run_and_leave_no_model(tmp_path):
    sites, spoil = Sites(rounds=9), CASES["NaN"][0]
    good = sites.strategy(folder=tmp_path / "run", fraction_evaluate=0.0)
    good.start(sites.grid(), sites.initial, num_rounds=1)
    assert (tmp_path / "run" / "model.safetensors").exists()
    strategy = sites.strategy(folder=tmp_path / "run", fraction_evaluate=0.0, resume=True)
    with pytest.raises(TooManyEmptyRounds, match=r"max_empty_rounds = 3: .*; in the last one '.*' was skipped \(.*NaN"):
        strategy.start(sites.grid(lambda node, reply: spoil(reply)), sites.initial, num_rounds=9)
    rounds = records.read_rounds(tmp_path / "run")
    assert [record.report.get("ended", "")[:20] for record in rounds] == ["", "", "", "max_empty_rounds = 3"]
    assert not (tmp_path / "run" / "model.safetensors").exists()
    # Mended, it goes on where it stood, with a new count.
    again = sites.strategy(folder=tmp_path / "run", fraction_evaluate=0.0, resume=True)
    fault = lambda node, reply: spoil(reply) if again.rounds.current.number < 7 else [reply]  # noqa: E731
    again.start(sites.grid(fault), sites.initial, num_rounds=7)
    assert torch.isfinite(again.state.model.params).all()
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_who_was_far_from_the_others_before_is_named():
    """A message of one client may make all others diverge."""
    sites = Sites(method="scaffold", rounds=9)
    strategy = sites.strategy(fraction_evaluate=0.0)

    def spoil(node: int, reply: Message) -> list[Message]:
        if strategy.rounds.current.number == 2 and node == 102:
            change = reply.content["fedheal.messages"]["0.change"].numpy()
            reply.content["fedheal.messages"]["0.change"] = Array(np.full_like(change, 9e5))
        return [reply]

    why = rf"diverged.*; in round 2, the last that counted, '{sites.names[2]}' had messages with norm .*: fix the cause"
    with pytest.raises(TooManyEmptyRounds, match=why):
        strategy.start(sites.grid(spoil), sites.initial, num_rounds=9)


@pytest.mark.parametrize(("limit", "rounds"), [(1, 1), (2, 4), (None, 6)])
def test_only_empty_rounds_in_a_row_count(limit, rounds):
    sites, spoil = Sites(rounds=6), CASES["NaN"][0]
    strategy = sites.strategy(fraction_evaluate=0.0, max_empty_rounds=limit)
    fault = lambda node, reply: [reply] if strategy.rounds.current.number == 2 else spoil(reply)  # noqa: E731
    if limit is None:
        strategy.start(sites.grid(fault), sites.initial, num_rounds=6)
    else:
        with pytest.raises(TooManyEmptyRounds):
            strategy.start(sites.grid(fault), sites.initial, num_rounds=6)
    assert len(strategy.history) == rounds


def test_empty_rounds_end_flowers_own_loop_too(tmp_path):
    sites, spoil = Sites(rounds=3), CASES["NaN"][0]
    strategy = sites.strategy(folder=tmp_path / "run", max_empty_rounds=2)
    grid, arrays = sites.grid(lambda node, reply: spoil(reply)), sites.initial
    for number in (1, 2):
        messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        arrays, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
        with pytest.raises(TooManyEmptyRounds) if number == 2 else nullcontext():
            strategy.aggregate_evaluate(number, ())
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_rounds_without_training_are_not_empty():
    strategy = Sites(rounds=4).run(fraction_train=0.0)
    assert len(strategy.history) == 4


def test_the_timeout_is_logged_and_checked(caplog):
    sites = Sites(rounds=1)
    with caplog.at_level(logging.INFO, "flwr.fedheal"):
        sites.strategy().start(sites.grid(), sites.initial, num_rounds=0)
        sites.strategy().start(sites.grid(), sites.initial, num_rounds=0, timeout=7)
    assert re.findall("timeout = ([0-9]+) s", caplog.text) == ["1800", "7"]
    for timeout in (0, -1.0, math.inf, "9"):
        with pytest.raises(ValueError, match=f"timeout = {timeout!r}"):
            sites.strategy().start(sites.grid(), sites.initial, num_rounds=0, timeout=timeout)
