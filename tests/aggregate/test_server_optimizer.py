"""The server's step against numbers by hand: Delta = aggregated - before."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedheal.aggregate.server_optimizer import Server, ServerState
from fedheal.core.layout import Packed
from fedheal.core.state import Nothing, State


def packed(*params: float, buffer: float = 0.0, counter: int = 0) -> Packed:
    return Packed(torch.tensor(params), torch.tensor([buffer]), torch.tensor([counter]))


def steps(server: Server, deltas: list[list[float]]) -> list[list[float]]:
    """The parameters after each round, from zero, where round i's clients agree on moving by deltas[i]."""
    model, state, found = packed(0.0, 0.0), server.init(), []
    for delta in deltas:
        aggregated = Packed(model.params + torch.tensor(delta), model.buffers, model.counters)
        model, state = server.apply(model, aggregated, state)
        found.append(model.params.tolist())
    return found


def test_a_step_of_one_without_momentum_gives_the_aggregated_bits() -> None:
    chance = torch.Generator().manual_seed(0)
    before, after = (Packed(torch.randn(1000, generator=chance), torch.ones(1), torch.ones(1)) for _ in range(2))
    model, _ = Server().apply(before, after, Server().init())
    assert torch.equal(model.params, after.params)  # before + (after - before) would differ in a last bit somewhere
    assert not torch.equal(before.params + (after.params - before.params), after.params)


def test_half_a_step() -> None:
    model, _ = Server("sgd", lr=0.5).apply(packed(1.0, 2.0), packed(3.0, -2.0), Server().init())
    assert model.params.tolist() == [2.0, 0.0]


def test_momentum_adds_up() -> None:
    # v: 1, then 0.5 * 1 + 1 = 1.5, then 0.5 * 1.5 + 0 = 0.75; W: 1, 2.5, 3.25. Second entry: v: 0, 2, 1
    found = steps(Server("sgd", lr=1.0, momentum=0.5), [[1, 0], [1, 2], [0, 0]])
    assert found == [[1.0, 0.0], [2.5, 2.0], [3.25, 3.0]]


def test_momentum_with_a_rate() -> None:
    assert steps(Server("sgd", lr=0.1, momentum=0.5), [[1, 0], [1, 0]])[1][0] == pytest.approx(0.1 + 0.15)


def test_adam_by_hand() -> None:
    server = Server("adam", lr=0.1, momentum=0.9)
    # m = 0.1 * 2 = 0.2; v = 0.01 * 4 = 0.04; step 0.1 * 0.2 / (0.2 + 0.001)
    first = 0.1 * 0.2 / (0.2 + 1e-3)
    # m = 0.9 * 0.2 - 0.1 = 0.08; v = 0.99 * 0.04 + 0.01 = 0.0496
    second = first + 0.1 * 0.08 / (math.sqrt(0.0496) + 1e-3)
    found = steps(server, [[2, 0], [-1, 0]])
    assert [row[0] for row in found] == pytest.approx([first, second], rel=1e-6)
    assert [row[1] for row in found] == [0.0, 0.0]  # nothing over eps is nothing


def test_each_optimiser_has_a_rate_and_momentum_of_its_own() -> None:
    assert (Server().lr, Server().momentum) == (1.0, 0.0)
    assert (Server("adam").lr, Server("adam").momentum) == (0.01, 0.9)
    assert (Server("adam", 1.0, 0.0).lr, Server("adam", 1.0, 0.0).momentum) == (1.0, 0.0)
    assert replace(Server("adam"), lr=0.1) == Server("adam", lr=0.1)


def test_adams_first_step_is_no_longer_than_its_rate() -> None:
    """0.1 Delta over 0.1 |Delta| + eps: just below 1, times 0.01, whether clients moved by 1 or by 100."""
    for delta in (1.0, 100.0):
        assert steps(Server("adam"), [[delta, -delta]])[0] == pytest.approx([0.01, -0.01], rel=0.02)


def test_an_unknown_optimiser_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer = 'lion': use one of 'sgd', 'adam'"):
        Server("lion")


def test_buffers_and_counters_are_the_aggregated_ones() -> None:
    for server in (Server(), Server(lr=0.5), Server(momentum=0.9), Server("adam")):
        model, _ = server.apply(packed(0, 0, buffer=1, counter=3), packed(1, 1, buffer=5, counter=9), server.init())
        assert (model.buffers.tolist(), model.counters.tolist()) == ([5.0], [9])


@pytest.mark.parametrize("server", [Server(lr=0.5), Server(momentum=0.9), Server("adam", 0.1, 0.9)])
def test_inputs_are_not_changed(server: Server) -> None:
    before, after = packed(1.0, 2.0), packed(2.0, 4.0)
    _, state = server.apply(before, after, server.init())
    kept = state.first.clone(), state.second.clone()
    server.apply(before, after, state)
    assert before.params.tolist() == [1.0, 2.0]
    assert after.params.tolist() == [2.0, 4.0]
    assert torch.equal(state.first, kept[0])
    assert torch.equal(state.second, kept[1])


@pytest.mark.parametrize("server", [Server(), Server(momentum=0.9), Server("adam", 0.1, 0.9)])
def test_a_state_goes_out_as_arrays_and_comes_back_to_go_on_alike(server: Server) -> None:
    _, state = server.apply(packed(1.0, 2.0), packed(1.3, 1.7), server.init())
    arrays, json = state.to_arrays()
    restored = State.from_arrays(arrays, json)
    assert isinstance(restored, ServerState)
    ours, _ = server.apply(packed(1.3, 1.7), packed(0.1, 0.2), state)
    theirs, _ = server.apply(packed(1.3, 1.7), packed(0.1, 0.2), restored)
    assert torch.equal(ours.params, theirs.params)


def test_the_state_of_another_part_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 'server'"):
        Server().apply(packed(1.0), packed(2.0), Nothing())


def test_a_damaged_state_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="damaged"):
        State.from_arrays({"first": torch.ones(1)}, {"kind": "server"})


@pytest.mark.parametrize(
    ("delta", "first", "later"),
    [(1.0, 1e-2, 1e-2), (1e-3, 9.1e-4, 5e-3), (1e-5, 1e-5, 1e-4)],
    ids=["1", "1e-3", "1e-5"],
)
def test_adams_step_is_its_rate_for_large_deltas_and_at_most_ten_times_a_small_one(
    delta: float, first: float, later: float
) -> None:
    """After many equal Deltas m = Delta and sqrt(v) = Delta: lr Delta / (Delta + eps), with lr 0.01 and eps 0.001."""
    found = [row[0] for row in steps(Server("adam"), [[delta, 0]] * 600)]
    assert found[0] == pytest.approx(first, rel=0.02)
    assert found[-1] - found[-2] == pytest.approx(later, rel=0.02)
