"""FedLESAM: sharpness-aware minimisation whose perturbation comes from the last steps of the global model.

Fan et al., "Locally Estimated Global Perturbations are Better than Local Perturbations for Federated Sharpness-aware
Minimization", ICML 2024.

The perturbation of a round is `e = rho (W_old - W) / |W_old - W|`: W is the model that the client received, and W_old the one
that it received when it last took part. Each step uses the gradient at `w + e`: one forward and one backward pass.

Since e is the same in all steps of a round, the client trains `v = w + e` and sends `v - e`. Deviation: weight decay then acts
on v, which adds `weight_decay * e` to each gradient. In a client's first round there is no perturbation.

The released code differs from the paper. There e comes from the server's last step, also for a client that was absent.
It is a flat vector, but the code indexes it by tensor. So every tensor is moved by one number.
"""

from dataclasses import dataclass, replace

from fedheal.core.layout import Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.nearby_loss import TINY, compute_norm
from fedheal.local.term import Arrays, Context, Term

FEDLESAM_RHO = Parameter(
    "rho", 0.1, "length of the perturbation", "Fan et al. 2024, released code; its example has 0.5", ge=0
)


@declare_parameters(FEDLESAM_RHO)
@dataclass(frozen=True)
class FedLESAM(Term):
    """Fan et al. 2024: steps by the gradient at a point where the global model came from. `rho=0` is FedAvg."""

    rho: float = FEDLESAM_RHO.default

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        if not self.rho or "received" not in ctx.slot:
            return start
        way = ctx.slot["received"].to(start.params) - ctx.received.params
        ctx.scratch["perturbation"] = way * (self.rho / (compute_norm([way]) + TINY)).to(way.dtype)
        return replace(start, params=start.params + ctx.scratch["perturbation"])

    def upload(self, ctx: Context, local: Packed) -> Packed:
        if "perturbation" not in ctx.scratch:
            return local
        return replace(local, params=local.params - ctx.scratch["perturbation"])

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        return ({"received": ctx.received.params.clone()} if self.rho else ctx.slot), {}
