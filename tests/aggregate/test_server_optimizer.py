"""The server's step against numbers by hand: Delta = aggregated - before."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedheal.aggregate.server_optimizer import (
    Server,
    ServerState,
    make_fedadagrad,
    make_fedadam,
    make_fedavgm,
    make_fedyogi,
)
from fedheal.core.layout import Packed
from fedheal.core.state import Nothing, State

ALL = [Server(), Server(lr=0.5), Server(momentum=0.9), Server("adam", 0.1), Server("yogi", 0.1), Server("adagrad", 0.1)]


def make_packed(*params: float, buffer: float = 0.0, counter: int = 0) -> Packed:
    return Packed(torch.tensor(params), torch.tensor([buffer]), torch.tensor([counter]))


def take_steps(server: Server, deltas: list[list[float]]) -> list[list[float]]:
    """Return the parameters after each round, from zero, if all clients move by deltas[i] in round i."""
    model, state, params_by_round = make_packed(0.0, 0.0), server.init(), []
    for delta in deltas:
        aggregated = Packed(model.params + torch.tensor(delta), model.buffers, model.counters)
        model, state = server.apply(model, aggregated, state)
        params_by_round.append(model.params.tolist())
    return params_by_round


def test_a_step_of_one_without_momentum_gives_the_aggregated_bits() -> None:
    chance = torch.Generator().manual_seed(0)
    before, after = (Packed(torch.randn(1000, generator=chance), torch.ones(1), torch.ones(1)) for _ in range(2))
    model, _ = Server().apply(before, after, Server().init())
    assert torch.equal(model.params, after.params)  # before + (after - before) would differ in a last bit somewhere
    assert not torch.equal(before.params + (after.params - before.params), after.params)


def test_half_a_step() -> None:
    model, _ = Server("sgd", lr=0.5).apply(make_packed(1.0, 2.0), make_packed(3.0, -2.0), Server().init())
    assert model.params.tolist() == [2.0, 0.0]


def test_momentum_adds_up() -> None:
    # v: 1, then 0.5 * 1 + 1 = 1.5, then 0.5 * 1.5 + 0 = 0.75; W: 1, 2.5, 3.25. Second entry: v: 0, 2, 1
    params = take_steps(Server("sgd", lr=1.0, momentum=0.5), [[1, 0], [1, 2], [0, 0]])
    assert params == [[1.0, 0.0], [2.5, 2.0], [3.25, 3.0]]


def test_momentum_with_a_rate() -> None:
    assert take_steps(Server("sgd", lr=0.1, momentum=0.5), [[1, 0], [1, 0]])[1][0] == pytest.approx(0.1 + 0.15)


def test_adam_by_hand() -> None:
    server = Server("adam", lr=0.1, momentum=0.9)
    # m = 0.1 * 2 = 0.2; v = 0.01 * 4 = 0.04; step 0.1 * 0.2 / (0.2 + 0.001)
    first = 0.1 * 0.2 / (0.2 + 1e-3)
    # m = 0.9 * 0.2 - 0.1 = 0.08; v = 0.99 * 0.04 + 0.01 = 0.0496
    second = first + 0.1 * 0.08 / (math.sqrt(0.0496) + 1e-3)
    params = take_steps(server, [[2, 0], [-1, 0]])
    assert [row[0] for row in params] == pytest.approx([first, second], rel=1e-6)
    assert [row[1] for row in params] == [0.0, 0.0]  # nothing over eps is nothing


def test_yogi_by_hand() -> None:
    server = Server("yogi", lr=0.1, momentum=0.9)
    # As Adam from v = 0: m = 0.2, v = 0 + 0.01 * 4 = 0.04.
    first = 0.1 * 0.2 / (0.2 + 1e-3)
    # m = 0.9 * 0.2 + 0.1 * 0.1 = 0.19; Delta^2 = 0.01 is below v = 0.04: v = 0.04 - 0.01 * 0.01 (Adam: 0.0397).
    second = first + 0.1 * 0.19 / (math.sqrt(0.0399) + 1e-3)
    # m = 0.9 * 0.19 + 0.1 = 0.271; Delta^2 = 1 is above v: v = 0.0399 + 0.01.
    third = second + 0.1 * 0.271 / (math.sqrt(0.0499) + 1e-3)
    params = take_steps(server, [[2, 0], [0.1, 0], [1, 0]])
    assert [row[0] for row in params] == pytest.approx([first, second, third], rel=1e-6)
    assert [row[1] for row in params] == [0.0, 0.0, 0.0]


def test_adagrad_by_hand() -> None:
    # Without momentum m = Delta; v = 4, then 4 + 1 = 5.
    first = 0.1 * 2 / (2 + 1e-3)
    second = first - 0.1 * 1 / (math.sqrt(5) + 1e-3)
    params = take_steps(Server("adagrad", lr=0.1), [[2, 0], [-1, 0]])
    assert [row[0] for row in params] == pytest.approx([first, second], rel=1e-6)


def test_adagrad_with_momentum_by_hand() -> None:
    # m = 0.5 * 2 = 1, then 0.5 * 1 - 0.5 = 0; v as before.
    params = take_steps(Server("adagrad", lr=0.1, momentum=0.5), [[2, 0], [-1, 0]])
    assert [row[0] for row in params] == pytest.approx([0.1 * 1 / 2.001] * 2, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "yogi", "adagrad"])
def test_a_large_eps_makes_an_adaptive_step_a_plain_one(optimizer: str) -> None:
    """sqrt(v) vanishes beside eps: W + lr/eps Delta, which is FedAvg for lr = eps and no momentum."""
    params = take_steps(Server(optimizer, lr=1e6, momentum=0.0, eps=1e6), [[2, -1], [0.5, 3]])
    assert params[0] == pytest.approx([2, -1], rel=1e-5)
    assert params[1] == pytest.approx([2.5, 2], rel=1e-5)


def test_names_of_server_optimisers_give_them() -> None:
    assert make_fedavgm(eta=1.0, beta1=0.0) == Server()  # which gives the aggregated bits: FedAvg
    assert make_fedavgm() == Server("sgd", 1.0, 0.9)
    assert make_fedadam() == Server("adam")
    assert make_fedyogi(eta=0.1, beta1=0.8, beta2=0.9, eps=0.01) == Server("yogi", 0.1, 0.8, 0.9, 0.01)
    assert make_fedadagrad() == Server("adagrad", 0.01, 0.0)


def test_each_optimiser_has_a_rate_and_momentum_of_its_own() -> None:
    assert (Server().lr, Server().momentum) == (1.0, 0.0)
    assert (Server("adam").lr, Server("adam").momentum) == (0.01, 0.9)
    assert (Server("adam", 1.0, 0.0).lr, Server("adam", 1.0, 0.0).momentum) == (1.0, 0.0)
    assert replace(Server("adam"), lr=0.1) == Server("adam", lr=0.1)


def test_adams_first_step_is_no_longer_than_its_rate() -> None:
    """0.1 Delta over 0.1 |Delta| + eps: just below 1, times 0.01, whether clients moved by 1 or by 100."""
    for delta in (1.0, 100.0):
        assert take_steps(Server("adam"), [[delta, -delta]])[0] == pytest.approx([0.01, -0.01], rel=0.02)


def test_an_unknown_optimiser_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer = 'lion': use one of 'sgd', 'adam', 'yogi', 'adagrad'"):
        Server("lion")


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 0), ("lr", float("nan")), ("momentum", 1), ("momentum", -0.1), ("beta2", 1), ("eps", 0)]
)
def test_a_value_out_of_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} = {value}: use a"):
        Server("adam", **{name: value})


def test_buffers_and_counters_are_the_aggregated_ones() -> None:
    for server in ALL:
        model, _ = server.apply(
            make_packed(0, 0, buffer=1, counter=3), make_packed(1, 1, buffer=5, counter=9), server.init()
        )
        assert (model.buffers.tolist(), model.counters.tolist()) == ([5.0], [9])


@pytest.mark.parametrize("server", ALL)
def test_inputs_are_not_changed(server: Server) -> None:
    before, after = make_packed(1.0, 2.0), make_packed(2.0, 4.0)
    _, state = server.apply(before, after, server.init())
    copies = state.first.clone(), state.second.clone()
    server.apply(before, after, state)
    assert before.params.tolist() == [1.0, 2.0]
    assert after.params.tolist() == [2.0, 4.0]
    assert torch.equal(state.first, copies[0])
    assert torch.equal(state.second, copies[1])


@pytest.mark.parametrize("server", ALL)
def test_a_state_goes_out_as_arrays_and_comes_back_to_go_on_alike(server: Server) -> None:
    _, state = server.apply(make_packed(1.0, 2.0), make_packed(1.3, 1.7), server.init())
    arrays, json = state.to_arrays()
    restored = State.from_arrays(arrays, json)
    assert isinstance(restored, ServerState)
    ours, _ = server.apply(make_packed(1.3, 1.7), make_packed(0.1, 0.2), state)
    theirs, _ = server.apply(make_packed(1.3, 1.7), make_packed(0.1, 0.2), restored)
    assert torch.equal(ours.params, theirs.params)


def test_the_state_of_another_part_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 'server'"):
        Server().apply(make_packed(1.0), make_packed(2.0), Nothing())


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
    params = [row[0] for row in take_steps(Server("adam"), [[delta, 0]] * 600)]
    assert params[0] == pytest.approx(first, rel=0.02)
    assert params[-1] - params[-2] == pytest.approx(later, rel=0.02)
