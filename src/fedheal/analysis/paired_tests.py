"""Compare methods over seeds, where two methods' runs are paired by seed.

A seed fixes the split, the cohorts and the initial model. So its effect on both methods cancels in their difference.
Values are in percent, differences in points. Seeds count as independent draws.

- `mean`, `sd`: over seeds. sd is the sample standard deviation (ddof=1): the spread of a run, not the error of the
  mean.
- `low`, `high`: a 95 % interval for the mean over all seeds one could have drawn. With fewer than 8 values it is Student's t,
  which assumes near-normal values. From 8 on it is a symmetric studentized bootstrap, once to twice as wide as t;
  docs/statistics.md has the measured coverage of both. One value has no interval.
- `p_value`: two-sided, from flipping the signs of the differences, in all 2^n ways up to 30 seeds. It is exact if swapping two
  equal methods within a seed would change nothing, and assumes no normality. With n seeds it is at least 2 / 2^n.
- `p_adjusted`: Holm's correction. The chance of even one false claim in the whole family stays at most alpha. Intervals are
  not adjusted.

A test set is a sample too: see `fedheal.analysis.standard_error`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import scipy
from numpy.typing import ArrayLike

from fedheal.core.arrays import Floats
from fedheal.core.metrics import fairness

__all__ = ["Comparison", "compare_all", "compare_pair", "seeds_needed", "verdict"]

Seed = TypeVar("Seed", bound=Hashable)

LEVEL = 0.95  # of intervals
BOOTSTRAP_FROM = 8  # values; with fewer, a bootstrap-t interval covers too little (n = 3) or is far too wide (n = 5)
RESAMPLES = 9_999
EXACT_UP_TO = 30  # seeds; two halves of 2^15 sums each
FLIPS = 99_999  # random sign flips above that
HIGHER_IS_BETTER = {"avg": True, "worst": True, "best": True, "std": False, "gap": False}  # the metrics in percent


@dataclass(frozen=True)
class Comparison:
    """`a - b` over the seeds that both have; the module's docstring explains each number.

    Attributes:
        a: The method that is compared.
        b: The method that it is compared with.
        n: The number of seeds that both have.
        mean: The mean difference.
        sd: The standard deviation of the differences; None with one seed.
        low: The lower end of the interval of the mean; None with one seed.
        high: The upper end.
        p_value: The p-value of the paired test.
        equal: The number of seeds in which both are the same.
        p_adjusted: The p-value after the correction for the family.
        smallest_p_adjusted: The smallest that any data could give.
        comparisons: The size of the family that was corrected for.
        unpaired: The number of seeds that only one of the two has; they are left out.
        metric: The name of the value that is compared.
    """

    a: str
    b: str
    n: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None
    p_value: float
    equal: int
    p_adjusted: float
    smallest_p_adjusted: float
    comparisons: int = 1
    unpaired: int = 0
    metric: str = ""


def compare_pair(a: ArrayLike, b: ArrayLike, names: tuple[str, str] = ("a", "b")) -> Comparison:
    """Compare two methods.

    Args:
        a: The values of one method.
        b: Those of the other; entry i of `a` and `b` belongs to the same seed.
        names: The names of the methods.

    Returns:
        The comparison.

    >>> c = compare_pair([72.0, 74.0, 71.0, 75.0, 73.0, 76.0], [70.0, 71.0, 70.0, 71.0, 71.0, 72.0])
    >>> round(c.mean, 2), round(c.low, 2), round(c.high, 2), c.p_value
    (2.67, 1.4, 3.94, 0.03125)
    """
    d = np.sort(_subtract(a, b))  # not even rounding may depend on the order of the seeds
    n, p = len(d), sign_flip_p(d)
    low, high = (None, None) if n == 1 else map(float, mean_interval(d))
    return Comparison(
        a=names[0],
        b=names[1],
        n=n,
        mean=float(d.mean()),
        sd=None if n == 1 else float(d.std(ddof=1)),
        low=low,
        high=high,
        p_value=p,
        equal=int((d == 0).sum()),
        p_adjusted=p,
        smallest_p_adjusted=smallest_p(n),
    )


def mean_interval(
    values: ArrayLike, resamples: int = RESAMPLES, generator: np.random.Generator | None = None
) -> tuple[Floats, Floats]:
    """Return the ends of an interval for the mean, along the last axis (at least two values).

    The random generator has a fixed seed by default. The order of the values does not matter.

    >>> low, high = mean_interval([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]])
    >>> low.round(2).tolist(), high.round(2).tolist()
    ([-0.48, 5.0], [4.48, 5.0])
    """
    x = np.sort(np.asarray(values, np.float64), axis=-1)
    n = x.shape[-1]
    if n < 2:
        raise ValueError("an interval for a mean needs at least two values")
    mean, error = x.mean(-1), x.std(-1, ddof=1) / math.sqrt(n)
    quantile: Floats | float = float(scipy.stats.t.ppf(0.5 + LEVEL / 2, n - 1))
    if n >= BOOTSTRAP_FROM:
        # One wild value can make it dozens of times too wide; limited to twice Student's width, it covers as much.
        free = _find_studentized_quantile(x, resamples, generator or np.random.default_rng(0))
        quantile = np.clip(free, quantile, 2 * quantile)
    return mean - quantile * error, mean + quantile * error


def _find_studentized_quantile(x: Floats, resamples: int, generator: np.random.Generator) -> Floats:
    """Return the quantile of |t| over resamples, which holds up better under heavy tails than two separate tails."""
    n = x.shape[-1]
    centred = x - x.mean(-1, keepdims=True)
    half = generator.multinomial(n, np.full(n, 1 / n), size=(resamples + 1) // 2).T / n
    weights = np.concatenate([half, half[::-1]], axis=1)  # of sorted values, so that a - b and b - a mirror each other
    mean = centred @ weights
    variance = (centred**2) @ weights - mean**2
    # A resample of equal values says nothing about the scale: it counts as t = 0, and Student's quantile is the floor.
    tiny = 1e-12 * (centred**2).mean(-1, keepdims=True)
    t = np.abs(mean) / np.sqrt(np.where(variance > tiny, variance, np.inf) / (n - 1))
    return np.asarray(np.quantile(t, LEVEL, axis=-1), np.float64)


def sign_flip_p(differences: ArrayLike) -> float:
    """Return the two-sided p of the mean: the share of sign flips whose mean is at least as far from 0 as the observed one.

    >>> sign_flip_p([1.0, 2.0, 3.0])
    0.25
    >>> sign_flip_p([0.0, 0.0])
    1.0
    """
    x = _check_values(differences)
    d = np.sort(np.abs(x))
    observed = abs(float(np.sum(x)))
    least = observed - 1e-9 * float(d.sum())  # rounding must not exclude flips that tie with the observed sum
    if least <= 0:
        return 1.0
    if len(d) > EXACT_UP_TO:
        return _random_flips_p(d, least)
    # Search the sorted sums of one half of the seeds with those of the other: 2^(n/2) work rather than 2^n.
    left, right = _sum_flips(d[::2]), np.sort(_sum_flips(d[1::2]))
    above = len(left) * len(right) - int(np.searchsorted(right, least - left, side="left").sum())
    return float(2 * above / 2 ** len(d))  # flips come in pairs, +sum and -sum


def _sum_flips(d: Floats) -> Floats:
    sums = np.zeros(1)
    for value in d:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def _random_flips_p(d: Floats, least: float) -> float:
    signs = np.random.default_rng(0).integers(0, 2, size=(FLIPS, len(d)), dtype=np.int8) * 2 - 1
    hits = int((np.abs(signs @ d) >= least).sum())
    return (hits + 1) / (FLIPS + 1)  # the observed signs are one of the flips: p is never 0


def smallest_p(n: int) -> float:
    """Return the smallest two-sided p that n pairs can give, whatever the data.

    >>> [smallest_p(n) for n in (1, 3, 5, 6)]
    [1.0, 0.25, 0.0625, 0.03125]
    """
    return min(1.0, 2 / 2**n) if n <= EXACT_UP_TO else 1 / (FLIPS + 1)


def seeds_needed(alpha: float = 0.05, comparisons: int = 1) -> int:
    """Return the fewest seeds with which each of so many comparisons can be significant after Holm's correction.

    Args:
        alpha: The level of significance.
        comparisons: The number of comparisons.

    Raises:
        ValueError: If no number of seeds that is tested exactly is enough.

    >>> seeds_needed(0.05), seeds_needed(0.05, comparisons=7)
    (6, 9)
    """
    fewest = _find_fewest_seeds(alpha, comparisons)
    if fewest is None:
        raise ValueError(f"{EXACT_UP_TO} seeds are not enough for {comparisons} comparisons at {alpha}")
    return fewest


def _find_fewest_seeds(alpha: float, comparisons: int) -> int | None:
    return next((n for n in range(1, EXACT_UP_TO + 1) if comparisons * smallest_p(n) <= alpha), None)


def holm(p_values: ArrayLike) -> list[float]:
    """Return Holm's adjusted p-values, in the given order. Those at most alpha are significant.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    p = np.array(p_values, np.float64)
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise ValueError("p-values must be a list of numbers between 0 and 1")
    order = np.argsort(p)
    p[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1)
    return [float(value) for value in p]


