"""The GPU kernel: the same two fused passes as `cpu`, in Triton.

The first pass counts signs and measures what is kept, the second recomputes the mask from the counts and averages; both read
the updates once and store no mask. Sums run over the clients in their order and in float64, products and sums rounded apart,
so the averages have the bits of the other kernels.

Threads read four floats or sixteen counts at once where the compiler knows that they begin at such a multiple: hence rows
that begin at multiples of `layout.ALIGNED`, and blocks of columns that do too, apart from the ragged ends of tensors.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fedheal.aggregate.draft import CountMask, UpdateNorms
from fedheal.aggregate.kernels import reference
from fedheal.aggregate.validate import NonFinite
from fedheal.core.arrays import Floats, Integers, upload
from fedheal.core.layout import ALIGNED

PASS_ONE, STRIDE = 8192, 1024  # columns a program scans, so many at a time
PASS_TWO = 1024  # columns a program averages

mask_block = reference.mask_block


def observe(deltas: Tensor, rows: Integers, tensors: Sequence[int], mask: CountMask | None) -> UpdateNorms:
    parts = _scan(deltas, rows, tensors, mask, step=1)
    owner = _blocks(tuple(tensors), deltas.device).owner
    # Blocks to tensors by a product with zeros and ones: a fixed order of sums, and one trip to the host. A block that is not
    # finite would spoil its neighbours there, so rows are checked apart.
    everything = parts[0].sum(dim=1)
    by_tensor = torch.nan_to_num(parts[1:], nan=0.0, posinf=0.0) @ owner
    columns = torch.cat([everything[:, None], *by_tensor.unbind()], dim=1).cpu().numpy()
    bad = ~np.isfinite(columns[:, 0])
    if bad.any():
        if mask is not None:  # take this round's signs out of the counts again
            _scan(deltas, rows, tensors, mask, step=-1)
        raise NonFinite(rows[bad].tolist())
    squares, number = np.split(columns[:, 1:], 2, axis=1)
    return UpdateNorms(np.ascontiguousarray(squares), number.astype(np.int64))


def measure(deltas: Tensor, rows: Integers, tensors: Sequence[int]) -> UpdateNorms:
    return observe(deltas, rows, tensors, None)


def average(
    params: Tensor, deltas: Tensor, rows: Integers, weights: Floats, mask: CountMask | None
) -> tuple[Tensor, int]:
    device, length = deltas.device, deltas.shape[1]
    before = params.to(device).contiguous()
    after = torch.empty_like(before)
    if not length:
        return after.to(params.device), 0
    whole = length - length % ALIGNED
    blocks = triton.cdiv(whole, PASS_TWO)
    programs = blocks + (whole < length)
    unkept = torch.empty(programs, dtype=torch.int32, device=device)
    counts, limits, slot_stride, sign = _unpack_mask(mask, unused=unkept)
    row_index, shares = _copy_to(device, rows, weights.view(np.int64))
    with _use(device):
        _average[(programs,)](
            before, after, deltas, row_index, shares.view(torch.float64), counts, limits, unkept, whole, length, blocks,
            deltas.stride(0), deltas.stride(1), slot_stride, len(rows),
            sign, block=PASS_TWO, rest=ALIGNED, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    keeps_all = mask is None and bool(weights.any())  # known without waiting for the GPU
    return after.to(params.device), 0 if keeps_all else int(unkept.sum())


def _scan(deltas: Tensor, rows: Integers, tensors: Sequence[int], mask: CountMask | None, step: int) -> Tensor:
    """Add `step` to the counts of entries that go up, and measure.

    Return per row and block the squared norms of all and of the kept entries, and how many are kept, `[3, k, blocks]`.
    """
    device = deltas.device
    cut = _blocks(tuple(tensors), device)
    parts = torch.zeros(3, len(rows), len(cut.starts), dtype=torch.float64, device=device)
    row_index = _copy_to(device, rows)[0]
    counts, limits, slot_stride, sign = _unpack_mask(mask, unused=cut.starts)
    for first, last, block in ((0, cut.whole, STRIDE), (cut.whole, len(cut.starts), ALIGNED)):
        if last > first and len(rows):
            with _use(device):
                _count[(last - first, len(rows))](
                    deltas, row_index, cut.starts, cut.stops, counts, limits, parts,
                    deltas.stride(0), deltas.stride(1), slot_stride, len(rows), len(cut.starts), first,
                    sign, step, ALIGNED if block == STRIDE else 1, block=block, num_warps=4,
                )  # fmt: skip
    return parts


def _unpack_mask(mask: CountMask | None, unused: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Return counts, limits, the stride of the counts' rows and the sign; without a mask sign 0 and two `unused` tensors."""
    if mask is None:
        return unused, unused, 0, 0
    limits = _copy_to(unused.device, mask.slots, mask.at_least, mask.below)
    return mask.counts, limits, mask.counts.stride(0), mask.sign


@dataclass(frozen=True)
class _Blocks:
    """Column blocks that cross no tensor's boundary; the first `whole` of them begin and end at multiples of `ALIGNED`."""

    starts: Tensor
    stops: Tensor
    whole: int
    owner: Tensor  # which tensor each belongs to, as a matrix of zeros and ones


