"""FedProto: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022.

The loss is `CE + lam * MSE(z, c_y)`, the mean over batch and feature dimensions. Deviation: here the model is aggregated too,
and its classifier is used.
"""

from dataclasses import dataclass

from torch import Tensor

from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.prototypes import PROTO_WEIGHTS, Prototypes, get_known_classes
from fedheal.local.term import Batch, Context

FEDPROTO_LAM = Parameter(
    "lam", 1.0, "pull towards the prototypes", "Tan et al. 2022 for MNIST and FEMNIST; CIFAR-10: 0.1; MarsFL: 2", ge=0
)


@declare_parameters(FEDPROTO_LAM, PROTO_WEIGHTS)
@dataclass(frozen=True)
class FedProto(Prototypes):
    """Tan et al. 2022, with a shared model: features pulled to the global class prototypes."""

    lam: float = FEDPROTO_LAM.default

    def prototype_loss(self, batch: Batch, z: Tensor, ctx: Context) -> Tensor | None:
        known = get_known_classes(ctx)
        if known is None or self.lam == 0:
            return None
        gap: Tensor = (z - ctx.scratch["prototypes"][batch.y]) * known[batch.y][:, None]
        return self.lam * (gap**2).mean()
