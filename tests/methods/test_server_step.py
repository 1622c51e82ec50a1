"""The server step that the simulator and Flower share."""

from __future__ import annotations

import pytest
import torch

from fedheal import Layout, Packed, Updates, methods
from fedheal.aggregate.server_optimizer import Server
from fedheal.core.state import RunState, TermState
from fedheal.methods.server_step import ClientTerms, ServerStep, StepOutcome, apply_server_step, mean_train_loss

LAYOUT = Layout.flat(2)


def take_step(
    name: str,
    deltas: list[list[float]],
    server: Server | None = None,
    weights: list[float] | None = None,
    messages: tuple[dict[str, torch.Tensor], ...] = (),
) -> tuple[RunState, StepOutcome]:
    """One step from a model of zeros, with clients a, b, ...; the state before it, and its outcome."""
    method = methods.get(name)
    step = ServerStep(
        aggregator=method.aggregator,
        optimizer=server or Server(),
        terms=method.local,
        layout=LAYOUT,
        rounds=10,
    )
    clients = [chr(ord("a") + i) for i in range(len(deltas))]
    before = RunState(
        round=4,
        seed=0,
        model=Packed(torch.zeros(2), torch.zeros(0), torch.zeros(0, dtype=torch.int64)),
        aggregator=step.aggregator.init(LAYOUT),
        server=step.optimizer.init(),
        terms=tuple(TermState(term.init(LAYOUT), {}) for term in step.terms),
    )
    updates = Updates(clients, torch.tensor(deltas), weights or [1.0] * len(deltas))
    replies = {client: ClientTerms(messages=messages) for client in clients}
    return before, apply_server_step(step, before, updates, replies, num_clients=len(clients))


def test_a_step_without_terms_is_the_aggregated_model():
    before, outcome = take_step("fedavg", [[1.0, 2.0], [3.0, 6.0]])
    assert outcome.state.model.params.tolist() == [2.0, 4.0]
    assert (outcome.state.round, outcome.accepted, outcome.is_refused) == (before.round + 1, ("a", "b"), False)


def test_the_server_optimizer_moves_part_of_the_way():
    _, outcome = take_step("fedavg", [[1.0, 2.0], [3.0, 6.0]], Server(lr=0.5))
    assert outcome.state.model.params.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "server", "cause"),
    [
        ("feddyn", Server(), "FedDyn|Dynamic"),  # delta - h/alpha = 2e38 + 2e38 is beyond float32
        ("fedavg", Server(lr=10.0), "server_lr = 10.0"),  # 10 x 2e38 likewise
    ],
)
def test_a_step_that_overflows_is_refused_and_leaves_the_model(name: str, server: Server, cause: str) -> None:
    before, outcome = take_step(name, [[2e38, 0.0], [2e38, 0.0]], server, messages=({},))
    assert outcome.is_refused
    assert torch.equal(outcome.state.model.params, torch.zeros(2))
    assert outcome.state.terms is before.terms
    assert outcome.state.round == before.round + 1
    assert any(word in outcome.refusal for word in cause.split("|"))


def test_training_loss_is_that_of_accepted_clients_with_a_finite_one():
    updates = Updates("abcd", torch.zeros(4, 2), [1.0] * 4, metrics={"train_loss": [1.0, 3.0, float("nan"), 100.0]})
    assert mean_train_loss(updates, ["a", "b", "c"]) == 2.0
    assert mean_train_loss(updates, ["c"]) is None
    assert mean_train_loss(Updates("a", torch.zeros(1, 2), [1.0]), ["a"]) is None