@lru_cache(maxsize=32)
def _blocks(tensors: tuple[int, ...], device: torch.device) -> _Blocks:
    whole: list[tuple[int, int, int]] = []
    ragged: list[tuple[int, int, int]] = []
    begin = 0
    for t, size in enumerate(tensors):
        end = begin + size
        first = min(end, -(-begin // ALIGNED) * ALIGNED)
        last = max(first, end // ALIGNED * ALIGNED)
        whole += [(a, min(a + PASS_ONE, last), t) for a in range(first, last, PASS_ONE)]
        ragged += [(a, b, t) for a, b in ((begin, first), (last, end)) if a < b]
        begin = end
    starts, stops, owners = torch.tensor(whole + ragged, dtype=torch.int64).reshape(-1, 3).T
    owner = torch.zeros(len(starts), len(tensors), dtype=torch.float64)
    owner[torch.arange(len(starts)), owners] = 1.0
    return _Blocks(starts.contiguous().to(device), stops.contiguous().to(device), len(whole), owner.to(device))


def _use(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one, which Triton launches on; without one Triton interprets kernels."""
    is_current = device.type != "cuda" or device.index in (None, torch.cuda.current_device())
    return nullcontext() if is_current else torch.cuda.device(device)


def _copy_to(device: torch.device, *columns: Integers) -> Tensor:
    return upload(torch.from_numpy(np.stack(columns)), device)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _count(  # type: ignore[no-untyped-def]
    deltas, rows, starts, stops, counts, limits, parts, row_stride, column_stride, slot_stride, clients, blocks,
    skipped,
    sign: tl.constexpr, step: tl.constexpr, multiple: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    b, i = skipped + tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + i)
    first, stop = tl.multiple_of(tl.load(starts + b), multiple), tl.multiple_of(tl.load(stops + b), multiple)
    total = tl.zeros((block,), dtype=tl.float64)
    kept = tl.zeros((block,), dtype=tl.float64)
    number = tl.zeros((block,), dtype=tl.int32)
    for start in range(first, stop, block):
        columns = start + tl.arange(0, block)
        inside = columns < stop
        x = tl.load(deltas + row * row_stride + columns * column_stride, mask=inside, other=0.0)
        if x.dtype != tl.float64:
            x = x.to(tl.float32)
        wide = x.to(tl.float64)
        square = wide * wide
        keep = inside
        if sign != 0:
            slot = tl.load(limits + i)
            low = tl.load(limits + clients + i).to(tl.int32)
            high = tl.load(limits + 2 * clients + i).to(tl.int32)
            up = (sign * x) >= 0
            at = counts + slot * slot_stride + columns
            n = tl.load(at, mask=inside, other=0).to(tl.int32) + tl.where(up, step, 0)
            tl.store(at, n.to(counts.dtype.element_ty), mask=inside)
            keep = inside & tl.where(up, n >= low, n < high)
        total += square
        kept += tl.where(keep, square, 0.0)
        number += keep.to(tl.int32)
    to = parts + i * blocks + b
    tl.store(to, tl.sum(total))
    tl.store(to + clients * blocks, tl.sum(kept))
    tl.store(to + 2 * clients * blocks, tl.sum(number).to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _average(  # type: ignore[no-untyped-def]
    before, after, deltas, rows, weights, counts, limits, unkept, whole, length, blocks, row_stride, column_stride,
    slot_stride, clients,
    sign: tl.constexpr, block: tl.constexpr, rest: tl.constexpr,
):  # fmt: skip
    """Average the columns up to `whole`, a multiple of `ALIGNED`, in blocks; a last program averages the rest."""
    b = tl.program_id(0)
    if b < blocks:
        _average_columns(
            before, after, deltas, rows, weights, counts, limits, unkept + b, b.to(tl.int64) * block, whole,
            row_stride, column_stride, slot_stride, clients, sign, block,
        )  # fmt: skip
    else:
        _average_columns(
            before, after, deltas, rows, weights, counts, limits, unkept + b, whole, length,
            row_stride, column_stride, slot_stride, clients, sign, rest,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _average_columns(  # type: ignore[no-untyped-def]
    before, after, deltas, rows, weights, counts, limits, unkept, first, last, row_stride, column_stride, slot_stride,
    clients,
    sign: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    columns = first + tl.arange(0, block)
    inside = columns < last
    numerator = tl.zeros((block,), dtype=tl.float64)
    denominator = tl.zeros((block,), dtype=tl.float64)
    for i in range(clients):
        row = tl.load(rows + i)
        x = tl.load(deltas + row * row_stride + columns * column_stride, mask=inside, other=0.0)
        if x.dtype != tl.float64:
            x = x.to(tl.float32)
        share = tl.load(weights + i) + tl.zeros((block,), dtype=tl.float64)
        if sign != 0:
            slot = tl.load(limits + i)
            low = tl.load(limits + clients + i).to(tl.int32)
            high = tl.load(limits + 2 * clients + i).to(tl.int32)
            n = tl.load(counts + slot * slot_stride + columns, mask=inside, other=0).to(tl.int32)
            share = tl.where(tl.where((sign * x) >= 0, n >= low, n < high), share, 0.0)
        numerator += share * x.to(tl.float64)
        denominator += share
    moved = denominator > 0
    update = tl.where(moved, numerator / tl.where(moved, denominator, 1.0), 0.0)
    old = tl.load(before + columns, mask=inside, other=0.0)
    new = (old.to(tl.float64) + update).to(before.dtype.element_ty)
    tl.store(after + columns, new, mask=inside)
    tl.store(unkept, tl.sum((inside & ~moved).to(tl.int32)))
