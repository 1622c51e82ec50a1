"""FedProc: Mu et al., "FedProc: Prototypical Contrastive Federated Learning on Non-IID Data", FGCS 2023.

The loss is `alpha_t L_con + (1 - alpha_t) CE`, `alpha_t = 1 - t/(T-1)`, with `L_con` the cross-entropy of the cosine
similarities to the global prototypes. Without prototypes (the first round) the loss would be 0: `first_round_ce` trains on CE.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedheal.core.layout import Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.prototypes import PROTO_WEIGHTS, Prototypes, compare_cosine, get_known_classes
from fedheal.local.term import Batch, Context

FEDPROC_TEMPERATURE = Parameter(
    "temperature", 1.0, "temperature of the contrastive loss", "MarsFL, which has none", gt=0
)
FIRST_ROUND_CE = Parameter(
    "first_round_ce",
    True,
    "train on cross-entropy until there are prototypes",
    "ours: published, nothing is learnt then",
)


@declare_parameters(FEDPROC_TEMPERATURE, FIRST_ROUND_CE, PROTO_WEIGHTS)
@dataclass(frozen=True)
class FedProc(Prototypes):
    """Mu et al. 2023: prototypical contrast that hands over to cross-entropy."""

    temperature: float = FEDPROC_TEMPERATURE.default
    first_round_ce: bool = FIRST_ROUND_CE.default

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        alpha = 1 - (ctx.round - 1) / max(ctx.rounds - 1, 1)
        ctx.scratch["alpha"] = torch.full((), alpha, device=ctx.received.params.device)
        return super().prepare(ctx, start)

    def prototype_loss(self, batch: Batch, z: Tensor, ctx: Context) -> Tensor | None:
        alpha, known = ctx.scratch["alpha"], get_known_classes(ctx)
        if known is None:
            return None if self.first_round_ce else -alpha * batch.ce
        has_prototype = known[batch.y]
        similarity = compare_cosine(z, ctx.scratch["prototypes"]) / self.temperature
        similarity = similarity.masked_fill(~known, -torch.inf)
        similarity = similarity.where(has_prototype[:, None], 0.0)  # keeps samples without a prototype out of gradients
        contrast = functional.cross_entropy(similarity, batch.y, reduction="none")
        loss: Tensor = alpha * (contrast.where(has_prototype, 0.0).sum() / len(z) - batch.ce)
        return loss
