"""The obvious twin: plain torch on any device, written to be compared with the equations, not to be fast.

It is also the one kernel that knows `Graded` masks; the stages that give them choose it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate.draft import Graded, Kept, Mask, Measured
from fedheal.core.arrays import Floats, Integers

BLOCK = 1 << 18


class NonFinite(Exception):
    """These rows of the updates hold NaN or infinity, or entries whose squares overflow."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"rows {list(rows)} are not finite")
        self.rows = tuple(int(row) for row in rows)


def observe(
    deltas: Tensor,
    rows: Integers,
    tensors: Sequence[int],
    counts: Tensor,
    slots: Integers,
    at_least: Integers,
    below: Integers,
    sign: int,
) -> Measured:
    kept = Kept(counts, slots, at_least, below, sign)
    check_finite(deltas, rows)
    for row, slot in zip(rows, slots, strict=True):
        for start, stop in _blocks(0, deltas.shape[1]):
            up = sign * deltas[row, start:stop] >= 0
            counts[slot, start:stop] = (counts[slot, start:stop].to(torch.int64) + up).to(counts.dtype)
    return measured(deltas, rows, tensors, kept)


def measure(deltas: Tensor, rows: Integers, tensors: Sequence[int]) -> Measured:
    check_finite(deltas, rows)
    return measured(deltas, rows, tensors, None)


def fade(deltas: Tensor, rows: Integers, counts: Tensor, slots: Integers, left: float, sign: int) -> None:
    """Keep a share `left` of the counts of float32 and add this round's signs, in place; `NonFinite` before any is touched."""
    check_finite(deltas, rows)
    for row, slot in zip(rows, slots, strict=True):
        for start, stop in _blocks(0, deltas.shape[1]):
            here = counts[slot, start:stop]
            here.mul_(left).add_(sign * deltas[row, start:stop] >= 0)


def average(params: Tensor, deltas: Tensor, rows: Integers, weights: Floats, kept: Mask | None) -> tuple[Tensor, int]:
    after = params.clone()
    unkept = 0
    for start, stop in _blocks(0, deltas.shape[1]):
        numerator = torch.zeros(stop - start, dtype=torch.float64, device=deltas.device)
        denominator = torch.zeros_like(numerator)
        for i, row in enumerate(rows):
            delta = deltas[row, start:stop].to(torch.float64)
            share = float(weights[i]) * mask(kept, i, delta, start, stop).to(torch.float64)
            numerator += share * delta
            denominator += share
        moved = denominator > 0
        update = torch.where(moved, numerator / denominator.where(moved, 1.0), 0.0)
        after[start:stop] = (params[start:stop].to(torch.float64) + update).to(params.dtype)
        unkept += int((~moved).sum())
    return after, unkept


def masked(deltas: Tensor, rows: Integers, kept: Mask | None, start: int, stop: int) -> Tensor:
    block = deltas[torch.from_numpy(rows).to(deltas.device), start:stop].to(torch.float64)
    if kept is None:
        return block
    return torch.stack([d * mask(kept, i, d, start, stop) for i, d in enumerate(block)])


def measured(deltas: Tensor, rows: Integers, tensors: Sequence[int], kept: Mask | None) -> Measured:
    """What a mask leaves of updates that are known to be finite."""
    squares = np.zeros((len(rows), len(tensors)))
    number = np.zeros((len(rows), len(tensors)), np.int64)
    for i, row in enumerate(rows):
        begin = 0
        for t, length in enumerate(tensors):
            for start, stop in _blocks(begin, begin + length):
                delta = deltas[row, start:stop].to(torch.float64)
                where = mask(kept, i, delta, start, stop)
                squares[i, t] += float(((where * delta) ** 2).sum())
                number[i, t] += int((where > 0).sum())
            begin += length
    return Measured(squares, number)


def mask(kept: Mask | None, i: int, delta: Tensor, start: int, stop: int) -> Tensor:
    """Which of client i's entries `start:stop` are kept or, for a `Graded` mask, how much each counts."""
    if kept is None:
        return torch.ones_like(delta, dtype=torch.bool)
    if isinstance(kept, Graded):
        return _degree(kept, i, delta, start, stop)
    counts = kept.counts[kept.slots[i], start:stop].to(torch.int64)
    return torch.where(kept.sign * delta >= 0, counts >= int(kept.at_least[i]), counts < int(kept.below[i]))


def _degree(kept: Graded, i: int, delta: Tensor, start: int, stop: int) -> Tensor:
    up = kept.sign * delta >= 0
    total = float(kept.total[i])
    history = kept.counts[kept.slots[i], start:stop].to(torch.float64)
    if kept.past:
        history = history - up.to(torch.float64)
    agree = torch.where(up, history, total - history).clamp(0, total)  # float32 counts may be a rounding beyond
    here = agree >= float(kept.need[i])
    if not kept.soft or total == 0:
        return here.to(torch.float64)
    return agree / total * here


def check_finite(deltas: Tensor, rows: Integers) -> None:
    """Raise unless every row's squared norm is finite."""

    def square(row: int) -> float:
        blocks = (deltas[row, start:stop].to(torch.float64) for start, stop in _blocks(0, deltas.shape[1]))
        return sum(float((block**2).sum()) for block in blocks)

    bad = [row for row in rows.tolist() if not math.isfinite(square(row))]
    if bad:
        raise NonFinite(bad)


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    return ((a, min(a + BLOCK, stop)) for a in range(start, stop, BLOCK))
