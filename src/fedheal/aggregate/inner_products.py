"""Inner products of a cohort's updates, in float64, one block of columns at a time and where the updates are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate.draft import Draft
from fedheal.core.arrays import Floats

BLOCK = 1 << 12  # columns: a cohort's block stays in a near cache
WIDE = 1 << 18  # elsewhere than on a CPU, where starting costs more


def blocks(draft: Draft) -> Iterator[tuple[slice, Tensor]]:
    """Columns of the kept updates `[k, columns]`, block by block. Raises `NonFinite` before the first if a row is not."""
    deltas = draft.updates.deltas
    if draft.measured is None:  # else FPHL has already read them and found them finite
        draft.kernel.measure(deltas, draft.rows, draft.sizes.lengths)
    width = BLOCK if deltas.device.type == "cpu" else WIDE
    for start in range(0, draft.sizes.params, width):
        stop = min(start + width, draft.sizes.params)
        yield slice(start, stop), draft.kernel.masked(deltas, draft.rows, draft.kept, start, stop)


def gram_matrix(draft: Draft, centred: bool = False) -> Floats:
    """`D D^T [k, k]` of the kept updates, from which their plain mean is taken first if `centred`."""
    taken = (block for _, block in blocks(draft))
    centre = (block - block.mean(dim=0) if centred else block for block in taken)
    matrix = inner_products(centre, len(draft.rows))
    return np.asarray((matrix + matrix.T) / 2)


def inner_products(taken: Iterable[Tensor], number: int) -> Floats:
    """Of so many rows, summed over blocks of columns. A model may have no parameters, and so no block."""
    total = torch.zeros(number, number, dtype=torch.float64)
    for block in taken:
        total = total.to(block.device) + block @ block.T
    return np.asarray(total.cpu().numpy())
