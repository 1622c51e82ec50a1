"""Soft masks: an entry counts by how consistent it is, instead of fully or not at all. An extension of FPHL.

Where the consistency `c` of an entry's update (`consistency.py`) is at least tau, FPHL counts it for 1, and this stage
for `c`. The soft mask replaces the hard one everywhere: the mean is `sum u c D / sum u c`, FAEL's distance is `|c
D|^2`, and the exact objective uses the Gram matrix of `c D`. The stage wraps FPHL's own and keeps its counts, exact
thresholds and report.
"""

from dataclasses import replace

import numpy as np

from fedheal.aggregate.draft import CountMask, Draft, SoftMask
from fedheal.aggregate.kernels import reference
from fedheal.aggregate.masks.consistency import ConsistencyState, consistency_mask
from fedheal.aggregate.stage import Stage
from fedheal.core.state import State, expect


def soft_mask(tau: float, variant: str) -> Stage:
    """Return the stage that gives the soft mask. A client's first round in `released` has no history and counts in full."""
    hard, past = consistency_mask(tau, variant), variant == "released"

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        draft, after = hard.apply(draft, state)
        counts = draft.mask
        assert isinstance(counts, CountMask)
        total = (expect(after, ConsistencyState).n[counts.slots] - int(past)).astype(np.float64)
        need = (counts.at_least - int(past)).astype(np.float64)  # which includes this round's own sign, unlike the past
        table, slots, sign = counts.counts, counts.slots, counts.sign
        mask = SoftMask(counts=table, slots=slots, total=total, need=need, past=past, sign=sign, soft=True)
        norms = reference.measure_masked(draft.updates.deltas, draft.rows, draft.sizes.lengths, mask)
        return replace(draft, kernel=reference, mask=mask, norms=norms), after

    return Stage(hard.init, apply, hard.needs, hard.gives)
