"""FCCL+: Huang, Ye, Shi and Du, "Generalizable Heterogeneous Federated Cross-Correlation and Instance ...", TPAMI 2023.

On public images, besides `cross_correlation`: `similarity KL(t || s)`. A row of s is the softmax of an image's cosines
to the other images of its batch, divided by `similarity_temperature`. t is the same for the clients' mean cosines. On
private images: `CE + inter T^2 sum_{j != y} q_g,j log(q_g,j / q_j)`. q and q_g are the probabilities at temperature T
of the model in training and of the received model. y is the label. The released code does not renormalise the other
classes either.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedheal.core.layout import Layout, Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.cross_correlation import PUBLIC_PARAMETERS, CrossCorrelation
from fedheal.local.fccl import FCCL_INTER
from fedheal.local.term import Arrays, Batch, Context

TEMPERATURE = Parameter(
    "temperature", 3.0, "temperature of the non-target distillation", "released code, digits; others: 1 or 3", gt=0
)
SIMILARITY = Parameter(
    "similarity", 3.0, "weight of the instance similarity", "released code, digits; Office-Home: 1", ge=0
)
SIMILARITY_TEMPERATURE = Parameter(
    "similarity_temperature", 0.02, "temperature of the instance similarity", "released code", gt=0
)


@declare_parameters(FCCL_INTER, TEMPERATURE, SIMILARITY, SIMILARITY_TEMPERATURE, *PUBLIC_PARAMETERS)
@dataclass(frozen=True)
class FCCLPlus(CrossCorrelation):
    """Huang et al. 2023: FCCL with instance similarity on public images, and non-target distillation of the global model."""

    inter: float = FCCL_INTER.default
    temperature: float = TEMPERATURE.default
    similarity: float = SIMILARITY.default
    similarity_temperature: float = SIMILARITY_TEMPERATURE.default
    features: ClassVar[bool] = True
    sends: ClassVar[tuple[str, ...]] = ("logits", "similarity")

    @property
    def columns(self) -> int:
        """The number of images that an image is compared with, itself included."""
        return min(self.public_batch, self.public_images)

    def compute_outputs(self, net: nn.Module, x: Tensor) -> dict[str, Tensor]:
        """Return logits, and cosines `[images, columns]` to the images of the batch, padded with zeros."""
        features = net.features(x)  # type: ignore[operator]
        unit = functional.normalize(features.to(torch.float32), dim=1)
        cosines = functional.pad(unit @ unit.T, (0, self.columns - len(x)))
        return {"logits": net.head(features).to(torch.float32), "similarity": cosines}  # type: ignore[operator]

    def public_loss(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
        own, mean = outputs["similarity"], targets["similarity"]
        return super().public_loss(outputs, targets) + self.similarity * compare_similarity(
            own[:, : len(own)], mean[:, : len(own)], self.similarity_temperature
        )

    def check_message(self, message: Arrays, shared: Arrays, layout: Layout) -> None:
        super().check_message(message, shared, layout)
        if not self.public_lr:
            return
        shape, images = tuple(message["similarity"].shape), len(message["logits"])
        if shape != (images, self.columns):
            raise ValueError(f"similarity must have the shape {(images, self.columns)}, got {shape}")

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        if self.inter:
            ctx.scratch["inter"] = ctx.net("inter", ctx.received)
        return super().prepare(ctx, start)

    def loss(self, batch: Batch, ctx: Context) -> Tensor | None:
        if not self.inter:
            return None
        with torch.no_grad():
            teacher = ctx.scratch["inter"](batch.x).to(batch.logits.dtype)
        return self.inter * distil_non_targets(batch.logits, teacher, batch.y, self.temperature)


def compare_similarity(cosines: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Return `KL(target || own)` of each image's similarities to the other images, the mean over the images."""
    itself = torch.eye(len(cosines), dtype=torch.bool, device=cosines.device)
    own, wanted = (
        (values / temperature).masked_fill(itself, -torch.inf).log_softmax(dim=1).masked_fill(itself, 0.0)
        for values in (cosines, target)
    )
    return (wanted.exp() * (wanted - own)).sum() / len(cosines)


def distil_non_targets(logits: Tensor, teacher: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return `T^2 sum_{j != y} q_j log(q_j / p_j)`, the mean over the batch; p: the model's, q: the teacher's probabilities."""
    student, target = (functional.log_softmax(values / temperature, dim=1) for values in (logits, teacher))
    terms = (target.exp() * (target - student)).scatter(1, labels[:, None], 0.0)
    return temperature**2 * terms.sum() / len(logits)