def compare_all(results: Mapping[str, Mapping[Seed, float]], reference: str, metric: str = "") -> list[Comparison]:
    """Compare every other method with the reference, on the seeds both have, with Holm's correction over all of them.

    Args:
        results: By method and seed, a value in percent.
        reference: The method to compare with.
        metric: The name of the value; `verdict` needs it to know whether higher is better.

    Returns:
        A comparison for each other method.

    Raises:
        ValueError: The reference has no results, or shares no seed with a method.

    >>> fedavg = {seed: 70.0 + seed for seed in range(8)}
    >>> fedheal = {seed: 72.0 + seed + seed % 3 for seed in range(8)}
    >>> fedprox = {seed: 70.0 + seed + (-1) ** seed for seed in range(8)}
    >>> comparisons = compare_all({"fedavg": fedavg, "fedheal": fedheal, "fedprox": fedprox}, "fedavg")
    >>> [(c.a, c.n, c.mean, c.p_value, c.p_adjusted) for c in comparisons]
    [('fedheal', 8, 2.875, 0.0078125, 0.015625), ('fedprox', 8, 0.0, 1.0, 1.0)]
    """
    if reference not in results:
        raise ValueError(f"no results of the reference {reference!r}; there are: {', '.join(results)}")
    comparisons, b = [], results[reference]
    for method in [method for method in results if method != reference]:
        a = results[method]
        both = [seed for seed in b if seed in a]
        if not both:
            raise ValueError(f"{method!r} and {reference!r} have no seed in common: there is nothing to pair")
        pair = compare_pair([a[seed] for seed in both], [b[seed] for seed in both], (method, reference))
        comparisons.append(replace(pair, unpaired=len(a) + len(b) - 2 * len(both), metric=metric))
    return correct_family(comparisons)


