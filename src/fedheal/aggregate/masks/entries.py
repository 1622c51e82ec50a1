"""A mask from a matrix of booleans, for methods that decide by anything else than sign counts."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate.draft import CountMask, Draft
from fedheal.aggregate.kernels import reference
from fedheal.aggregate.masks.consistency import report_kept


def keep_entries(draft: Draft, kept: Tensor) -> Draft:
    """Return the draft with a mask: which entries of each accepted client's update count.

    Args:
        draft: The round's draft.
        kept: Booleans `[k, G]`, a row for each of `draft.rows`.

    Raises:
        NonFinite: An update holds NaN or infinity; the aggregator then refuses the round or leaves the client out.
        ValueError: `kept` is no such matrix.
    """
    deltas, wanted = draft.updates.deltas, (len(draft.rows), draft.sizes.params)
    if tuple(kept.shape) != wanted or kept.dtype != torch.bool:
        raise ValueError(f"kept is {kept.dtype} of shape {tuple(kept.shape)}: give booleans of shape {wanted}")
    reference.check_finite(deltas, draft.rows)
    up = draft.view_rows(deltas) >= 0
    # The thresholds 1 and 3 keep an entry with a count of 1, and drop one that goes up with 0, or down with 3.
    counts = torch.where(kept.to(up.device), 1, torch.where(up, 0, 3)).to(torch.uint8)
    # Behind the parameters: buffers and counters are kept, for the reducer of `variant="released"`.
    rest = counts.new_ones(len(counts), draft.sizes.buffers + draft.sizes.counters)
    ones = np.ones(len(draft.rows), np.int64)
    mask = CountMask(
        counts=torch.cat([counts, rest], dim=1), slots=np.arange(len(ones)), at_least=ones, below=3 * ones, sign=1
    )
    norms = reference.measure_masked(deltas, draft.rows, draft.sizes.lengths, mask)
    return report_kept(replace(draft, mask=mask, norms=norms))
