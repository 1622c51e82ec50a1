"""FedBN: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.

Normalisation layers, chosen by their type and not by name, stay with the client. For a shared table a domain is evaluated with
the mean of its clients' layers, so the row is a personalised one. The other layers are averaged by examples; the authors'
code, whose clients all have as many, takes 1/N.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from fedheal.core.layout import Layout, Packed
from fedheal.local.term import Arrays, Context, Term

NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
VECTORS = ("params", "buffers", "counters")


@dataclass(frozen=True)
class FedBN(Term):
    """Li et al. 2021: normalisation layers stay with the client (a personalised row)."""

    personalised: ClassVar[bool] = True

    def local_bytes(self, module: nn.Module, layout: Layout) -> int:
        entries = _select(layout.pack(module.state_dict()), find_norm_entries(module, layout))
        return sum(vector.nbytes for vector in entries.values())

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        return _replace_entries(start, ctx.slot, find_norm_entries(ctx.module, ctx.layout)) if ctx.slot else start

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        masks = find_norm_entries(ctx.module, ctx.layout)
        # Indices rather than masks, which would be as long as the model.
        return _select(local, masks) | {f"where_{name}": mask.nonzero().flatten() for name, mask in masks.items()}, {}

    def upload(self, ctx: Context, local: Packed) -> Packed:
        masks = find_norm_entries(ctx.module, ctx.layout)
        return _replace_entries(local, _select(ctx.received, masks), masks)

    def evaluated(self, model: Packed, shared: Arrays, slots: Mapping[str, Arrays]) -> Packed:
        filled = [slot for slot in slots.values() if slot]
        if not filled:
            return model
        stacked = {name: torch.stack([slot[name] for slot in filled]) for name in VECTORS}
        mean = {name: stacked[name].mean(dim=0) for name in ("params", "buffers")}
        indices = {name: filled[0][f"where_{name}"] for name in VECTORS}
        return _replace_entries(model, mean | {"counters": stacked["counters"].amax(dim=0)}, indices)


def find_norm_entries(module: nn.Module, layout: Layout) -> dict[str, torch.Tensor]:
    """Return a mask for each of a model's three vectors: which entries belong to normalisation layers."""
    prefixes = tuple(f"{name}." for name, part in module.named_modules() if isinstance(part, NORM_LAYERS))
    sizes = layout.sizes()
    device = next(module.parameters()).device
    masks = {name: torch.zeros(getattr(sizes, name), dtype=torch.bool, device=device) for name in VECTORS}
    for entry in layout.entries:
        if entry.name.startswith(prefixes):
            masks[f"{entry.kind}s"][entry.start : entry.stop] = True
    return masks


def _select(model: Packed, masks: Arrays) -> dict[str, torch.Tensor]:
    return {name: getattr(model, name)[mask] for name, mask in masks.items()}


def _replace_entries(model: Packed, values: Arrays, where: Arrays) -> Packed:
    """Return the model with these values at these masks or indices."""
    vectors = {name: getattr(model, name).clone() for name in VECTORS}
    for name, index in where.items():
        vectors[name][index] = values[name].to(vectors[name])
    return replace(model, **vectors)
