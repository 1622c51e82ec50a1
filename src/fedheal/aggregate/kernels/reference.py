"""The reference kernel: plain torch on any device, written to be compared with the equations, not to be fast.

It is also the one kernel that knows `SoftMask`; the stages that give one choose it.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate.draft import CountMask, Mask, SoftMask, UpdateNorms
from fedheal.aggregate.validate import NonFinite
from fedheal.core.arrays import Floats, Integers

BLOCK = 1 << 18


def observe(deltas: Tensor, rows: Integers, tensors: Sequence[int], mask: CountMask) -> UpdateNorms:
    check_finite(deltas, rows)
    for row, slot in zip(rows, mask.slots, strict=True):
        for start, stop in _blocks(0, deltas.shape[1]):
            up = mask.sign * deltas[row, start:stop] >= 0
            counts = mask.counts[slot, start:stop]
            mask.counts[slot, start:stop] = (counts.to(torch.int64) + up).to(counts.dtype)
    return measure_masked(deltas, rows, tensors, mask)


def measure(deltas: Tensor, rows: Integers, tensors: Sequence[int]) -> UpdateNorms:
    check_finite(deltas, rows)
    return measure_masked(deltas, rows, tensors, None)


def fade_counts(deltas: Tensor, rows: Integers, mask: SoftMask, keep: float) -> None:
    """Scale the float32 counts by `keep` and add this round's signs, in place. Raise `NonFinite` before any is touched."""
    check_finite(deltas, rows)
    for row, slot in zip(rows, mask.slots, strict=True):
        for start, stop in _blocks(0, deltas.shape[1]):
            mask.counts[slot, start:stop].mul_(keep).add_(mask.sign * deltas[row, start:stop] >= 0)


def average(params: Tensor, deltas: Tensor, rows: Integers, weights: Floats, mask: Mask | None) -> tuple[Tensor, int]:
    after = params.clone()
    unkept = 0
    for start, stop in _blocks(0, deltas.shape[1]):
        numerator = torch.zeros(stop - start, dtype=torch.float64, device=deltas.device)
        denominator = torch.zeros_like(numerator)
        for i, row in enumerate(rows):
            delta = deltas[row, start:stop].to(torch.float64)
            share = float(weights[i]) * compute_mask(mask, i, delta, start, stop).to(torch.float64)
            numerator += share * delta
            denominator += share
        moved = denominator > 0
        update = torch.where(moved, numerator / denominator.where(moved, 1.0), 0.0)
        after[start:stop] = (params[start:stop].to(torch.float64) + update).to(params.dtype)
        unkept += int((~moved).sum())
    return after, unkept


def mask_block(deltas: Tensor, rows: Integers, mask: Mask | None, start: int, stop: int) -> Tensor:
    block = deltas[torch.from_numpy(rows).to(deltas.device), start:stop].to(torch.float64)
    if mask is None:
        return block
    return torch.stack([d * compute_mask(mask, i, d, start, stop) for i, d in enumerate(block)])


def measure_masked(deltas: Tensor, rows: Integers, tensors: Sequence[int], mask: Mask | None) -> UpdateNorms:
    """Measure masked updates that are known to be finite."""
    squares = np.zeros((len(rows), len(tensors)))
    number = np.zeros((len(rows), len(tensors)), np.int64)
    for i, row in enumerate(rows):
        begin = 0
        for t, length in enumerate(tensors):
            for start, stop in _blocks(begin, begin + length):
                delta = deltas[row, start:stop].to(torch.float64)
                degree = compute_mask(mask, i, delta, start, stop)
                squares[i, t] += float(((degree * delta) ** 2).sum())
                number[i, t] += int((degree > 0).sum())
            begin += length
    return UpdateNorms(squares, number)


def compute_mask(mask: Mask | None, i: int, delta: Tensor, start: int, stop: int) -> Tensor:
    """Return which of client i's entries `start:stop` are kept or, for a `SoftMask`, how much each counts."""
    if mask is None:
        return torch.ones_like(delta, dtype=torch.bool)
    up, counts = mask.sign * delta >= 0, mask.counts[mask.slots[i], start:stop]
    if isinstance(mask, CountMask):
        counts = counts.to(torch.int64)
        return torch.where(up, counts >= int(mask.at_least[i]), counts < int(mask.below[i]))
    total = float(mask.total[i])
    history = counts.to(torch.float64) - (up.to(torch.float64) if mask.past else 0.0)
    agree = torch.where(up, history, total - history).clamp(0, total)  # float32 counts may be beyond by rounding
    kept = agree >= float(mask.need[i])
    return agree / total * kept if mask.soft and total > 0 else kept.to(torch.float64)


def check_finite(deltas: Tensor, rows: Integers) -> None:
    """Raise `NonFinite` unless every row's squared norm is finite."""

    def square(row: int) -> float:
        blocks = (deltas[row, start:stop].to(torch.float64) for start, stop in _blocks(0, deltas.shape[1]))
        return sum(float((block**2).sum()) for block in blocks)

    bad = [row for row in rows.tolist() if not math.isfinite(square(row))]
    if bad:
        raise NonFinite(bad)


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    return ((a, min(a + BLOCK, stop)) for a in range(start, stop, BLOCK))
