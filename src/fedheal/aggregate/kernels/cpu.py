"""The fast CPU kernel: two fused passes over the updates, compiled by numba, spread over threads by column blocks.

The first pass counts signs and measures what is kept. The second computes the mask again from the counts, and averages.
So no mask is ever stored. Compiled functions release the GIL and take blocks of columns from a small thread pool
(`torch.get_num_threads()` wide). Block boundaries and the order of sums are fixed, whatever the number of threads.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedheal.aggregate.draft import CountMask, UpdateNorms
from fedheal.aggregate.kernels import reference
from fedheal.aggregate.validate import NonFinite
from fedheal.core.arrays import Floats, Integers

PASS_ONE = 1 << 15  # columns summed at a time; sums of blocks are added in order
STRIP = 1024  # columns of the first pass at a time: each step finds them in the nearest cache
PASS_TWO = 4096  # columns: both float64 accumulators stay in a near cache
CONVERT = 1 << 18  # columns turned into float32 at a time where numba cannot read the dtype
REASSOCIATE = {"reassoc", "contract", "nsz"}  # lets sums use vector registers; NaN and infinity keep their meaning


def observe(deltas: Tensor, rows: Integers, tensors: Sequence[int], mask: CountMask | None) -> UpdateNorms:
    limits = _unpack_mask(rows, mask)
    edges, owner = _edges(tensors, PASS_ONE)
    sound = np.ones((len(rows), len(owner)), np.bool_)
    squares = np.zeros((len(rows), len(owner)))
    number = np.zeros((len(rows), len(owner)), np.int64)

    def work(matrix: NDArray[Any], first: int, a: int, b: int) -> None:
        out = sound[:, a:b], squares[:, a:b], number[:, a:b]
        _scan_blocks(matrix, rows, *limits, first, edges[a : b + 1], *out)

    def by_tensor(values: NDArray[Any]) -> Floats:
        return np.stack([np.bincount(owner, row, len(tensors)) for row in values]).astype(np.float64)

    _run_blocks(work, deltas, edges, cost=len(rows) * PASS_ONE)
    with np.errstate(over="ignore", invalid="ignore"):
        bad = ~(sound.all(axis=1) & np.isfinite(squares.sum(axis=1)))
    if not bad.any():
        return UpdateNorms(by_tensor(squares), by_tensor(number).astype(np.int64))
    if mask is not None:
        for first, matrix in _chunks(deltas, edges):
            _uncount(matrix, rows, mask.counts.numpy()[:, first:], mask.slots, mask.sign)
    raise NonFinite(rows[bad].tolist())


def measure(deltas: Tensor, rows: Integers, tensors: Sequence[int]) -> UpdateNorms:
    return observe(deltas, rows, tensors, None)


def average(
    params: Tensor, deltas: Tensor, rows: Integers, weights: Floats, mask: CountMask | None
) -> tuple[Tensor, int]:
    readable = params if params.dtype in (torch.float32, torch.float64) else params.to(torch.float32)
    before = readable.contiguous().numpy()
    after = np.empty_like(before)
    edges, _ = _edges([deltas.shape[1]], PASS_TWO)
    unkept = np.zeros(len(edges) - 1, np.int64)
    limits = _unpack_mask(rows, mask)

    def work(matrix: NDArray[Any], first: int, a: int, b: int) -> None:
        _mean_blocks(matrix, rows, weights, *limits, first, edges[a : b + 1], before, after, unkept[a:b])

    _run_blocks(work, deltas, edges, cost=len(rows) * PASS_TWO)
    return torch.from_numpy(after).to(params.dtype), int(unkept.sum())


def mask_block(deltas: Tensor, rows: Integers, mask: CountMask | None, start: int, stop: int) -> Tensor:
    if mask is None or deltas.dtype not in (torch.float32, torch.float64) or not deltas.is_contiguous():
        return reference.mask_block(deltas, rows, mask, start, stop)
    block = np.empty((len(rows), stop - start))
    _fill_masked(deltas.numpy(), rows, *_unpack_mask(rows, mask), start, stop, block)
    return torch.from_numpy(block)


def _unpack_mask(rows: Integers, mask: CountMask | None) -> tuple[Any, Integers, Any, Any, int]:
    """Return counts, slots, thresholds and sign; sign 0 if there are no counts and everything is kept."""
    if mask is None:
        none = np.zeros(len(rows), np.uint8)
        return np.zeros((1, 1), np.uint8), np.zeros(len(rows), np.int64), none, none, 0
    table = mask.counts.numpy()
    return table, mask.slots, mask.at_least.astype(table.dtype), mask.below.astype(table.dtype), mask.sign


def _edges(tensors: Sequence[int], width: int) -> tuple[Integers, Integers]:
    """Return column blocks of at most `width` that cross no tensor's boundary, as edges, and the tensor of each."""
    edges, owner = [0], []
    for t, size in enumerate(tensors):
        stops = [*range(edges[-1] + width, edges[-1] + size, width), edges[-1] + size] if size else []
        edges += stops
        owner += [t] * len(stops)
    return np.array(edges, np.int64), np.array(owner, np.int64)


