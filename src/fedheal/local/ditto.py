"""Ditto: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.

Besides the global model each client trains its own v on `F_m(v) + lam/2 |v - W|^2`, W the received model. The FedHEAL
paper evaluates the average of the personal models, `V = sum P_m v_m`, which has two readings. With `feedback=False` the
global model is trained by FedAvg as usual, and V is only evaluated. With `feedback=True` V becomes the global model.
The sum is over all clients that have a personal model, each with the weight it last had. A server that only has this
round's personal models sums over these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedheal.core.arrays import Floats, normalise_weights
from fedheal.core.layout import VARIANCE, Layout, Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.client_weights import PREFIX, update_weights
from fedheal.local.term import Arrays, Context, ServerContext, Term, check_vector

COLUMNS = 1 << 18  # entries summed at a time: all clients' models as float64 at once may not fit into memory
DITTO_LAM = Parameter(
    "lam", 1.0, "pull of the personal model towards the received one", "Li et al. 2021, released script", ge=0
)
DITTO_FEEDBACK = Parameter(
    "feedback",
    False,
    "broadcast the personal models' average",
    "ours: W stays FedAvg's; the FedHEAL paper leaves it open",
)


@declare_parameters(DITTO_LAM, DITTO_FEEDBACK)
@dataclass(frozen=True)
class Ditto(Term):
    """Li et al. 2021: a personal model per client; their average is evaluated (feedback: and broadcast)."""

    lam: float = DITTO_LAM.default
    feedback: bool = DITTO_FEEDBACK.default

    @property
    def needs_plain_server(self) -> str:
        if not self.feedback:
            return ""
        return "ditto:feedback=true makes the personal models' average the global model, whatever the step"

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        slot = ctx.slot
        start = Packed(slot["params"], slot["buffers"], slot["counters"]) if "params" in slot else ctx.received
        personal = ctx.fit(start, self.lam)
        vectors = {"params": personal.params, "buffers": personal.buffers, "counters": personal.counters}
        return vectors, {name: vectors[name] for name in ("params", "buffers")}

    def check_message(self, message: Arrays, shared: Arrays, layout: Layout) -> None:
        sizes = layout.sizes()
        check_vector(message, "params", sizes.params)
        check_vector(message, "buffers", sizes.buffers)
        for entry in layout.entries:
            is_variance = entry.kind == "buffer" and entry.name.endswith(VARIANCE)
            if is_variance and (message["buffers"][entry.start : entry.stop] < 0).any():
                raise ValueError(f"its '{entry.name}' holds a negative variance")

    def absorb(
        self, before: Packed, aggregated: Packed, messages: Sequence[Arrays], shared: Arrays, ctx: ServerContext
    ) -> tuple[Packed, Arrays]:
        if not messages:
            return aggregated, shared
        models = ctx.slots or dict(zip(ctx.updates.clients, messages, strict=True))
        weights = update_weights(shared, ctx)
        clients = sorted(models)
        u = normalise_weights(np.array([float(weights[f"{PREFIX}{client}"]) for client in clients]))
        params, buffers = (_average([models[client][name] for client in clients], u) for name in ("params", "buffers"))
        if self.feedback:
            return Packed(params.to(before.params), buffers.to(before.buffers), aggregated.counters), weights
        return aggregated, {"params": params, "buffers": buffers, **weights}

    def evaluated(self, model: Packed, shared: Arrays, slots: Mapping[str, Arrays]) -> Packed:
        if self.feedback or "params" not in shared:
            return model
        return replace(model, params=shared["params"].to(model.params), buffers=shared["buffers"].to(model.buffers))


def _average(vectors: Sequence[torch.Tensor], u: Floats) -> torch.Tensor:
    """Return the mean with weights `u`, summed in float64."""
    weights = torch.from_numpy(u).to(vectors[0].device)[:, None]
    mean = torch.empty_like(vectors[0])
    for start in range(0, len(mean), COLUMNS):
        columns = slice(start, start + COLUMNS)
        part = torch.stack([vector[columns] for vector in vectors])
        mean[columns] = (weights * part.to(torch.float64)).sum(dim=0).to(mean.dtype)
    return mean
