"""Clients ever seen, in the order of their first appearance (newcomers of one round by id)."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedheal.core.arrays import Floats, Integers

T = TypeVar("T", bound=np.generic)


def enrol(known: tuple[str, ...], cohort: tuple[str, ...]) -> tuple[tuple[str, ...], Integers]:
    """All clients with this cohort's newcomers appended, and where each of the cohort stands.

    >>> enrol(("b",), ("a", "b", "c"))
    (('b', 'a', 'c'), array([1, 0, 2]))
    """
    place = {client: i for i, client in enumerate(known)}
    newcomers = tuple(sorted(set(cohort) - place.keys()))
    place |= {client: len(known) + i for i, client in enumerate(newcomers)}
    return known + newcomers, np.array([place[client] for client in cohort], np.int64)


def extended(column: NDArray[T], length: int, fill: Any = 0) -> NDArray[T]:
    """A copy of `column` with room for the newcomers."""
    longer = np.full(length, fill, column.dtype)
    longer[: len(column)] = column
    return longer


def uniform_start(shares: Floats, length: int) -> Floats:
    """A copy of `shares` with room for the newcomers: each starts with `1/length`, the others make room in proportion.

    >>> uniform_start(np.array([0.75, 0.25]), 4).tolist()
    [0.375, 0.125, 0.25, 0.25]
    """
    longer = extended(shares, length, 1 / length)
    longer[: len(shares)] *= len(shares) / length
    return longer