def compare_metrics(
    results: Mapping[str, Mapping[Seed, Mapping[str, float]]], reference: str, metrics: Sequence[str] = ("avg", "std")
) -> dict[str, list[Comparison]]:
    """Compare every other method with the reference in several metrics over domains: one comparison each, by metric.

    `results` are accuracies in percent by method, seed and domain; `metrics` are those of `fairness` in percent. Holm's
    correction is over all methods and metrics, since a claim may come from any of them.

    >>> runs = {seed: {"photo": 80.0 + seed, "sketch": 60.0} for seed in range(8)}
    >>> fairer = {seed: {"photo": 80.0 + seed, "sketch": 66.0} for seed in range(8)}
    >>> comparisons = compare_metrics({"fedavg": runs, "fedheal": fairer}, "fedavg")
    >>> [(name, round(c.mean, 2), c.p_adjusted) for name, family in comparisons.items() for c in family]
    [('avg', 3.0, 0.015625), ('std', -4.24, 0.015625)]
    """
    unknown = [metric for metric in metrics if metric not in HIGHER_IS_BETTER]
    if unknown:
        raise ValueError(f"no metric in percent: {', '.join(unknown)}; there are {', '.join(HIGHER_IS_BETTER)}")
    values = {m: {seed: fairness(domains) for seed, domains in seeds.items()} for m, seeds in results.items()}
    comparisons = {}
    for metric in dict.fromkeys(metrics):
        by_method = {m: {seed: x[metric] for seed, x in seeds.items()} for m, seeds in values.items()}
        comparisons[metric] = compare_all(by_method, reference, metric)
    corrected = iter(correct_family([c for family in comparisons.values() for c in family]))
    return {metric: [next(corrected) for _ in family] for metric, family in comparisons.items()}


def correct_family(family: list[Comparison]) -> list[Comparison]:
    """Return the comparisons with p-values corrected for all of them, by Holm's method."""
    adjusted, floors = holm([c.p_value for c in family]), holm([smallest_p(c.n) for c in family])
    return [
        replace(c, p_adjusted=p, smallest_p_adjusted=floor, comparisons=len(family))
        for c, p, floor in zip(family, adjusted, floors, strict=True)
    ]


