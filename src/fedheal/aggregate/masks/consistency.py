"""FPHL: leave out entries whose direction is inconsistent with the client's own history.

Chen, Huang and Ye, "Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity", CVPR 2024.
Let `l` be the share of a client's rounds in which an entry's update was not negative. The consistency of an update is
`c = l` where it is not negative, else `1 - l`. The entry is kept where `c >= tau`.

Deviations: shares are exact integer counts per client, compared with the smallest admissible integer. So 3 of 10 rounds
at tau = 0.3 is kept. Absence does not dilute a history. `variant="released"` follows the authors' code. There the
history excludes the current round, the first participation keeps all, an entry needs `c > tau`, and the sign is that of
`global - local`. Buffers and counters are treated like parameters.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate.client_index import extend_column, index_clients
from fedheal.aggregate.draft import CountMask, Draft, Mask
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Integers
from fedheal.core.layout import Layout, Sizes, allocate_rows
from fedheal.core.state import State, expect

COUNT_DTYPES = {torch.uint8: np.uint8, torch.uint16: np.uint16, torch.uint32: np.uint32}  # narrowest first


@dataclass(frozen=True)
class ConsistencyState(State, kind="consistency"):
    """Per client ever seen: participations `n`, and how often each entry went up. Counts have rows for clients to come."""

    clients: tuple[str, ...]
    n: Integers
    counts: Tensor
    sign: int

    def __post_init__(self) -> None:
        if self.counts.ndim != 2 or self.counts.dtype not in COUNT_DTYPES:
            got = f"{self.counts.dtype} of shape {tuple(self.counts.shape)}"
            raise ValueError(f"sign counts must be a matrix of unsigned integers, got {got}")


def consistency_mask(tau: float, variant: str) -> Stage:
    """Return the stage that gives FPHL's mask."""
    exact_tau = Fraction(str(tau))  # the decimal that was written: 0.3 is three tenths, not the nearest binary fraction
    sign = -1 if variant == "released" else 1  # turns an update that goes up into one that is not negative

    def init(layout: Layout) -> State:
        counts = torch.zeros(0, count_entries(layout.sizes(), variant), dtype=torch.uint8)
        return ConsistencyState((), np.zeros(0, np.int64), counts, sign)

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, ConsistencyState)
        if before.sign != sign:
            raise ValueError(
                "this state counts signs by the other variant's rule: give a state that this aggregator made"
            )
        has, needed = before.counts.shape[1], count_entries(draft.sizes, variant)
        if has != needed:
            raise ValueError(
                f"this state has sign counts for {has} entries, but the model has {needed}: give a state for this model"
            )
        clients, slots = index_clients(before.clients, draft.clients)
        n = extend_column(before.n, len(clients))
        n[slots] += 1
        wide_enough = (dtype for dtype in COUNT_DTYPES if torch.iinfo(dtype).max > n[slots].max())
        dtype = max(before.counts.dtype, next(wide_enough), key=lambda dtype: torch.iinfo(dtype).bits)
        counts = grow_counts(before.counts, len(before.clients), len(clients), dtype, draft)
        at_least, below = np.array([_compute_thresholds(exact_tau, int(m), variant) for m in n[slots]], np.int64).T
        mask = CountMask(counts=counts, slots=slots, at_least=at_least, below=below, sign=sign)
        norms = draft.kernel.observe(draft.updates.deltas, draft.rows, draft.sizes.lengths, mask)
        if variant == "released":
            count_buffer_signs(draft, mask)
        return report_kept(replace(draft, mask=mask, norms=norms)), ConsistencyState(clients, n, counts, sign)

    return Stage(init, apply, gives=frozenset({"mask"}))


def count_entries(sizes: Sizes, variant: str) -> int:
    """Return how many entries of a model have sign counts."""
    return sizes.params + (sizes.buffers + sizes.counters if variant == "released" else 0)


def _compute_thresholds(tau: Fraction, n: int, variant: str) -> tuple[int, int]:
    """Return a `CountMask`'s `at_least` and `below` for n participations; its counts include this round.

    In the paper's form going up is kept with `pos >= ceil(tau n)`, going down with `n - pos` as many. In the released one
    more than tau is needed of the history before this round.
    """
    if variant == "paper":
        need = math.ceil(tau * n)
        return need, n - need + 1
    need = math.floor(tau * (n - 1)) + 1
    return (need + 1, n - need) if n > 1 else (0, 2)


def grow_counts(counts: Tensor, used: int, needed: int, dtype: torch.dtype, draft: Draft) -> Tensor:
    """Return the counts with at least `needed` rows, in this dtype; the old matrix itself only if it may be reused."""
    device = draft.updates.deltas.device
    if draft.donate and needed <= len(counts) and (dtype, device) == (counts.dtype, counts.device):
        return counts
    # Grown by half at a time, so that clients who come one by one do not copy the matrix each round.
    rows = len(counts) if needed <= len(counts) else max(needed, len(counts) + len(counts) // 2)
    if device.type == "cpu":  # numpy asks the system for zero pages: rows not yet used cost no memory
        grown = torch.from_numpy(np.zeros((rows, counts.shape[1]), COUNT_DTYPES.get(dtype, np.float32)))
    else:
        grown = allocate_rows(rows, counts.shape[1], dtype, device).zero_()
    for row in range(used):
        grown[row] = counts[row].to(device, dtype)
    return grown


def count_buffer_signs(draft: Draft, mask: Mask, keep: float | None = None) -> None:
    """Count the signs of buffers and counters, behind the parameters' signs. The share `keep` of faded counts stays."""
    start = draft.sizes.params
    for name in ("buffers", "counters"):
        before, local = getattr(draft.model, name), getattr(draft.updates, name)
        if local is not None:
            for row, slot in zip(draft.rows, mask.slots, strict=True):
                up = mask.sign * (local[row].to(torch.float64) - before.to(torch.float64)) >= 0
                counts = mask.counts[slot, start : start + len(before)]
                counts.copy_(counts.to(torch.int64) + up if keep is None else keep * counts + up)
        start += len(before)


def report_kept(draft: Draft) -> Draft:
    """Add the kept fractions to the report, by client, and by parameter tensor over the cohort."""
    kept = draft.measure_norms().kept
    lengths = np.array(draft.sizes.lengths, np.float64)
    by_tensor = (kept.mean(axis=0) / np.maximum(lengths, 1)).tolist()
    by_client = draft.key_by_client(kept.sum(axis=1) / max(lengths.sum(), 1))
    names = (name for name, _ in draft.sizes.tensors)
    report = {"kept": by_client, "kept_by_tensor": dict(zip(names, by_tensor, strict=True))}
    return replace(draft, report={**draft.report, **report})
