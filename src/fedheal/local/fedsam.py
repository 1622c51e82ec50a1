"""FedSAM: clients look for flat minima, by sharpness-aware minimisation (Foret et al., ICLR 2021).

Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022; Caldarola, Caputo and Ciccone,
"Improving Generalization in Federated Learning by Seeking Flat Minima", ECCV 2022. Each step uses the gradient of its batch at
`w + rho g / |g|`, with `g` the gradient at w: two forward and two backward passes.

The second gradient is that of the cross-entropy alone and replaces the first. If a method has several terms, put this
one first. Then what later terms add to the gradients counts. The losses of other terms do not count. Deviation: running
statistics follow the first pass only, as SAM's authors advise. The released code of both papers updates them in both
passes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.nearby_loss import compute_climbed_gradients, keep_batch
from fedheal.local.term import Batch, Context, Term

FEDSAM_RHO = Parameter(
    "rho", 0.1, "radius in which the loss shall stay low", "Caldarola et al. 2022, CIFAR-10; Fan et al. 2024", ge=0
)


@declare_parameters(FEDSAM_RHO)
@dataclass(frozen=True)
class FedSAM(Term):
    """Qu et al. 2022, Caldarola et al. 2022: steps by the gradient at the worst point nearby. `rho=0` is FedAvg."""

    rho: float = FEDSAM_RHO.default

    def loss(self, batch: Batch, ctx: Context) -> Tensor | None:
        if self.rho:
            keep_batch(batch, ctx)
        return None

    def grad(self, ctx: Context) -> None:
        if self.rho:
            torch._foreach_copy_(*compute_climbed_gradients(ctx, self.rho))
