"""Sign counts that fade, so that a client's old rounds count less. An extension of FPHL.

In each of a client's rounds its counts fade before the round is added: `pos = (1-gamma) pos + [D >= 0]`,
`n = (1-gamma) n + 1`. So n tends to `1/gamma`, about the number of rounds that are remembered. An absent client forgets
nothing. `gamma=0` would be FPHL's own counts, which `consistency.py` keeps exactly. Fading counts are float32, so a
consistency within 2e-5 of tau counts as equal to it. The variant `paper` keeps such an entry. `released`, whose history
excludes this round, does not.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate.client_index import extend_column, index_clients
from fedheal.aggregate.draft import Draft, SoftMask
from fedheal.aggregate.kernels import reference
from fedheal.aggregate.masks.consistency import count_buffer_signs, count_entries, grow_counts, report_kept
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Floats
from fedheal.core.layout import Layout
from fedheal.core.state import State, expect

TIE = 2e-5  # no power of ten: with gamma = 0.9 old rounds add up to 1e-5, and rounding would decide


@dataclass(frozen=True)
class ForgettingState(State, kind="forgetting"):
    """Per client ever seen: faded participations `n` and faded counts, in a matrix that grows as `ConsistencyState`'s."""

    clients: tuple[str, ...]
    n: Floats
    counts: Tensor
    sign: int

    def __post_init__(self) -> None:
        if self.counts.ndim != 2 or self.counts.dtype != torch.float32:
            got = f"{self.counts.dtype} of shape {tuple(self.counts.shape)}"
            raise ValueError(f"faded counts must be a float32 matrix, got {got}")


def forgetting_mask(gamma: float, tau: float, variant: str, soft: bool) -> Stage:
    """Return the stage that gives the mask of faded counts; a soft one (`soft.py`) if `soft`."""
    past = variant == "released"
    sign, keep = -1 if past else 1, 1 - gamma

    def init(layout: Layout) -> State:
        return ForgettingState((), np.zeros(0), torch.zeros(0, count_entries(layout.sizes(), variant)), sign)

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, ForgettingState)
        has, needed = (before.counts.shape[1], before.sign), (count_entries(draft.sizes, variant), sign)
        if has != needed:
            problem = f"this state has faded counts for {has[0]} entries by the rule of sign {has[1]}"
            problem += f", but this aggregator needs {needed[0]} and {needed[1]}"
            raise ValueError(f"{problem}: give a state that it made itself")
        clients, slots = index_clients(before.clients, draft.clients)
        n = extend_column(before.n, len(clients))
        n[slots] = keep * n[slots] + 1
        counts = grow_counts(before.counts, len(before.clients), len(clients), torch.float32, draft)
        total = n[slots] - past
        need = total * (tau + TIE if past else tau - TIE)
        mask = SoftMask(counts=counts, slots=slots, total=total, need=need, past=past, sign=sign, soft=soft)
        reference.fade_counts(draft.updates.deltas, draft.rows, mask, keep)
        if past:
            count_buffer_signs(draft, mask, keep)
        norms = reference.measure_masked(draft.updates.deltas, draft.rows, draft.sizes.lengths, mask)
        draft = report_kept(replace(draft, kernel=reference, mask=mask, norms=norms))
        return draft, ForgettingState(clients, n, counts, sign)

    return Stage(init, apply, gives=frozenset({"mask"}))
