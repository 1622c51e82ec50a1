"""From weights and mask to one new model: the masked mean of FPHL, of which the plain mean is the case without a mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate.draft import Draft, Mask
from fedheal.aggregate.kernels import reference
from fedheal.core.arrays import Floats
from fedheal.core.layout import Packed


def mean(draft: Draft, weights: Floats) -> tuple[Packed, dict[str, Any]]:
    """`W_i + sum u k D / sum u k`; an entry nobody keeps does not move. A draft's `scale` or `step` is honoured.

    Float buffers become the weighted mean of the clients' values, counters the largest; without any they stay.
    """
    params, told = _params(draft, weights)
    buffers, counters = draft.model.buffers, draft.model.counters
    if draft.updates.buffers is not None:
        local = draft.updates.buffers[_index(draft, draft.updates.buffers)].to(torch.float64)
        u = torch.from_numpy(weights).to(local.device)
        buffers = (u[:, None] * local).sum(dim=0).to(buffers.dtype)
    if draft.updates.counters is not None:
        local = draft.updates.counters[_index(draft, draft.updates.counters)].to(torch.int64)
        counters = local.amax(dim=0).to(counters.dtype)
    return Packed(params, buffers, counters), told


def mean_of_everything(draft: Draft, weights: Floats) -> tuple[Packed, dict[str, Any]]:
    """As in the released code: buffers and counters move like parameters, with sign counts of their own."""
    params, told = _params(draft, weights)
    model, sizes = draft.model, draft.sizes
    buffers = _moved(draft, model.buffers, draft.updates.buffers, weights, sizes.params).to(model.buffers.dtype)
    counters = _moved(draft, model.counters, draft.updates.counters, weights, sizes.params + sizes.buffers)
    return Packed(params, buffers, _truncated(counters).to(model.counters.dtype)), told


def _params(draft: Draft, weights: Floats) -> tuple[Tensor, dict[str, Any]]:
    deltas, rows, before = draft.updates.deltas, draft.rows, draft.model.params
    unkept = 0
    if draft.step is None and draft.scale == 1:
        params, unkept = draft.kernel.average(before, deltas, rows, weights, draft.kept)
    else:
        step = draft.step
        if step is None:  # the mean update by itself, so that it is rounded only once it is shrunk
            origin = torch.zeros_like(before, dtype=torch.float64)
            step, unkept = draft.kernel.average(origin, deltas, rows, weights, draft.kept)
        params = (before.to(torch.float64) + draft.scale * step.to(before.device)).to(before.dtype)
    return params, {} if draft.kept is None else {"unkept": unkept / max(draft.sizes.params, 1)}


def finite(vector: Tensor) -> bool:
    """Whether all is finite, without a mask in memory."""
    if not len(vector):
        return True
    if vector.device.type == "cpu" and vector.dtype in (torch.float32, torch.float64):
        # In one thread: torch's would spin on after the sum, on the cores that the kernels need next.
        array = vector.detach().numpy()
        return bool(np.isfinite(array.min()) and np.isfinite(array.max()))
    return bool(torch.stack(torch.aminmax(vector.detach())).isfinite().all())


def _index(draft: Draft, like: Tensor) -> Tensor:
    return torch.from_numpy(draft.rows).to(like.device)


def _moved(draft: Draft, vector: Tensor, local: Tensor | None, weights: Floats, offset: int) -> Tensor:
    """The masked mean on a small vector that has its sign counts at `offset`, in float64."""
    before = vector.to(torch.float64)
    if local is None or not len(vector):
        return before
    delta = local[_index(draft, local)].to(torch.float64) - before
    u = torch.from_numpy(weights).to(delta.device)[:, None] * mask(draft.kept, delta, offset)
    total = u.sum(dim=0)
    moved = total > 0
    step = (u * delta).sum(dim=0) / total.where(moved, 1.0)
    return before + torch.where(moved, step, 0.0)


def _truncated(mean: Tensor) -> Tensor:
    """Whole numbers towards zero; a mean that is whole but for rounding counts as whole."""
    nearest = mean.round()
    return torch.where((mean - nearest).abs() < 1e-6, nearest, mean.trunc())


def mask(kept: Mask | None, delta: Tensor, offset: int) -> Tensor:
    """How much the entries of a small matrix count, from the counts that start at column `offset`."""
    columns = offset, offset + delta.shape[1]
    return torch.stack([reference.mask(kept, i, row, *columns) for i, row in enumerate(delta)]).to(delta.dtype)
