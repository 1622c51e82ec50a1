"""MOON: Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021.

`CE + mu * l_con` with `l_con = -log(e^{cos(z, z_g)/T} / (e^{cos(z, z_g)/T} + e^{cos(z, z_p)/T}))`. The representation z
of a sample should be near that of the received global model, and far from that of the client's own previous model. The
previous model is the one at the end of the client's last participation, before aggregation. Gradients flow through z
only. Both reference models are frozen and in evaluation mode. There is no contrastive term until a previous model
exists. The representation is the pooled feature vector (no projection head).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedheal.core.layout import Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.term import Arrays, Batch, Context, Term

MOON_MU = Parameter(
    "mu", 5.0, "weight of the contrastive loss", "Li, He and Song 2021, CIFAR-10 example; RethinkFL; MarsFL: 1", ge=0
)
MOON_TEMPERATURE = Parameter(
    "temperature", 0.5, "temperature of the contrastive loss", "Li, He and Song 2021; RethinkFL, MarsFL", gt=0
)


@declare_parameters(MOON_MU, MOON_TEMPERATURE)
@dataclass(frozen=True)
class Moon(Term):
    """Li, He and Song 2021: features near the global net's, far from the client's previous net's. `mu=0` is FedAvg."""

    mu: float = MOON_MU.default
    temperature: float = MOON_TEMPERATURE.default
    features: ClassVar[bool] = True

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        if self.mu and "params" in ctx.slot:
            previous = Packed(ctx.slot["params"], ctx.slot["buffers"], ctx.received.counters)
            ctx.scratch["global"] = ctx.net("global", ctx.received)
            ctx.scratch["previous"] = ctx.net("previous", previous)
        return start

    def loss(self, batch: Batch, ctx: Context) -> Tensor | None:
        if "previous" not in ctx.scratch:
            return None
        z = batch.features
        assert z is not None
        with torch.no_grad():
            references = [ctx.scratch[name].features(batch.x) for name in ("global", "previous")]
        similarity = torch.stack([functional.cosine_similarity(z, reference) for reference in references], dim=1)
        positive = torch.zeros(len(z), dtype=torch.int64, device=z.device)  # the global net is the first
        return self.mu * functional.cross_entropy(similarity / self.temperature, positive)

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        return {"params": local.params, "buffers": local.buffers}, {}
