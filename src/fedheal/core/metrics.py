"""How well and how evenly a model serves several units: domains, or clients.

Accuracies are in percent. STD is the sample standard deviation (ddof=1) as in the FedHEAL paper's tables. With mean mu
and K units: gap = best - worst, CoV = STD/mu, Gini = sum_ij |x_i - x_j| / (2 K^2 mu), Jain = (sum x)^2 / (K sum x^2),
entropy of x / sum x (at most log K). Where all are 0 they are equal: Gini 0, Jain 1, entropy log K.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

LAST = 5  # a result is the mean over at most so many last evaluated rounds


def fairness(accuracy: Mapping[str, float]) -> dict[str, float]:
    """Return the mean, spread and evenness of accuracies by name (formulas: see the module).

    >>> even = fairness({"a": 50.0, "b": 50.0})
    >>> even["avg"], even["std"], even["worst"], even["jain"]
    (50.0, 0.0, 50.0, 1.0)
    >>> uneven = fairness({"a": 90.0, "b": 30.0})  # std: sqrt(2 * 30^2 / 1); gini: 2 * 60 / (2 * 4 * 60)
    >>> round(uneven["std"], 3), uneven["gap"], uneven["gini"], uneven["jain"]
    (42.426, 60.0, 0.25, 0.8)
    """
    if not accuracy:
        raise ValueError("there are no accuracies: give at least one")
    x = np.array(list(accuracy.values()), np.float64)
    k, total = len(x), float(x.sum())
    mean = total / k
    std = math.sqrt(((x - mean) ** 2).sum() / (k - 1)) if k > 1 else 0.0
    share = x / total if total > 0 else np.full(k, 1 / k)
    nonzero = share[share > 0]
    ordered = np.sort(x)
    worst, best = float(ordered[0]), float(ordered[-1])
    return {
        "avg": mean,
        "std": std,
        "worst": worst,
        "best": best,
        "gap": best - worst,
        "cov": std / mean if mean > 0 else 0.0,
        "gini": _sum_differences(ordered) / (k * k * mean) if mean > 0 else 0.0,
        "jain": float(total**2 / (k * (x**2).sum())) if total > 0 else 1.0,
        "entropy": float(-(nonzero * np.log(nonzero)).sum()),
    }


def _sum_differences(ordered: NDArray[np.float64]) -> float:
    """Return the sum of |x_i - x_j| over pairs of sorted values: the gap after the first i lies within i * (K - i) pairs."""
    below = np.arange(1, len(ordered))
    return float(((ordered[1:] - ordered[:-1]) * below * (len(ordered) - below)).sum())


def count_averaged(evaluated: int) -> int:
    """Return how many last rounds a result is the mean of: five, but at most a quarter of the evaluated rounds.

    The first rounds of a short run are no part of its result.

    >>> [count_averaged(evaluated) for evaluated in (1, 5, 8, 20, 200)]
    [1, 1, 2, 5, 5]
    """
    return max(1, min(LAST, evaluated // 4))


def last_mean(rounds: Sequence[Mapping[str, float]], last: int | None = None) -> dict[str, float]:
    """Return, by unit, the mean over the last rounds in which it was evaluated; by default `count_averaged` of them.

    >>> last_mean([{"a": 0.0}, {"a": 1.0, "b": 7.0}, {"a": 2.0}], last=2)
    {'a': 1.5, 'b': 7.0}
    """
    by_unit: dict[str, list[float]] = {}
    for accuracy in rounds:
        for unit, value in accuracy.items():
            by_unit.setdefault(unit, []).append(value)
    return {unit: float(np.mean(x[-(last or count_averaged(len(x))) :])) for unit, x in by_unit.items()}
