"""The clients' part of FedISM; the server's is in `aggregate/whole/fedism.py`.

Wu et al., "From Optimization to Generalization: Fair Federated Learning against Quality Shift via Inter-Client Sharpness
Matching", IJCAI 2024.

Clients train by GSAM (Zhuang et al., ICLR 2022). Like FedSAM it uses the gradient `g'` at the worst point nearby, less
`alpha` times the part of the gradient `g` at w that is orthogonal to `g'`. Clients also measure the sharpness of the
received model W on their own training data, `F(W + rho G / |G|) - F(W)`, with G the gradient of F at W. Losses are in
evaluation mode and without augmentation; G is in training mode (the released code: evaluation mode).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedheal.core.layout import Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.fedsam import FedSAM
from fedheal.local.nearby_loss import TINY, compute_climbed_gradients, compute_norm, widen
from fedheal.local.term import Context

FEDISM_RHO = Parameter(
    "rho", 0.05, "radius in which the loss shall stay low, and be equally sharp", "Wu et al. 2024, released code", ge=0
)
FEDISM_ALPHA = Parameter(
    "alpha", 0.1, "how much of the orthogonal part of the gradient is taken away", "Wu et al. 2024, released code", ge=0
)


@declare_parameters(FEDISM_RHO, FEDISM_ALPHA)
@dataclass(frozen=True)
class FedISM(FedSAM):
    """GSAM, and the sharpness of the received model."""

    rho: float = FEDISM_RHO.default
    alpha: float = FEDISM_ALPHA.default

    def grad(self, ctx: Context) -> None:
        if not self.rho:
            return
        first, second = compute_climbed_gradients(ctx, self.rho)
        torch._foreach_copy_(first, subtract_orthogonal_part(second, first, self.alpha))

    def metrics(self, ctx: Context, local: Packed) -> Mapping[str, float]:
        if not self.rho:
            return {"sharpness": 0.0}
        way = ctx.gradient(ctx.received)
        step = (self.rho / (compute_norm([way]) + TINY)).to(way.dtype)
        climbed = replace(ctx.received, params=ctx.received.params + step * way)
        return {"sharpness": ctx.evaluate(climbed)[0] - ctx.evaluate(ctx.received)[0]}


def subtract_orthogonal_part(climbed: Sequence[Tensor], gradients: Sequence[Tensor], alpha: float) -> list[Tensor]:
    """Return the climbed gradients, less `alpha` times the part of the others that is orthogonal to them."""
    pairs = list(zip(climbed, gradients, strict=True))
    inner = torch.stack([widen((g.conj() * h).sum().real) for h, g in pairs]).sum()
    along = inner / (compute_norm(climbed) + TINY) ** 2  # of the gradients, in units of the climbed ones
    return [h - alpha * (g - along.to(h.real.dtype) * h) for h, g in pairs]
