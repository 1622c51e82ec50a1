"""The clients' part of FedISM; the server's is in `aggregate/whole/fedism.py`.

Wu et al., "From Optimization to Generalization: Fair Federated Learning against Quality Shift via Inter-Client Sharpness
Matching", IJCAI 2024.

Clients train by GSAM (Zhuang et al., ICLR 2022): as FedSAM with the gradient `g'` at the worst point nearby, less `alpha` times
the part of the gradient `g` at w that is orthogonal to it. And they measure the sharpness of the received model W on their own
training data, `F(W + rho G / |G|) - F(W)`, with G the gradient of F at W. Losses are in evaluation mode and without
augmentation; G is in training mode (the released code: evaluation mode).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fedheal.core.layout import Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.fedsam import FedSAM
from fedheal.local.nearby_loss import TINY, compute_climbed_gradients, compute_norm
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
        length = compute_norm(second) + TINY
        inner = torch.stack([(g.conj() * h).sum().real.float() for g, h in zip(first, second, strict=True)]).sum()
        along = inner / length**2  # of the first gradient, in units of the second
        for g, h in zip(first, second, strict=True):
            g.copy_(h - self.alpha * (g - along.to(h.real.dtype) * h))

    def metrics(self, ctx: Context, local: Packed) -> Mapping[str, float]:
        if not self.rho:
            return {"sharpness": 0.0}
        way = ctx.gradient(ctx.received)
        step = (self.rho / (compute_norm([way]) + TINY)).to(way.dtype)
        climbed = replace(ctx.received, params=ctx.received.params + step * way)
        return {"sharpness": ctx.evaluate(climbed)[0] - ctx.evaluate(ctx.received)[0]}
