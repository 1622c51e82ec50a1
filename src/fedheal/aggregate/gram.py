"""Inner products of a cohort's updates, in float64, one block of columns at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedheal.types import Draft, Floats

BLOCK = 1 << 12  # columns: a cohort's block stays in a near cache


def blocks(draft: Draft) -> Iterator[tuple[slice, Floats]]:
    """Columns of the kept updates `[k, columns]`, block by block. Raises `NonFinite` before the first if a row is not."""
    if draft.measured is None:  # else FPHL has already read them and found them finite
        draft.kernel.measure(draft.updates.deltas, draft.rows, draft.sizes.lengths)
    for start in range(0, draft.sizes.params, BLOCK):
        stop = min(start + BLOCK, draft.sizes.params)
        yield slice(start, stop), draft.kernel.masked(draft.updates.deltas, draft.rows, draft.kept, start, stop)


def gram_matrix(draft: Draft, centred: bool = False) -> Floats:
    """`D D^T [k, k]` of the kept updates, from which their plain mean is taken first if `centred`."""
    matrix = np.zeros((len(draft.rows), len(draft.rows)))
    for _, block in blocks(draft):
        here = block - block.mean(axis=0) if centred else block
        matrix += here @ here.T
    return np.asarray((matrix + matrix.T) / 2)