def _chunks(deltas: Tensor, edges: Integers) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the updates as arrays that numba reads: all at once if no copy is needed, else a chunk of columns at a time."""
    if deltas.dtype in (torch.float32, torch.float64) and deltas.is_contiguous():
        yield 0, deltas.numpy()
        return
    dtype = torch.float64 if deltas.dtype == torch.float64 else torch.float32
    first = 0
    for edge, following in zip(edges[1:], [*edges[2:], None], strict=True):
        if following is None or following - first > CONVERT:
            yield first, deltas[:, first:edge].to(dtype).contiguous().numpy()
            first = int(edge)


def _run_blocks(
    work: Callable[[NDArray[Any], int, int, int], None], deltas: Tensor, edges: Integers, cost: int
) -> None:
    """Do `work(matrix, first column, a, b)` for blocks `a:b`, in threads if there is enough work for that to pay."""
    threads = torch.get_num_threads()
    for first, matrix in _chunks(deltas, edges):
        start, stop = np.searchsorted(edges, [first, first + matrix.shape[1]]).tolist()
        if threads == 1 or (stop - start) * cost < 1 << 20:
            work(matrix, first, start, stop)
            continue
        # This only compiles: in a thread, that could wait for ever for an import of this one.
        work(matrix, first, start, start)
        parts = np.linspace(start, stop, min(stop - start, 4 * threads) + 1).astype(int)
        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(work, matrix, first, a, b) for a, b in itertools.pairwise(parts)]:
                future.result()


# Each of these functions does one thing to a strip that stays in the nearest cache. So each gets vectors of its own
# width. In one loop bytes, float32 and float64 would all go at the pace of the widest.


@numba.njit(nogil=True, cache=True)
def _tick(x, counts, low, high, sign, kept):  # type: ignore[no-untyped-def]
    """Count a strip's signs, and mark the entries that are kept."""
    one, zero, s = counts.dtype.type(1), counts.dtype.type(0), x.dtype.type(sign)
    for j in range(x.size):
        up = s * x[j] >= 0
        n = counts.dtype.type(counts[j] + (one if up else zero))
        counts[j] = n
        kept[j] = np.uint8(1) if ((n >= low) if up else (n < high)) else np.uint8(0)


@numba.njit(nogil=True, cache=True)
def _number(kept):  # type: ignore[no-untyped-def]
    total = np.int32(0)
    for j in range(kept.size):
        total += np.int32(kept[j])
    return total


@numba.njit(nogil=True, cache=True)
def _only(x, kept, out):  # type: ignore[no-untyped-def]
    for j in range(x.size):
        out[j] = x[j] if kept[j] else x.dtype.type(0)


@numba.njit(nogil=True, cache=True)
def _largest(bits):  # type: ignore[no-untyped-def]
    """Return the largest magnitude of float32 numbers, as bits: infinity and NaN are the largest of all."""
    top = np.int32(0)
    for j in range(bits.size):
        top = max(top, bits[j] & np.int32(0x7FFFFFFF))
    return top


@numba.njit(nogil=True, cache=True, fastmath=REASSOCIATE)
def _square(x):  # type: ignore[no-untyped-def]
    total = 0.0
    for j in range(x.size):
        y = np.float64(x[j])
        total += y * y
    return total


@numba.njit(nogil=True, cache=True)
def _sound(x):  # type: ignore[no-untyped-def]
    """Return whether all numbers are finite, and their squares too."""
    if x.itemsize == 4:  # in float64, in which they are squared, they cannot overflow
        return _largest(x.view(np.int32)) < np.int32(0x7F800000)
    return np.isfinite(_square(x))


@numba.njit(nogil=True, cache=True)
def _scan_blocks(matrix, rows, table, slots, low, high, sign, first, edges, sound, squares, number):  # type: ignore[no-untyped-def]
    kept, only = np.empty(STRIP, np.uint8), np.empty(STRIP, matrix.dtype)
    for i in range(rows.size):
        for b in range(edges.size - 1):
            for start in range(edges[b], edges[b + 1], STRIP):
                stop = min(start + STRIP, edges[b + 1])
                x = matrix[rows[i], start - first : stop - first]
                sound[i, b] &= _sound(x)
                if sign == 0:
                    squares[i, b] += _square(x)
                    number[i, b] += x.size
                else:
                    k, z = kept[: x.size], only[: x.size]
                    _tick(x, table[slots[i], start:stop], low[i], high[i], sign, k)
                    _only(x, k, z)
                    squares[i, b] += _square(z)
                    number[i, b] += _number(k)


@numba.njit(nogil=True, cache=True)
def _uncount(matrix, rows, table, slots, sign):  # type: ignore[no-untyped-def]
    for i in range(rows.size):
        for j in range(matrix.shape[1]):
            if sign * matrix[rows[i], j] >= 0:
                table[slots[i], j] -= 1


