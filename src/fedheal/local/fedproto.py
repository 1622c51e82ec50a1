"""FedProto: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022.

The loss is `CE + lam * MSE(z, c_y)`, the mean over batch and feature dimensions. Deviation: here the model is aggregated too,
and its classifier is used.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedheal.local.prototypes import Prototypes, get_known_classes
from fedheal.local.term import Batch, Context


@dataclass(frozen=True)
class FedProto(Prototypes):
    """FedProto with a shared model: features are pulled to the global prototypes."""

    lam: float = 1.0

    def prototype_loss(self, batch: Batch, z: Tensor, ctx: Context) -> Tensor | None:
        known = get_known_classes(ctx)
        if known is None or self.lam == 0:
            return None
        gap: Tensor = (z - ctx.scratch["prototypes"][batch.y]) * known[batch.y][:, None]
        return self.lam * (gap**2).mean()
