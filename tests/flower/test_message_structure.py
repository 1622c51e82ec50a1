"""Names, shapes and dtypes of messages: most clients decide, each as last seen, and ties what was used last."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, Message

from fedheal.flower.round_log import restore_federation
from fedheal.flower.silent_nodes import SilentNodes
from flower.sites import Sites
from flower.test_bad_replies import BAD, set_message


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
def test_newcomers_with_other_messages_cannot_stop_those_that_counted(monkeypatch, present, bad, expected):
    """As many newcomers as others leave the structure as it is that was used last."""
    sites, junk = Sites(method="scaffold", rounds=len(present)), set_message("junk", np.ones(1, np.float32))
    strategy = sites.strategy(fraction_evaluate=0.0, max_empty_rounds=None, min_available_nodes=1)
    # Who was away for two rounds is asked in the next, too.
    monkeypatch.setattr(SilentNodes, "leave_out_resting", lambda _, nodes, *__: list(nodes))

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
