"""FCCL: Huang, Ye and Du, "Learn from Others and Be Yourself in Heterogeneous Federated Learning", CVPR 2022.

Learn from others: `cross_correlation`. Be yourself: `CE + inter KL(q_g || q) + intra KL(q_p || q)`. q are the class
probabilities of the model in training, and q_g those of the received model (inter-domain). q_p are those of a model
that the client trained on its own data alone, before its first round (intra-domain). Both teachers are frozen and in
evaluation mode.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedheal.core.layout import Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.cross_correlation import PUBLIC_PARAMETERS, CrossCorrelation
from fedheal.local.term import Arrays, Batch, Context

FCCL_INTER = Parameter("inter", 1.0, "weight of the distillation from the received model", "released code", ge=0)
FCCL_INTRA = Parameter("intra", 1.0, "weight of the distillation from the client's own model", "released code", ge=0)
FCCL_PRETRAIN = Parameter(
    "pretrain",
    5,
    "how many rounds of local training make the client's own model",
    "ours; released code: 50 epochs",
    ge=1,
)


@declare_parameters(FCCL_INTER, FCCL_INTRA, FCCL_PRETRAIN, *PUBLIC_PARAMETERS)
@dataclass(frozen=True)
class FCCL(CrossCorrelation):
    """Huang, Ye and Du 2022: correlate logits on public images with the clients' mean; distil global and own model."""

    inter: float = FCCL_INTER.default
    intra: float = FCCL_INTRA.default
    pretrain: int = FCCL_PRETRAIN.default

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        if self.inter:
            ctx.scratch["inter"] = ctx.net("inter", ctx.received)
        if self.intra:
            ctx.scratch["intra"] = ctx.net("intra", self._get_own_model(ctx))
        return super().prepare(ctx, start)

    def _get_own_model(self, ctx: Context) -> Packed:
        """Return the client's own model; train it if this is the client's first round."""
        if "params" in ctx.slot:
            return Packed(ctx.slot["params"], ctx.slot["buffers"], ctx.received.counters)
        model = ctx.received
        for _ in range(self.pretrain):
            model = ctx.fit(model, 0.0)
        return model

    def loss(self, batch: Batch, ctx: Context) -> Tensor | None:
        total = None
        for name, weight in (("inter", self.inter), ("intra", self.intra)):
            if weight:
                with torch.no_grad():
                    teacher = ctx.scratch[name](batch.x).to(batch.logits.dtype)
                distilled = weight * distil(batch.logits, teacher)
                total = distilled if total is None else total + distilled
        return total

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        slot, message = super().finish(ctx, local)
        if self.intra and "params" not in slot:
            own = ctx.layout.pack(ctx.scratch["intra"].state_dict())
            slot = {"params": own.params, "buffers": own.buffers}
        return slot, message


def distil(logits: Tensor, teacher: Tensor) -> Tensor:
    """Return `KL(teacher || student)` of class probabilities, the mean over the batch."""
    student, target = functional.log_softmax(logits, dim=1), functional.log_softmax(teacher, dim=1)
    return functional.kl_div(student, target, reduction="batchmean", log_target=True)
