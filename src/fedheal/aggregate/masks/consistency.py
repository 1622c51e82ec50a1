"""FPHL: leave out entries whose direction is inconsistent with the client's own history.

Chen, Huang and Ye, "Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity", CVPR 2024.
With `l` the share of a client's rounds in which an entry's update was not negative, the consistency of an update is
`c = l` where it is not negative, else `1 - l`, and the entry is kept where `c >= tau`.

Deviations: shares are kept as exact integer counts per client and compared with the smallest admissible integer, so that
3 of 10 rounds at tau = 0.3 is kept and a client's absence does not dilute its history. `variant="released"` follows the
authors' code instead: the history excludes the current round, the first participation keeps all, `c > tau`, the sign is
that of `global - local`, and buffers and counters are treated like parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate.client_index import enrol, extended
from fedheal.aggregate.draft import Draft, Kept, Mask, Measured
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Integers
from fedheal.core.layout import Layout, Sizes, matrix
from fedheal.core.state import Arrays, Json, State, expect, kind

WIDTHS = (torch.uint8, torch.uint16, torch.uint32)


@kind("consistency")
@dataclass(frozen=True)
class ConsistencyState(State):
    """Per client ever seen: participations `n`, and how often each entry went up, in a slab `[slots, width]` that grows.

    The slab may have more rows than clients; a row is all zeros until its client comes.
    """

    clients: tuple[str, ...]
    n: Integers
    counts: Tensor
    sign: int

    def _write(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        used = self.counts[: len(self.clients)]
        return {"n": torch.from_numpy(self.n), "counts": used}, {"clients": list(self.clients), "sign": self.sign}

    @classmethod
    def _read(cls, arrays: Arrays, json: Json) -> ConsistencyState:
        clients, n, counts = tuple(json["clients"]), arrays["n"].numpy(), arrays["counts"]
        if n.shape != (len(clients),) or counts.ndim != 2 or len(counts) != len(clients) or counts.dtype not in WIDTHS:
            raise ValueError(f"sign counts of shape {tuple(counts.shape)} do not belong to {len(clients)} clients")
        return cls(clients, n, counts, json["sign"])


def consistency(tau: float, variant: str) -> Stage:
    """The stage that gives FPHL's mask."""
    limit = exact(tau)
    thresholds, sign = _RULES[variant]

    def init(layout: Layout) -> State:
        counts = torch.zeros(0, width_of(layout.sizes(), variant), dtype=WIDTHS[0])
        return ConsistencyState((), np.zeros(0, np.int64), counts, sign)

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, ConsistencyState)
        if before.sign != sign:
            raise ValueError(
                "this state counts signs by the rule of the other variant: it was made by another aggregator"
            )
        if before.counts.shape[1] != width_of(draft.sizes, variant):
            raise ValueError(
                f"this state has sign counts for {before.counts.shape[1]} entries, the model has "
                f"{width_of(draft.sizes, variant)}: it was made for another one"
            )
        clients, slots = enrol(before.clients, draft.clients)
        n = extended(before.n, len(clients))
        n[slots] += 1
        dtype = wide_enough(before.counts.dtype, int(n[slots].max()))
        counts = room(before.counts, len(before.clients), len(clients), dtype, draft)
        at_least, below = np.array([thresholds(limit, int(m)) for m in n[slots]], np.int64).T
        kept = Kept(counts, slots, at_least, below, sign)
        tensors = draft.sizes.lengths
        measured = draft.kernel.observe(draft.updates.deltas, draft.rows, tensors, counts, slots, at_least, below, sign)
        if variant == "released":
            observe_extras(draft, kept)
        report = dict(draft.report) | kept_fractions(draft, measured)
        return (
            replace(draft, kept=kept, measured=measured, report=report),
            ConsistencyState(clients, n, counts, sign),
        )

    return Stage(init, apply, gives=frozenset({"mask"}))


def width_of(sizes: Sizes, variant: str) -> int:
    return sizes.params + (sizes.buffers + sizes.counters if variant == "released" else 0)


def exact(share: float) -> Fraction:
    """The decimal the user wrote: 0.3 is three tenths, not the nearest binary fraction."""
    return Fraction(str(share))


def _paper(tau: Fraction, n: int) -> tuple[int, int]:
    """Counts include this round: going up is kept with `pos >= ceil(tau n)`, going down with `n - pos` as many."""
    need = math.ceil(tau * n)
    return need, n - need + 1


def _released(tau: Fraction, n: int) -> tuple[int, int]:
    """History before this round, strictly more than tau of it; `pos` already includes this round."""
    if n == 1:
        return 0, 2
    need = math.floor(tau * (n - 1)) + 1
    return need + 1, n - 1 - need + 1


# variant -> the thresholds (at_least, below) for n participations, and the sign that turns an update into "up"
_RULES: dict[str, tuple[Callable[[Fraction, int], tuple[int, int]], int]] = {
    "paper": (_paper, 1),
    "released": (_released, -1),
}


def wide_enough(now: torch.dtype, most: int) -> torch.dtype:
    """The narrowest type for counts up to `most`, but never narrower than now."""
    return next(
        width for width in WIDTHS if torch.iinfo(width).bits >= torch.iinfo(now).bits and most < torch.iinfo(width).max
    )


def room(counts: Tensor, used: int, needed: int, dtype: torch.dtype, draft: Draft) -> Tensor:
    """The slab with room for all clients, in this type; the old one itself only if it may be reused."""
    device = draft.updates.deltas.device
    if draft.donate and needed <= len(counts) and (dtype, device) == (counts.dtype, counts.device):
        return counts
    # Grown by half at a time, so that clients who come one by one do not copy the slab each round.
    rows = len(counts) if needed <= len(counts) else max(needed, len(counts) + len(counts) // 2)
    if device.type == "cpu":  # numpy asks the system for zero pages: rows not yet used cost no memory
        made = torch.from_numpy(np.zeros((rows, counts.shape[1]), _NUMPY[dtype]))
    else:
        made = matrix(rows, counts.shape[1], dtype, device)
    for row in range(used):
        made[row] = counts[row].to(device, dtype)
    return made


_NUMPY = {torch.uint8: np.uint8, torch.uint16: np.uint16, torch.uint32: np.uint32, torch.float32: np.float32}


def observe_extras(draft: Draft, kept: Mask, left: float | None = None) -> None:
    """Count the signs of buffers and counters, which stand behind the parameters in the slab.

    `left`: of counts that fade, the share that stays.
    """
    start = draft.sizes.params
    for before, local in (
        (draft.model.buffers, draft.updates.buffers),
        (draft.model.counters, draft.updates.counters),
    ):
        if local is not None:
            for row, slot in zip(draft.rows, kept.slots, strict=True):
                up = kept.sign * (local[row].to(torch.float64) - before.to(torch.float64)) >= 0
                here = kept.counts[slot, start : start + len(before)]
                here.copy_(here.to(torch.int64) + up if left is None else left * here + up)
        start += len(before)


def kept_fractions(draft: Draft, measured: Measured) -> dict[str, Any]:
    """Kept fractions by client, and by parameter tensor over the cohort."""
    lengths = np.array(draft.sizes.lengths, np.float64)
    by_client = measured.kept.sum(axis=1) / max(lengths.sum(), 1)
    by_tensor = measured.kept.mean(axis=0) / np.maximum(lengths, 1)
    names = [name for name, _ in draft.sizes.tensors]
    return {
        "kept": dict(zip(draft.clients, by_client.tolist(), strict=True)),
        "kept_by_tensor": dict(zip(names, by_tensor.tolist(), strict=True)),
    }
