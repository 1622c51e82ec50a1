"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

A client minimises `CE + mu/2 |w - W|^2` over all trained parameters. Its gradient `mu (w - W)` is added to the gradients,
which is the same as adding the term to the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedheal.core.layout import Packed
from fedheal.local.gradients import add_proximal_gradient
from fedheal.local.term import Context, Term


@dataclass(frozen=True)
class FedProx(Term):
    """FedProx. `mu=0` is FedAvg."""

    mu: float = 0.01

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        ctx.scratch["anchor"] = ctx.views(ctx.received.params)
        return start

    def grad(self, ctx: Context) -> None:
        add_proximal_gradient(ctx, ctx.scratch["anchor"], self.mu)
