"""Reducers: from weights and mask to one new model. The mean is FPHL's masked mean, or the plain one without a mask."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate.draft import Draft
from fedheal.aggregate.kernels import cpu, reference
from fedheal.core.arrays import Floats, upload
from fedheal.core.layout import Packed


def mean(draft: Draft, weights: Floats) -> tuple[Packed, dict[str, Any]]:
    """Average the masked updates: `W_i + sum u k D / sum u k`; an entry that nobody keeps does not move.

    Float buffers become the weighted mean of the clients' values, counters the largest one. Without any they stay.
    Variances that the draft names as `running` gain the variance of their means. With a mask the report has `unkept`,
    the share of entries that nobody keeps.
    """
    params, report = _average_params(draft, weights)
    buffers, counters = draft.model.buffers, draft.model.counters
    if draft.updates.buffers is not None:
        local = draft.view_rows(draft.updates.buffers)
        u = upload(torch.from_numpy(weights), local.device)  # float64, and so are products with it
        averaged = (u[:, None] * local).sum(dim=0)
        if draft.running is not None:
            means, variances = (torch.from_numpy(columns).to(local.device) for columns in draft.running)
            averaged[variances] += (u[:, None] * (local[:, means] - averaged[means]).square()).sum(dim=0)
        buffers = averaged.to(buffers.dtype)
    if draft.updates.counters is not None:
        local = draft.view_rows(draft.updates.counters).to(torch.int64)
        counters = local.amax(dim=0).to(counters.dtype)
    return Packed(params, buffers, counters), report


def mean_as_released(draft: Draft, weights: Floats) -> tuple[Packed, dict[str, Any]]:
    """Average as the released code does: buffers and counters move like parameters, with sign counts of their own."""
    params, report = _average_params(draft, weights)
    model, sizes = draft.model, draft.sizes
    buffers = _average_vector(draft, model.buffers, draft.updates.buffers, weights, sizes.params)
    counters = _average_vector(draft, model.counters, draft.updates.counters, weights, sizes.params + sizes.buffers)
    whole = counters.round()  # towards zero, but a mean that is whole except for rounding errors counts as whole
    counters = torch.where((counters - whole).abs() < 1e-6, whole, counters.trunc())
    return Packed(params, buffers.to(model.buffers.dtype), counters.to(model.counters.dtype)), report


def is_finite(*tensors: Tensor) -> bool:
    """Return whether all entries of all tensors are finite."""
    return all(find_finite(*tensors))


def find_finite(*tensors: Tensor) -> list[bool]:
    """Return for each tensor whether all its entries are finite, without a mask in memory; a GPU is read once."""
    found = [True] * len(tensors)
    unread: list[int] = []
    for i, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        if tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64):
            # In one thread: torch's would spin on after the sum, on the cores that the kernels need next.
            array = tensor.detach().numpy()
            found[i] = bool(np.isfinite(array.min()) and np.isfinite(array.max()))
        else:
            unread.append(i)
    if unread:
        largest = torch._foreach_norm([tensors[i].detach() for i in unread], math.inf)  # NaN if there is one
        numbers = torch.stack([number.to(largest[0]) for number in largest]).tolist()
        for i, number in zip(unread, numbers, strict=True):
            found[i] = math.isfinite(number)
    return found


def _average_params(draft: Draft, weights: Floats) -> tuple[Tensor, dict[str, Any]]:
    updates, rows, before = draft.updates, draft.rows, draft.model.params
    step, unkept = draft.step, 0
    if step is None and draft.scale == 1:
        if draft.mask is None and draft.kernel is cpu and (mean := updates.average_rows(rows, weights)) is not None:
            return mean, {}
        params, unkept = draft.kernel.average(before, updates.deltas, rows, weights, draft.mask)
    else:
        if step is None:  # the mean update by itself, so that it is rounded only after it is scaled
            origin = torch.zeros_like(before, dtype=torch.float64)
            step, unkept = draft.kernel.average(origin, updates.deltas, rows, weights, draft.mask)
        params = (before.to(torch.float64) + draft.scale * step.to(before.device)).to(before.dtype)
    return params, {} if draft.mask is None else {"unkept": unkept / max(draft.sizes.params, 1)}


def _average_vector(draft: Draft, vector: Tensor, local: Tensor | None, weights: Floats, offset: int) -> Tensor:
    """Return the masked mean, in float64, of a small vector whose sign counts start at column `offset`."""
    before = vector.to(torch.float64)
    if local is None or not len(vector):
        return before
    delta = draft.view_rows(local).to(torch.float64) - before
    columns = offset, offset + len(vector)
    mask = torch.stack([reference.compute_mask(draft.mask, i, row, *columns) for i, row in enumerate(delta)])
    u = torch.from_numpy(weights).to(delta.device)[:, None] * mask.to(delta.dtype)
    total = u.sum(dim=0)
    moved = total > 0
    step = (u * delta).sum(dim=0) / total.where(moved, 1.0)
    return before + torch.where(moved, step, 0.0)
