"""MOON by hand: the loss for given features, the reference nets, what stays with the client."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedheal.core.layout import Layout, Packed
from fedheal.engine import serial
from fedheal.engine.serial import SerialEngine
from fedheal.local.moon import Moon
from fedheal.local.term import Batch, Context
from fedheal.simulate.build import build_federation
from fedheal.simulate.round import initial_state, run_round
from local.quadratic import make_term_context
from tiny_data import feature_model, load, quick

NONE = torch.empty(0), torch.empty(0, dtype=torch.int64)


class MatrixFeatures(nn.Module):
    """A feature vector is the input times a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(2))

    def features(self, x: Tensor) -> Tensor:
        return x @ self.w.T


def prepare_context(term: Moon, received: list[float], previous: list[float] | None, **keys: Any) -> Context:
    slot = {} if previous is None else {"params": torch.tensor(previous), "buffers": torch.empty(0)}
    ctx = make_term_context(term, Packed(torch.tensor(received), *NONE), module=MatrixFeatures(), slot=slot, **keys)
    assert term.prepare(ctx, ctx.received) is ctx.received
    return ctx


def make_batch(x: list[list[float]], z: Tensor) -> Batch:
    return Batch(torch.tensor(x), torch.zeros(len(x), dtype=torch.int64), torch.zeros(len(x), 2), torch.tensor(0.0), z)


SAME, QUARTER = [1.0, 0.0, 0.0, 1.0], [0.0, -1.0, 1.0, 0.0]  # the identity, and a quarter turn


def test_the_loss_by_hand() -> None:
    """z = z_g = (1, 0) and z_p = (0, 1): cosines 1 and 0, over T = 0.5: 2 and 0. l = log(1 + e^-2) = 0.126928."""
    ctx = prepare_context(Moon(), SAME, QUARTER)
    x = [[1.0, 0.0]]
    loss = Moon().loss(make_batch(x, torch.tensor(x)), ctx)
    assert loss.item() == pytest.approx(5 * math.log1p(math.exp(-2)), rel=1e-6)
    assert loss.item() == pytest.approx(5 * 0.126928, rel=1e-5)


def test_the_loss_is_a_mean_over_the_batch_and_blind_to_length() -> None:
    """The second sample's feature is the previous net's: log(1 + e^2). Lengths 7 and 3 change nothing."""
    ctx = prepare_context(Moon(mu=1.0), SAME, QUARTER)
    loss = Moon(mu=1.0).loss(make_batch([[1.0, 0.0]] * 2, torch.tensor([[7.0, 0.0], [0.0, 3.0]])), ctx)
    assert loss.item() == pytest.approx((math.log1p(math.exp(-2)) + math.log1p(math.exp(2))) / 2, rel=1e-6)


def test_equal_references_give_the_constant_log_two_without_a_gradient() -> None:
    ctx = prepare_context(Moon(mu=1.0), SAME, SAME)
    z = torch.tensor([[0.3, 0.4]], requires_grad=True)
    loss = Moon(mu=1.0).loss(make_batch([[1.0, 0.0]], z), ctx)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2), rel=1e-6)
    assert z.grad.abs().max() < 1e-7


def test_gradients_flow_through_the_current_features_only() -> None:
    ctx = prepare_context(Moon(), SAME, QUARTER)
    z = torch.tensor([[0.6, 0.8]], requires_grad=True)
    Moon().loss(make_batch([[1.0, 0.0]], z), ctx).backward()
    assert z.grad[0, 0] < 0 < z.grad[0, 1]  # nearer to z_g = (1, 0), away from z_p = (0, 1)
    for net in (ctx.scratch["global"], ctx.scratch["previous"]):
        assert all(p.grad is None and not p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("term", [Moon(), Moon(mu=0.0)], ids=["no previous net", "mu=0"])
def test_no_term_without_a_previous_net_or_a_weight(term: Moon) -> None:
    ctx = prepare_context(term, SAME, None if term.mu else QUARTER)
    assert ctx.scratch == {}
    assert term.loss(make_batch([[1.0, 0.0]], torch.ones(1, 2)), ctx) is None


def test_reference_nets_are_in_evaluation_mode_and_nets_of_their_own() -> None:
    """Their running statistics do not move while they are used, and the net in training is another one."""
    module = feature_model(3).train()
    layout = Layout.of(module)
    received = layout.pack(module.state_dict())
    slot = {"params": received.params + 1, "buffers": received.buffers + 2}
    term = Moon()
    ctx = make_term_context(term, received, module=module, slot=slot)
    term.prepare(ctx, received)
    x = torch.rand(4, 3, 8, 8)
    z = module.features(x)
    references = {name: layout.pack(ctx.scratch[name].state_dict()) for name in ("global", "previous")}
    first, second = (term.loss(Batch(x, torch.zeros(4, dtype=torch.int64), z, z.sum(), z), ctx) for _ in range(2))
    assert first.item() == second.item()
    assert module.training
    for name, expected in (("global", (received.params, received.buffers)), ("previous", tuple(slot.values()))):
        net = ctx.scratch[name]
        assert net is not module
        assert not any(part.training for part in net.modules())
        after = layout.pack(net.state_dict())
        assert torch.equal(after.params, expected[0])
        assert torch.equal(after.buffers, expected[1])
        assert torch.equal(after.counters, references[name].counters)


@pytest.mark.parametrize("method", ["moon", "moon+fphl", "moon+fedheal:tau=1"])
def test_the_buffer_is_the_clients_raw_local_model(method: str) -> None:
    """What a mask leaves out of the average is in it all the same."""
    fed = build_federation(quick(method=method, model="tiny_data:feature_model", lr=0.5), load(), torch.device("cpu"))
    state = initial_state(fed)
    for _ in range(3):
        before, replies = state.model, {}

        def train(model, shared, tasks, replies=replies):
            for task in tasks:
                done = serial.train_client(fed.local_training, model, shared, task)
                replies[task.client] = done.reply
                yield done

        state, _ = run_round(fed, state, SimpleNamespace(train=train), evaluate=False)
        for client, slot in state.terms[0].slots.items():
            assert torch.equal(slot["params"] - before.params, replies[client].delta)
            assert torch.equal(slot["buffers"], replies[client].buffers)
            assert not torch.equal(slot["params"], state.model.params)


def test_the_first_round_is_fedavgs_and_the_second_is_not() -> None:
    ends = {}
    for method in ("fedavg", "moon"):
        fed = build_federation(quick(method=method, model="tiny_data:feature_model"), load(), torch.device("cpu"))
        state, ends[method] = initial_state(fed), []
        for _ in range(2):
            state, _ = run_round(fed, state, SerialEngine(fed.local_training), evaluate=False)
            ends[method].append(state.model.params)
    assert torch.equal(ends["fedavg"][0], ends["moon"][0])
    assert not torch.equal(ends["fedavg"][1], ends["moon"][1])
