"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

A client minimises `CE + mu/2 |w - W|^2` over all trained parameters. Its gradient `mu (w - W)` is added to the gradients,
which is the same as adding the term to the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedheal.core.layout import Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.term import Context, Term

FEDPROX_MU = Parameter(
    "mu",
    description="pull towards the received model",
    source="MarsFL and RethinkFL, nominal; Li et al. 2020 tune 0.001 to 1",
    default=0.01,
    ge=0,
)


@declare_parameters(FEDPROX_MU)
@dataclass(frozen=True)
class Proximal(Term):
    """FedProx. `mu=0` is FedAvg."""

    mu: float = FEDPROX_MU.default

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        ctx.scratch["anchor"] = ctx.views(ctx.received.params)
        return start

    def grad(self, ctx: Context) -> None:
        pull(ctx, ctx.scratch["anchor"], self.mu)


def pull(ctx: Context, anchor: list[torch.Tensor], strength: float) -> None:
    """Add `strength * (w - anchor)` to the gradients."""
    moved = [(p, p.grad, at) for p, at in zip(ctx.params, anchor, strict=True) if p.grad is not None]
    if moved:
        params, grads, anchors = (list(column) for column in zip(*moved, strict=True))
        with torch.no_grad():
            torch._foreach_add_(grads, torch._foreach_sub(params, anchors), alpha=strength)


def push(ctx: Context, by: list[torch.Tensor], strength: float = 1.0) -> None:
    """Add `strength * by` to the gradients."""
    moved = [(p.grad, b) for p, b in zip(ctx.params, by, strict=True) if p.grad is not None]
    if moved:
        grads, added = (list(column) for column in zip(*moved, strict=True))
        torch._foreach_add_(grads, added, alpha=strength)
