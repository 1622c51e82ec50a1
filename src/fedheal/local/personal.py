"""Clients that keep something of their own: Ditto's personal model, FedBN's normalisation layers.

Ditto (Li et al., ICML 2021): beside the global model each client trains its own v on `F_m(v) + lam/2 |v - W|^2`, W the received
model. The FedHEAL paper judges the average of the personal models: reading (a), `feedback=False`, trains the global model by
FedAvg as usual and judges `V = sum P_m v_m`; reading (b), `feedback=True`, makes V the global model. The sum is over all
clients that have a personal model, each with the weight it last had; where a server has only those just sent, over them.

FedBN (Li et al., ICLR 2021): normalisation layers, chosen by their type and not by name, stay with the client. For a shared
table a domain is judged with the mean of its clients' layers: the row is a personalised one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from fedheal.core.arrays import Floats, normalised
from fedheal.core.layout import Layout, Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.client_weights import PREFIX, brought, remembered
from fedheal.local.term import Arrays, Context, ServerContext, Term

DITTO_LAM = Parameter(
    "lam",
    description="pull of the personal model towards the received one",
    source="Li et al. 2021, released script",
    default=1.0,
    ge=0,
)
DITTO_FEEDBACK = Parameter(
    "feedback",
    description="broadcast the personal models' average",
    source="ours: W stays FedAvg's; the FedHEAL paper leaves it open",
    default=False,
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
        own = ctx.fit(start, self.lam)
        kept = {"params": own.params, "buffers": own.buffers, "counters": own.counters}
        return kept, kept

    def absorb(
        self, before: Packed, aggregated: Packed, messages: Sequence[Arrays], shared: Arrays, ctx: ServerContext
    ) -> tuple[Packed, Arrays]:
        if not messages:
            return aggregated, shared
        models = ctx.slots or dict(zip(ctx.updates.clients, messages, strict=True))
        last = remembered(shared) | brought(ctx)
        clients = sorted(models)
        u = normalised(np.array([float(last[f"{PREFIX}{client}"]) for client in clients]))
        params, buffers = (_mean([models[client][name] for client in clients], u) for name in ("params", "buffers"))
        if self.feedback:
            counters = torch.stack([models[client]["counters"] for client in clients]).amax(dim=0)
            return Packed(params, buffers, counters), last
        return aggregated, {"params": params, "buffers": buffers, **last}

    def evaluated(self, model: Packed, shared: Arrays, slots: Mapping[str, Arrays]) -> Packed:
        if self.feedback or "params" not in shared:
            return model
        return replace(model, params=shared["params"].to(model.params), buffers=shared["buffers"].to(model.buffers))


COLUMNS = 1 << 18  # of a sum over clients at a time: all of them as float64 at once may be more than there is room for


def _mean(vectors: Sequence[torch.Tensor], u: Floats) -> torch.Tensor:
    weights = torch.from_numpy(u).to(vectors[0].device)[:, None]
    made = torch.empty_like(vectors[0])
    for start in range(0, len(made), COLUMNS):
        columns = slice(start, start + COLUMNS)
        part = torch.stack([vector[columns] for vector in vectors])
        made[columns] = (weights * part.to(torch.float64)).sum(dim=0).to(made.dtype)
    return made


@declare_parameters()
@dataclass(frozen=True)
class LocalNorm(Term):
    """Li et al. 2021: normalisation layers stay with the client (a personalised row)."""

    personalised: bool = True

    def local_bytes(self, module: nn.Module, layout: Layout) -> int:
        own = _own(layout.pack(module.state_dict()), norm_masks(module, layout))
        return sum(vector.nbytes for vector in own.values())

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        return _with_own(start, ctx.slot, norm_masks(ctx.module, ctx.layout)) if ctx.slot else start

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        masks = norm_masks(ctx.module, ctx.layout)
        # Places rather than masks, which would be as long as the model.
        return _own(local, masks) | {f"where_{name}": mask.nonzero().flatten() for name, mask in masks.items()}, {}

    def upload(self, ctx: Context, local: Packed) -> Packed:
        masks = norm_masks(ctx.module, ctx.layout)
        return _with_own(local, _own(ctx.received, masks), masks)

    def evaluated(self, model: Packed, shared: Arrays, slots: Mapping[str, Arrays]) -> Packed:
        held = [slot for slot in slots.values() if slot]
        if not held:
            return model
        stacked = {name: torch.stack([slot[name] for slot in held]) for name in VECTORS}
        mean = {name: stacked[name].mean(dim=0) for name in ("params", "buffers")}
        where = {name: held[0][f"where_{name}"] for name in VECTORS}
        return _with_own(model, mean | {"counters": stacked["counters"].amax(dim=0)}, where)


VECTORS = ("params", "buffers", "counters")


def norm_masks(module: nn.Module, layout: Layout) -> dict[str, torch.Tensor]:
    """Which entries of a model's three vectors belong to normalisation layers."""
    kinds = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    prefixes = [f"{name}." for name, part in module.named_modules() if isinstance(part, kinds)]
    sizes = layout.sizes()
    device = next(module.parameters()).device
    masks = {name: torch.zeros(getattr(sizes, name), dtype=torch.bool, device=device) for name in VECTORS}
    for entry in layout.entries:
        if any(entry.name.startswith(prefix) for prefix in prefixes):
            masks[f"{entry.kind}s"][entry.start : entry.stop] = True
    return masks


def _own(model: Packed, masks: Arrays) -> dict[str, torch.Tensor]:
    return {name: getattr(model, name)[mask] for name, mask in masks.items()}


def _with_own(model: Packed, own: Arrays, where: Arrays) -> Packed:
    """The model with these values at these places, which may be masks."""
    changed = {name: getattr(model, name).clone() for name in VECTORS}
    for name, places in where.items():
        changed[name][places] = own[name].to(changed[name])
    return replace(model, **changed)
