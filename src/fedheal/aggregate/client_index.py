"""Columns over all clients ever seen, in the order of their first appearance (newcomers of one round by id)."""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedheal.core.arrays import Floats, Integers

T = TypeVar("T", bound=np.generic)


def index_clients(known: tuple[str, ...], cohort: tuple[str, ...]) -> tuple[tuple[str, ...], Integers]:
    """Append this cohort's newcomers to the known clients, and return all of them and the position of each in the cohort.

    >>> index_clients(("b",), ("a", "b", "c"))
    (('b', 'a', 'c'), array([1, 0, 2]))
    """
    positions = {client: i for i, client in enumerate(known)}
    newcomers = tuple(sorted(set(cohort) - positions.keys()))
    positions |= {client: len(known) + i for i, client in enumerate(newcomers)}
    return known + newcomers, np.array([positions[client] for client in cohort], np.int64)


def extend_column(column: NDArray[T], length: int, fill: Any = 0) -> NDArray[T]:
    """Copy a column to this length, with `fill` for the newcomers."""
    longer = np.full(length, fill, column.dtype)
    longer[: len(column)] = column
    return longer


def extend_shares(shares: Floats, length: int) -> Floats:
    """Copy a column of shares to this length: each newcomer starts with `1/length`, the others shrink in proportion.

    >>> extend_shares(np.array([0.75, 0.25]), 4).tolist()
    [0.375, 0.125, 0.25, 0.25]
    """
    longer = extend_column(shares, length, 1 / length)
    longer[: len(shares)] *= len(shares) / length
    return longer
