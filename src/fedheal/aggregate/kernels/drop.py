"""FedPW's loops over one client's tensor, compiled by numba: find the smallest entries, drop them, add up what is left."""

import numba
import numpy as np

from fedheal.core.arrays import Floats

SMALL = 1 << 12  # entries: fewer are all candidates


def add_undropped(values: Floats, number: int, weight: float, step: Floats, z: Floats, zz: Floats) -> float:
    """Zero the `number` smallest entries in place, and return their mean size; 0 if there are none.

    Of equal entries the first are zeroed. Then, with x the remaining entries and `y = x / |x|`, add:
    `step += weight x`, `z += y`, `zz += y^2`.
    """
    limit, ties = find_limit(values, number) if number else (-1.0, 0)
    dropped: float = _add(values, limit, ties, weight, step, z, zz)
    return dropped / number if number else 0.0


def find_limit(values: Floats, number: int) -> tuple[float, int]:
    """Return the `number`-th smallest |value|, and how many entries of exactly that size are among the `number` smallest."""
    candidates, below = (np.abs(values), 0) if values.size <= SMALL else _find_candidates(values, number)
    limit = np.partition(candidates, number - below - 1)[number - below - 1]
    return float(limit), number - below - int((candidates < limit).sum())


@numba.njit(nogil=True, cache=True)
def _find_candidates(values, number):  # type: ignore[no-untyped-def]
    """Return sizes among which the `number`-th smallest is, and how many others are smaller than all of these.

    Floats that are not negative sort like their bits: the exponent and four digits leave few to choose from.
    """
    bits = values.view(np.uint64)
    histogram = np.zeros(1 << 15, np.int64)
    for j in range(values.size):
        histogram[(bits[j] << np.uint64(1)) >> np.uint64(49)] += 1
    below, digit = 0, 0
    while below + histogram[digit] < number:
        below += histogram[digit]
        digit += 1
    candidates, filled = np.empty(histogram[digit]), 0
    for j in range(values.size):
        if (bits[j] << np.uint64(1)) >> np.uint64(49) == np.uint64(digit):
            candidates[filled] = abs(values[j])
            filled += 1
    return candidates, below


@numba.njit(nogil=True, cache=True)
def _add(values, limit, ties, weight, step, z, zz):  # type: ignore[no-untyped-def]
    dropped, square = 0.0, 0.0
    for j in range(values.size):
        size = abs(values[j])
        if size < limit or (size == limit and ties > 0):
            if size == limit:
                ties -= 1
            dropped += size
            values[j] = 0.0
        else:
            square += size * size
    norm = np.sqrt(square) if square > 0 else 1.0
    for j in range(values.size):
        unit = values[j] / norm
        step[j] += weight * values[j]
        z[j] += unit
        zz[j] += unit * unit
    return dropped
