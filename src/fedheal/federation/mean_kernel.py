"""The weighted mean of replies in one pass over their own arrays, with the norms of their updates.

The sums run in the order and precision of `fedheal.aggregate.kernels.cpu`, so both give the same bits.
"""

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from fedheal.core.arrays import Floats

STRIP = 4096  # numbers that are measured and added before the next ones: those of four clients stay in a near cache
REASSOCIATE = {"reassoc", "contract", "nsz"}  # lets sums of squares use vector registers


def average_block(
    arrays: Sequence[NDArray[Any]], model: NDArray[Any], share: NDArray[Any], weights: Floats, after: NDArray[Any]
) -> Floats:
    """Write a block of the new model, and return the sum of squares of each client's update in it.

    `share` is 1 for clients that sent a whole model and 0 for those that sent a difference. All but weights is float32.
    Clients come in fours: one with weight 0 whose array is the model changes no bit.
    """
    total, squares = np.zeros(len(model)), np.zeros(len(arrays))
    for i in range(0, len(arrays), 4):
        four = slice(i, i + 4)
        x0, x1, x2, x3 = arrays[four]
        _add_block(x0, x1, x2, x3, model, share[four], weights[four], total, squares[four])
    _finish(model, total, np.cumsum(weights)[-1], after)
    return squares


def compile_kernel() -> None:
    """Compile, or load what was compiled before. In a thread, that could wait for ever for an import of another one."""
    empty = np.empty(0, np.float32)
    average_block([freeze(empty)] * 4, empty, np.ones(4, np.float32), np.ones(4), empty)


def freeze(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view that cannot be written to: numba compiles for each kind of array, and replies are of this one."""
    view = array.view()
    view.flags.writeable = False
    return view


@numba.njit(nogil=True, cache=True, fastmath=REASSOCIATE)
def _square_four(x0, x1, x2, x3, model, share, squares):  # type: ignore[no-untyped-def]
    s0, s1, s2, s3 = share[0], share[1], share[2], share[3]
    q0 = q1 = q2 = q3 = model.dtype.type(0)
    for j in range(model.size):
        d0, d1, d2, d3 = x0[j] - s0 * model[j], x1[j] - s1 * model[j], x2[j] - s2 * model[j], x3[j] - s3 * model[j]
        q0 += d0 * d0
        q1 += d1 * d1
        q2 += d2 * d2
        q3 += d3 * d3
    squares[0] += q0
    squares[1] += q1
    squares[2] += q2
    squares[3] += q3


@numba.njit(nogil=True, cache=True)
def _add_four(x0, x1, x2, x3, model, share, weights, total):  # type: ignore[no-untyped-def]
    s0, s1, s2, s3 = share[0], share[1], share[2], share[3]
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    for j in range(model.size):
        d0, d1, d2, d3 = x0[j] - s0 * model[j], x1[j] - s1 * model[j], x2[j] - s2 * model[j], x3[j] - s3 * model[j]
        total[j] = (((total[j] + w0 * d0) + w1 * d1) + w2 * d2) + w3 * d3


@numba.njit(nogil=True, cache=True)
def _add_block(x0, x1, x2, x3, model, share, weights, total, squares):  # type: ignore[no-untyped-def]
    for start in range(0, model.size, STRIP):
        s = slice(start, min(start + STRIP, model.size))
        _square_four(x0[s], x1[s], x2[s], x3[s], model[s], share, squares)
        _add_four(x0[s], x1[s], x2[s], x3[s], model[s], share, weights, total[s])


@numba.njit(nogil=True, cache=True)
def _finish(model, total, weight, after):  # type: ignore[no-untyped-def]
    for j in range(model.size):
        after[j] = model[j] + total[j] / weight
