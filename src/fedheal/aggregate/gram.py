"""Inner products of a cohort's updates, in float64, one block of columns at a time and on the updates' device."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate.draft import Draft
from fedheal.core.arrays import Floats

BLOCK = 1 << 12  # columns: a cohort's block stays in a near cache
WIDE = 1 << 18  # on a GPU, where starting a block costs more


def iterate_blocks(draft: Draft) -> Iterator[tuple[slice, Tensor]]:
    """Yield the masked updates `[k, columns]` block by block. Raise `NonFinite` before the first if a row is not finite."""
    deltas = draft.updates.deltas
    draft.measure_norms()
    width = BLOCK if deltas.device.type == "cpu" else WIDE
    for start in range(0, draft.sizes.params, width):
        stop = min(start + width, draft.sizes.params)
        yield slice(start, stop), draft.kernel.mask_block(deltas, draft.rows, draft.mask, start, stop)


def compute_gram(draft: Draft, centre: bool = False) -> Floats:
    """Return `D D^T [k, k]` of the masked updates, after subtracting their plain mean if `centre`."""
    blocks = (block for _, block in iterate_blocks(draft))
    matrix = sum_products((block - block.mean(dim=0) if centre else block for block in blocks), len(draft.rows))
    return np.asarray((matrix + matrix.T) / 2)


def sum_products(blocks: Iterable[Tensor], rows: int) -> Floats:
    """Return the sum of `B B^T [rows, rows]` over blocks of columns; zeros if the model has no parameters."""
    total = torch.zeros(rows, rows, dtype=torch.float64)
    for block in blocks:
        total = total.to(block.device) + block @ block.T
    return np.asarray(total.cpu().numpy())