@numba.njit(nogil=True, cache=True)
def _add(x, weight, numerator, denominator):  # type: ignore[no-untyped-def]
    for j in range(x.size):
        numerator[j] += weight * x[j]
        denominator[j] += weight


@numba.njit(nogil=True, cache=True)
def _add_four(x0, x1, x2, x3, weight, numerator, denominator):  # type: ignore[no-untyped-def]
    # Four clients per sweep over the accumulators, added in the same order as one at a time: the same bits.
    w0, w1, w2, w3 = weight[0], weight[1], weight[2], weight[3]
    for j in range(x0.size):
        numerator[j] = (((numerator[j] + w0 * x0[j]) + w1 * x1[j]) + w2 * x2[j]) + w3 * x3[j]
        denominator[j] = (((denominator[j] + w0) + w1) + w2) + w3


@numba.njit(nogil=True, cache=True)
def _add_kept(x, counts, low, high, sign, weight, numerator, denominator):  # type: ignore[no-untyped-def]
    s = x.dtype.type(sign)
    for j in range(x.size):
        v = weight if ((counts[j] >= low) if s * x[j] >= 0 else (counts[j] < high)) else 0.0
        numerator[j] += v * x[j]
        denominator[j] += v


@numba.njit(nogil=True, cache=True)
def _add_four_kept(x0, x1, x2, x3, c0, c1, c2, c3, low, high, sign, weight, numerator, denominator):  # type: ignore[no-untyped-def]
    l0, l1, l2, l3 = low[0], low[1], low[2], low[3]
    h0, h1, h2, h3 = high[0], high[1], high[2], high[3]
    w0, w1, w2, w3 = weight[0], weight[1], weight[2], weight[3]
    s = x0.dtype.type(sign)
    for j in range(x0.size):
        n, d = numerator[j], denominator[j]
        v = w0 if ((c0[j] >= l0) if s * x0[j] >= 0 else (c0[j] < h0)) else 0.0
        n += v * x0[j]
        d += v
        v = w1 if ((c1[j] >= l1) if s * x1[j] >= 0 else (c1[j] < h1)) else 0.0
        n += v * x1[j]
        d += v
        v = w2 if ((c2[j] >= l2) if s * x2[j] >= 0 else (c2[j] < h2)) else 0.0
        n += v * x2[j]
        d += v
        v = w3 if ((c3[j] >= l3) if s * x3[j] >= 0 else (c3[j] < h3)) else 0.0
        n += v * x3[j]
        d += v
        numerator[j], denominator[j] = n, d


@numba.njit(nogil=True, cache=True)
def _mean_blocks(matrix, rows, weights, table, slots, low, high, sign, first, edges, before, after, unkept):  # type: ignore[no-untyped-def]
    numerator, denominator = np.empty(PASS_TWO), np.empty(PASS_TWO)
    for b in range(edges.size - 1):
        start, stop = edges[b], edges[b + 1]
        here = slice(start - first, stop - first)
        n, d = numerator[: stop - start], denominator[: stop - start]
        n[:] = 0.0
        d[:] = 0.0
        fours = rows.size // 4 * 4
        for i in range(0, fours, 4):
            x0, x1 = matrix[rows[i], here], matrix[rows[i + 1], here]
            x2, x3 = matrix[rows[i + 2], here], matrix[rows[i + 3], here]
            if sign == 0:
                _add_four(x0, x1, x2, x3, weights[i : i + 4], n, d)
            else:
                c0, c1 = table[slots[i], start:stop], table[slots[i + 1], start:stop]
                c2, c3 = table[slots[i + 2], start:stop], table[slots[i + 3], start:stop]
                four = slice(i, i + 4)
                _add_four_kept(x0, x1, x2, x3, c0, c1, c2, c3, low[four], high[four], sign, weights[four], n, d)
        for i in range(fours, rows.size):
            if sign == 0:
                _add(matrix[rows[i], here], weights[i], n, d)
            else:
                _add_kept(matrix[rows[i], here], table[slots[i], start:stop], low[i], high[i], sign, weights[i], n, d)
        none = 0
        for j in range(stop - start):
            if d[j] > 0.0:
                after[start + j] = before[start + j] + n[j] / d[j]
            else:
                after[start + j] = before[start + j]
                none += 1
        unkept[b] = none


@numba.njit(nogil=True, cache=True)
def _fill_masked(matrix, rows, table, slots, low, high, sign, start, stop, block):  # type: ignore[no-untyped-def]
    s = matrix.dtype.type(sign)
    for i in range(rows.size):
        x, y = matrix[rows[i], start:stop], block[i]
        counts, least, most = table[slots[i], start:stop], low[i], high[i]
        for j in range(x.size):
            keep = (counts[j] >= least) if s * x[j] >= 0 else (counts[j] < most)
            y[j] = x[j] if keep else matrix.dtype.type(0)
