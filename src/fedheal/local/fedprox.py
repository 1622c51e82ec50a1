"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

A client minimises `CE + mu/2 |w - W|^2` over all trained parameters; `mu (w - W)` is added to the gradients.
"""

from dataclasses import dataclass

from fedheal.core.layout import Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.term import Context, Term, add_proximal_gradient

FEDPROX_MU = Parameter(
    "mu", 0.01, "pull towards the received model", "MarsFL and RethinkFL, nominal; Li et al. 2020 tune 0.001 to 1", ge=0
)


@declare_parameters(FEDPROX_MU)
@dataclass(frozen=True)
class FedProx(Term):
    """FedProx. `mu=0` is FedAvg."""

    mu: float = FEDPROX_MU.default

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        ctx.scratch["anchor"] = ctx.views(ctx.received.params)
        return start

    def grad(self, ctx: Context) -> None:
        add_proximal_gradient(ctx, ctx.scratch["anchor"], self.mu)