def verdict(c: Comparison, alpha: float = 0.05) -> str:
    """Return one sentence that says what may be concluded. Higher is better except for metrics such as "std".

    Args:
        c: The comparison.
        alpha: The level of significance.

    Raises:
        ValueError: If `alpha` does not lie between 0 and 1.

    >>> print(verdict(compare_pair([2.0, 3.0, 4.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0, 2.0], ("fedheal", "fedavg"))))
    5 seeds cannot show a difference at 0.05 with a two-sided exact sign-flip test, whatever the data (smallest possible
    p = 0.0625); 6 or more can (observed: fedheal 1.80 points above fedavg).
    >>> a, b = [72.0, 74.0, 71.0, 75.0, 73.0, 76.0], [70.0, 71.0, 70.0, 71.0, 71.0, 72.0]
    >>> print(verdict(compare_pair(a, b, ("fedheal", "fedavg"))))
    fedheal is better than fedavg by 2.67 points (95 % CI 1.40 to 3.94, p = 0.0312, 6 seeds).
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, not {alpha}")
    if c.smallest_p_adjusted > alpha:
        return _explain_too_few(c, alpha)
    if c.p_adjusted > alpha:
        return _explain_no_difference(c)
    word = "better" if (c.mean > 0) == HIGHER_IS_BETTER.get(c.metric, True) else "worse"
    sentence = (
        f"{c.a} is {word} than {c.b}{_name_metric(c)} by {abs(c.mean):.2f} points ({_describe_evidence(c, size=True)})"
    )
    doubt = "; the interval, which rests on other assumptions, includes 0: a borderline case"
    return sentence + (doubt if _includes_zero(c) else "") + "."


def _explain_too_few(c: Comparison, alpha: float) -> str:
    corrected = f" after Holm's correction over {c.comparisons} comparisons" if c.comparisons > 1 else ""
    seeds = f"{c.n} seeds cannot" if c.n > 1 else "1 seed cannot"
    test = "exact" if c.n <= EXACT_UP_TO else "Monte-Carlo"
    fewest = _find_fewest_seeds(alpha, c.comparisons)
    can_many = c.comparisons * smallest_p(EXACT_UP_TO + 1) <= alpha  # whose test is by random flips
    limit = "or more" if can_many else f"to {EXACT_UP_TO}"
    enough = "no number of seeds can" if fewest is None else f"{fewest} {limit} can"
    return (
        f"{seeds} show a difference{_name_metric(c)} at {alpha:g} with a two-sided {test} sign-flip test{corrected}, "
        f"whatever the data (smallest possible p = {c.smallest_p_adjusted:.4g}); {enough} "
        f"(observed: {c.a} {_describe_mean(c)} {c.b})."
    )


def _explain_no_difference(c: Comparison) -> str:
    start = f"No difference between {c.a} and {c.b}{_name_metric(c)} can be concluded: "
    if c.equal == c.n:
        return f"{start}they are the same in all {c.n} seeds, which is not evidence that they are in others."
    equal = f", {c.equal} of them without a difference" if c.equal else ""
    fits = "" if c.low is None or c.high is None else f"{max(-c.low, c.high):.2f}"
    tail = ": the interval excludes 0, but it rests on stronger assumptions than the test"
    if _includes_zero(c):
        tail = f"; a true difference of up to {fits} points fits these seeds"
    observed = f"{c.a} is {_describe_mean(c)} ({_describe_evidence(c)}{equal})"
    return f"{start}{observed}, which is not evidence of equality{tail}."


def _describe_mean(c: Comparison) -> str:
    return f"{abs(c.mean):.2f} points {'below' if c.mean < 0 else 'above'}"


def _describe_evidence(c: Comparison, size: bool = False) -> str:
    """Return interval, p and number of seeds. `size`: the interval is of how much better or worse, not of a - b."""
    parts = []
    if c.low is not None and c.high is not None:
        low, high = (-c.high, -c.low) if size and c.mean < 0 else (c.low, c.high)
        parts.append(f"{100 * LEVEL:g} % CI {low:.2f} to {high:.2f}")
    p = f"p = {c.p_adjusted:.3g}" if c.p_adjusted >= 1e-4 else "p < 0.0001"
    parts.append(p + (f" after Holm's correction over {c.comparisons} comparisons" if c.comparisons > 1 else ""))
    left_out = f" (those that only one of the two has are left out: {c.unpaired})" if c.unpaired else ""
    return ", ".join([*parts, f"{c.n} seeds{left_out}"])


def _name_metric(c: Comparison) -> str:
    return f" in {c.metric.upper()}" if c.metric else ""


def _includes_zero(c: Comparison) -> bool:
    return c.low is None or c.high is None or c.low <= 0 <= c.high


def _check_values(values: ArrayLike) -> Floats:
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or not len(x):
        raise ValueError("one value per seed is needed, and at least one")
    if not np.isfinite(x).all():
        raise ValueError(
            "values must be finite: leaving out a diverged run would favour its method, so give it a value"
        )
    return x


def _subtract(a: ArrayLike, b: ArrayLike) -> Floats:
    """Return a - b, rounded to 12 digits of the larger, so that 0.3 - (0.1 + 0.2) is 0 and equal differences are ties."""
    x, y = _check_values(a), _check_values(b)
    if len(x) != len(y):
        raise ValueError(f"both methods need one value per seed, got {len(x)} and {len(y)}")
    scale = float(np.abs([x, y]).max())
    return np.round(x - y, min(200, 12 - math.ceil(math.log10(scale)))) if scale else np.zeros_like(x)
