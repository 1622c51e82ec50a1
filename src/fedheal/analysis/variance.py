"""Variance components of a crossed design: how much each source of chance moves a result.

Every level of a factor (say 10 draws of images) is run once with every level of the others (say 3 initial models). The
model is random effects: `y = mean + split + init + split x init`, each with a variance of its own. The estimates are
those of the balanced analysis of variance (method of moments). Each factor and interaction has a mean square. The
components follow from the expected values of the mean squares. An estimate below 0 becomes 0. The interaction of all
factors holds whatever else differs between runs.

A factor with n levels has n - 1 degrees of freedom. `get_sd_range` says how uncertain they leave a standard deviation, even if
nothing else varied and effects were normal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
import scipy.stats

LEVEL = 0.95


@dataclass(frozen=True)
class Component:
    """One factor, or an interaction of several: its estimated variance, the mean square and its degrees of freedom."""

    factors: tuple[str, ...]
    variance: float  # 0 where the estimate is negative
    mean_square: float
    df: int

    @property
    def name(self) -> str:
        """The factors, joined: `split x init`."""
        return " x ".join(self.factors)

    @property
    def sd(self) -> float:
        """The standard deviation that the component alone would give."""
        return math.sqrt(self.variance)


@dataclass(frozen=True)
class Decomposition:
    """The mean over all runs, its standard error over new levels of every factor, and the components."""

    levels: Mapping[str, int]
    mean: float
    error: float
    components: tuple[Component, ...]

    def get_share(self, component: Component) -> float | None:
        """Return a component's share of the sum of all, or None if that is 0."""
        total = sum(c.variance for c in self.components)
        return component.variance / total if total else None


def estimate_components(values: npt.ArrayLike, factors: Sequence[str]) -> Decomposition:
    """Estimate the variance components of results of which axis `i` goes over the levels of `factors[i]`.

    Raises:
        ValueError: A factor has fewer than two levels, there are more or fewer axes than factors, or a value is not finite.

    >>> found = estimate_components([[1, 2, 3], [3, 6, 6]], ["split", "init"])
    >>> [(c.name, round(c.variance, 2), c.df) for c in found.components]
    [('split', 4.33, 1), ('init', 1.5, 2), ('split x init', 0.5, 2)]
    """
    x = np.asarray(values, np.float64)
    if x.ndim != len(factors) or not factors:
        raise ValueError(f"{len(factors)} factors need as many axes, got an array of shape {x.shape}")
    if min(x.shape) < 2:
        raise ValueError(f"every factor needs at least two levels, got {dict(zip(factors, x.shape, strict=True))}")
    if not np.isfinite(x).all():
        raise ValueError("variance components need finite values")
    axes = range(x.ndim)
    sources = [set(s) for size in axes for s in combinations(axes, size + 1)]
    degrees = [math.prod(x.shape[i] - 1 for i in source) for source in sources]
    squares = [_sum_squares(x, source) / df for source, df in zip(sources, degrees, strict=True)]
    components = []
    for source, square, df in zip(sources, squares, degrees, strict=True):
        # E[mean square of S] is the sum over T containing S of T's variance times the runs per combination of T's levels.
        signed = sum((-1) ** len(t - source) * ms for t, ms in zip(sources, squares, strict=True) if t >= source)
        variance = max(signed / _count_cells(x.shape, set(axes) - source), 0.0)
        components.append(Component(tuple(factors[i] for i in sorted(source)), variance, square, df))
    error = sum(c.variance / _count_cells(x.shape, s) for c, s in zip(components, sources, strict=True))
    levels = dict(zip(factors, x.shape, strict=True))
    return Decomposition(levels, float(x.mean()), math.sqrt(error), tuple(components))


def get_sd_range(df: int) -> tuple[float, float]:
    """Return between how many times an estimated standard deviation the true one lies (95 %, normal effects).

    >>> [tuple(round(x, 1) for x in get_sd_range(df)) for df in (2, 4, 9)]
    [(0.5, 6.3), (0.6, 2.9), (0.7, 1.8)]
    """
    tails = (1 + LEVEL) / 2, (1 - LEVEL) / 2
    low, high = (math.sqrt(df / scipy.stats.chi2.ppf(tail, df)) for tail in tails)
    return low, high


def _sum_squares(x: npt.NDArray[np.float64], source: set[int]) -> float:
    """Return the sum of squares of a factor or interaction over all runs."""
    effect = x
    for axis in range(x.ndim):
        mean = effect.mean(axis, keepdims=True)
        effect = effect - mean if axis in source else mean
    return float((effect**2).sum()) * x.size / effect.size


def _count_cells(shape: Sequence[int], axes: Iterable[int]) -> int:
    return math.prod(shape[i] for i in axes)
