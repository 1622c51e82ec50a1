"""FedProx by hand: the pull towards the received model."""

from __future__ import annotations

import pytest
import torch

from fedheal.local.fedprox import FedProx
from fedheal.local.term import add_proximal_gradient
from local.quadratic import Point, make_gradient, make_packed, make_term_context, run_client, vector


def test_two_steps_by_hand() -> None:
    """f = 1/2 (w - 3)^2 from W = 1 with mu = 0.5 and lr 0.1: the gradient is (w - 3) + 0.5 (w - 1).

    Step 1: -2 + 0 -> w = 1.2. Step 2: -1.8 + 0.1 = -1.7 -> w = 1.37.
    """
    local, slot, message = run_client(FedProx(0.5), make_packed(1.0), make_gradient(vector(3.0)), steps=2)
    assert local.params.tolist() == pytest.approx([1.37], rel=1e-12)
    assert (slot, message) == ({}, {})


def test_the_pull_goes_into_the_momentum() -> None:
    """Momentum 0.5: v1 = -2, w = 1.2; v2 = -1 + (-1.8 + 0.1) = -2.7, w = 1.47."""
    local, _, _ = run_client(FedProx(0.5), make_packed(1.0), make_gradient(vector(3.0)), steps=2, momentum=0.5)
    assert local.params.tolist() == pytest.approx([1.47], rel=1e-12)


def test_it_is_the_gradient_of_half_mu_times_the_squared_distance() -> None:
    """At w = (1, -2), W = (0.5, 1), mu = 3: mu (w - W) = (1.5, -9), on top of what the loss gave."""
    module = Point(2)
    ctx = make_term_context(FedProx(3.0), make_packed(0.5, 1.0), module=module)
    FedProx(3.0).prepare(ctx, ctx.received)
    with torch.no_grad():
        module.w.copy_(vector(1.0, -2.0))
    module.w.grad = vector(10.0, 20.0)
    FedProx(3.0).grad(ctx)
    assert module.w.grad.tolist() == [11.5, 11.0]

    w = vector(1.0, -2.0).requires_grad_()
    (1.5 * (w - vector(0.5, 1.0)).square().sum()).backward()
    assert w.grad.tolist() == [1.5, -9.0]


def test_the_limit_is_between_the_clients_optimum_and_the_received_model() -> None:
    """(w - 3) + mu (w - 1) = 0 at w = (3 + mu) / (1 + mu): 2 for mu = 1."""
    local, _, _ = run_client(FedProx(1.0), make_packed(1.0), make_gradient(vector(3.0)), steps=300)
    assert local.params.tolist() == pytest.approx([2.0], abs=1e-9)


def test_the_anchor_does_not_move_with_the_model() -> None:
    """The received model is neither changed nor shared with the module in training."""
    received = make_packed(1.0)
    run_client(FedProx(0.5), received, make_gradient(vector(3.0)), steps=4)
    assert received.params.tolist() == [1.0]


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    module = Point(2)
    ctx = make_term_context(FedProx(1.0), make_packed(5.0, 5.0), module=module)
    add_proximal_gradient(ctx, ctx.views(ctx.received.params), 1.0)
    assert module.w.grad is None
