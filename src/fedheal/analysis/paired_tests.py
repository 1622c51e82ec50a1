"""What may be concluded from methods x seeds, where two methods' runs are paired by seed.

A seed fixes the split, the cohorts and the initial model, so two methods are compared by their differences seed by seed: what
the seed does to both cancels. Values are in percent, differences in points. The seeds are taken to be independent draws.

- `mean`, `sd`: over seeds; sd is the sample standard deviation (ddof=1). It is the spread of a run, not the error of the mean.
- `low`, `high`: an interval for the mean over all seeds one could have drawn. With fewer than 8 values Student's t, which
  assumes near-normal values; from 8 on a symmetric studentized bootstrap, as wide as t or up to twice as wide. Percentile
  and BCa bootstraps are too narrow for so few values: docs/statistics.md has the measured coverage. One value has no interval.
- `p_value`: two-sided, from flipping the signs of the differences, every one of the 2^n ways up to 30 seeds. It is exact if,
  were the methods equal, swapping them within a seed would change nothing; of normality it assumes nothing. With n seeds it
  cannot fall below 2 / 2^n. "wilcoxon" flips signed ranks instead: less moved by one wild seed, but no test of the mean.
- `effect`: mean / sd of the differences (Cohen's d_z) with Hedges' correction for few seeds.
- `share_higher`: share of seeds in which the first is higher, ties counting half; it estimates the chance that a new seed
  has the first higher.
- `p_adjusted`: Holm's correction; the chance of even one false claim in the whole family stays at most alpha. Intervals are not
  adjusted.

A test set is a sample too: `sampling` says how far its images, rather than the seeds, decide.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from fedheal.core.metrics import fairness

Floats = NDArray[np.float64]
Interval = Literal["auto", "t", "studentized", "bca"]
Test = Literal["sign-flip", "wilcoxon"]
Seed = TypeVar("Seed", bound=Hashable)

BOOTSTRAP_FROM = 8  # values; with fewer, a bootstrap-t interval covers too little (n = 3) or is far too wide (n = 5)
RESAMPLES = 9_999
EXACT_UP_TO = 30  # seeds; two halves of 2^15 sums each
FLIPS = 99_999  # random sign flips above that
HIGHER_IS_BETTER = {"avg": True, "worst": True, "best": True, "std": False, "gap": False}  # the metrics in percent


@dataclass(frozen=True)
class Summary:
    """One method's values over seeds. Where `n` is 1 there is no `sd` and no interval."""

    n: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None
    level: float = 0.95


@dataclass(frozen=True)
class Comparison:
    """`a - b` over the seeds both have; the module's docstring says what each number means."""

    a: str
    b: str
    n: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None
    level: float
    p_value: float
    test: str
    direction: int  # sign of what the test looks at: the sum of the differences, or of their signed ranks
    effect: float | None  # None: fewer than 3 seeds, or every difference the same but not zero
    share_higher: float
    equal: int  # seeds in which a and b are the same
    smallest_p: float  # whatever the data
    p_adjusted: float
    smallest_p_adjusted: float
    comparisons: int = 1  # size of the family that was corrected for
    unpaired: int = 0  # seeds that only one of the two has; they are left out
    metric: str = ""


# --- one method ---------------------------------------------------------------------------------------------------------------


def summary(
    values: ArrayLike,
    level: float = 0.95,
    interval: Interval = "auto",
    generator: np.random.Generator | None = None,
) -> Summary:
    """Mean, spread and interval of the mean. The same values, in any order, give the same numbers.

    >>> s = summary([70.0, 72.0, 71.0, 75.0])
    >>> s.n, s.mean, round(s.sd, 3), round(s.low, 2), round(s.high, 2)
    (4, 72.0, 2.16, 68.56, 75.44)
    >>> summary([70.0])
    Summary(n=1, mean=70.0, sd=None, low=None, high=None, level=0.95)
    """
    _check_interval(level, interval)
    x = np.sort(_values(values))  # not even rounding may depend on the order
    if len(x) == 1:
        return Summary(1, float(x[0]), None, None, None, level)
    low, high = mean_interval(x, level, interval, generator=generator)
    return Summary(len(x), float(x.mean()), float(x.std(ddof=1)), float(low), float(high), level)


def mean_interval(
    values: ArrayLike,
    level: float = 0.95,
    kind: Interval = "auto",
    resamples: int = RESAMPLES,
    generator: np.random.Generator | None = None,
) -> tuple[Floats, Floats]:
    """Ends of an interval for the mean, along the last axis (at least two values).

    "auto" is "t" below 8 values and "studentized" from there on. The generator is a fixed one unless given.

    >>> low, high = mean_interval([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]])
    >>> low.round(2).tolist(), high.round(2).tolist()
    ([-0.48, 5.0], [4.48, 5.0])
    """
    _check_interval(level, kind)
    x = np.sort(np.asarray(values, np.float64), axis=-1)  # resampling must not depend on the order of the seeds
    n = x.shape[-1]
    if n < 2:
        raise ValueError("an interval for a mean needs at least two values")
    generator = generator or np.random.default_rng(0)
    if kind == "bca":
        return _bca(x, level, resamples, generator)
    mean, error = x.mean(-1), x.std(-1, ddof=1) / math.sqrt(n)
    student = float(stats.t.ppf(0.5 + level / 2, n - 1))
    if kind == "studentized" or (kind == "auto" and n >= BOOTSTRAP_FROM):
        # one wild value can make it dozens of times too wide; held to twice Student's width, it covers as much
        quantile = np.clip(_studentized_quantile(x, level, resamples, generator), student, 2 * student)
        return mean - quantile * error, mean + quantile * error
    return mean - student * error, mean + student * error


def _check_interval(level: float, kind: str) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, not {level}")
    if kind not in get_args(Interval):
        raise ValueError(f"the kind of interval must be one of {', '.join(get_args(Interval))}, not {kind!r}")


def _studentized_quantile(x: Floats, level: float, resamples: int, generator: np.random.Generator) -> Floats:
    """Quantile of |t| over resamples. Symmetric: measured, it holds up better under heavy tails than two separate tails."""
    n = x.shape[-1]
    centred = x - x.mean(-1, keepdims=True)
    half = generator.multinomial(n, np.full(n, 1 / n), size=(resamples + 1) // 2).T / n
    weights = np.concatenate([half, half[::-1]], axis=1)  # of sorted values, so that a - b and b - a mirror each other
    mean = centred @ weights
    variance = (centred**2) @ weights - mean**2
    # a resample of equal values says nothing about the scale: it counts as t = 0, and Student's quantile is the floor
    tiny = 1e-12 * (centred**2).mean(-1, keepdims=True)
    t = np.abs(mean) / np.sqrt(np.where(variance > tiny, variance, np.inf) / (n - 1))
    return np.asarray(np.quantile(t, level, axis=-1), np.float64)


def _bca(x: Floats, level: float, resamples: int, generator: np.random.Generator) -> tuple[Floats, Floats]:
    if not np.ptp(x, axis=-1).any():
        return x.mean(-1), x.mean(-1)
    result = stats.bootstrap(
        (x,), np.mean, n_resamples=resamples, axis=-1, confidence_level=level, method="BCa", rng=generator
    )
    return np.asarray(result.confidence_interval.low), np.asarray(result.confidence_interval.high)


# --- two methods over the same seeds ------------------------------------------------------------------------------------------


def paired(
    a: ArrayLike,
    b: ArrayLike,
    names: tuple[str, str] = ("a", "b"),
    test: Test = "sign-flip",
    level: float = 0.95,
    generator: np.random.Generator | None = None,
) -> Comparison:
    """Compare two methods; entry i of both is the same seed.

    >>> c = paired([72.0, 74.0, 71.0, 75.0, 73.0, 76.0], [70.0, 71.0, 70.0, 71.0, 71.0, 72.0])
    >>> round(c.mean, 2), round(c.low, 2), round(c.high, 2), c.p_value, c.test
    (2.67, 1.4, 3.94, 0.03125, 'exact sign-flip')
    >>> round(c.effect, 2), c.share_higher
    (1.85, 1.0)
    """
    if test not in ("sign-flip", "wilcoxon"):
        raise ValueError(f"test must be 'sign-flip' or 'wilcoxon', not {test!r}")
    d = _differences(a, b)
    n = len(d)
    s = summary(d, level, generator=generator)
    scores = d if test == "sign-flip" else _signed_ranks(d)
    p, floor = sign_flip_p(scores, generator), smallest_p(n)
    return Comparison(
        a=names[0],
        b=names[1],
        n=n,
        mean=s.mean,
        sd=s.sd,
        low=s.low,
        high=s.high,
        level=level,
        p_value=p,
        test=f"{'exact' if n <= EXACT_UP_TO else 'Monte-Carlo'} {test}",
        direction=int(np.sign(_snap(scores.sum(), float(np.abs(scores).sum())))),
        effect=_effect(s),
        share_higher=float((d > 0).mean() + (d == 0).mean() / 2),
        equal=int((d == 0).sum()),
        smallest_p=floor,
        p_adjusted=p,
        smallest_p_adjusted=floor,
    )


def sign_flip_p(differences: ArrayLike, generator: np.random.Generator | None = None) -> float:
    """Two-sided p of the mean: the share of sign flips with a mean at least as far from 0 as the one observed.

    >>> sign_flip_p([1.0, 2.0, 3.0])
    0.25
    >>> sign_flip_p([0.0, 0.0])
    1.0
    """
    d = np.sort(np.abs(_values(differences)))
    observed = abs(float(np.sum(_values(differences))))
    least = observed - 1e-9 * float(d.sum())  # flips that tie with what was observed must not miss it by rounding
    if least <= 0:
        return 1.0
    if len(d) > EXACT_UP_TO:
        return _random_flips_p(d, least, generator or np.random.default_rng(0))
    # sums of one half of the seeds, sorted, searched with those of the other: 2^(n/2) work rather than 2^n
    left, right = _flipped_sums(d[::2]), np.sort(_flipped_sums(d[1::2]))
    above = len(left) * len(right) - int(np.searchsorted(right, least - left, side="left").sum())
    return float(2 * above / 2 ** len(d))  # flips come in pairs, +sum and -sum


def _flipped_sums(d: Floats) -> Floats:
    sums = np.zeros(1)
    for value in d:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def _random_flips_p(d: Floats, least: float, generator: np.random.Generator) -> float:
    signs = generator.integers(0, 2, size=(FLIPS, len(d)), dtype=np.int8) * 2 - 1
    hits = int((np.abs(signs @ d) >= least).sum())
    return (hits + 1) / (FLIPS + 1)  # what was observed is one of the flips: p is never 0


def _signed_ranks(d: Floats) -> Floats:
    """Wilcoxon's scores; zeros get no rank, ties their mean rank."""
    ranks = np.zeros_like(d)
    ranks[d != 0] = stats.rankdata(np.abs(d[d != 0]))
    return np.sign(d) * ranks


def _effect(s: Summary) -> float | None:
    if s.mean == 0 and s.n > 1:
        return 0.0
    if s.n < 3 or s.sd is None or s.sd <= 1e-12 * abs(s.mean):
        return None
    df = s.n - 1
    hedges = math.exp(math.lgamma(df / 2) - math.lgamma((df - 1) / 2)) / math.sqrt(df / 2)
    return hedges * s.mean / s.sd


def smallest_p(n: int) -> float:
    """The smallest two-sided p that n pairs can give, whatever the data.

    >>> [smallest_p(n) for n in (1, 3, 5, 6)]
    [1.0, 0.25, 0.0625, 0.03125]
    """
    return min(1.0, 2 / 2**n) if n <= EXACT_UP_TO else 1 / (FLIPS + 1)


def seeds_needed(alpha: float = 0.05, comparisons: int = 1) -> int:
    """Fewest seeds with which each of so many comparisons could be concluded after Holm's correction.

    >>> seeds_needed(0.05), seeds_needed(0.05, comparisons=7)
    (6, 9)
    """
    fewest = _fewest(alpha, comparisons)
    if fewest is None:
        raise ValueError(f"{EXACT_UP_TO} seeds are not enough for {comparisons} comparisons at {alpha}")
    return fewest


def _fewest(alpha: float, comparisons: int) -> int | None:
    return next((n for n in range(1, EXACT_UP_TO + 1) if comparisons * smallest_p(n) <= alpha), None)


# --- many comparisons ---------------------------------------------------------------------------------------------------------


def holm(p_values: ArrayLike) -> list[float]:
    """Holm's adjusted p-values, in the order given: claim those at most alpha.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, np.float64)
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise ValueError("p-values must be a list of numbers between 0 and 1")
    order = np.argsort(p)
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(stepped, 1)
    return [float(value) for value in adjusted]


def compare_all(
    results: Mapping[str, Mapping[Seed, float]],
    reference: str,
    test: Test = "sign-flip",
    level: float = 0.95,
    metric: str = "",
) -> list[Comparison]:
    """Every other method against the reference, on the seeds both have, with Holm's correction over all of them.

    >>> fedavg = {seed: 70.0 + seed for seed in range(8)}
    >>> fedheal = {seed: 72.0 + seed + seed % 3 for seed in range(8)}
    >>> fedprox = {seed: 70.0 + seed + (-1) ** seed for seed in range(8)}
    >>> found = compare_all({"fedavg": fedavg, "fedheal": fedheal, "fedprox": fedprox}, "fedavg")
    >>> [(c.a, c.n, c.mean, c.p_value, c.p_adjusted) for c in found]
    [('fedheal', 8, 2.875, 0.0078125, 0.015625), ('fedprox', 8, 0.0, 1.0, 1.0)]
    """
    if reference not in results:
        raise ValueError(f"no results of the reference {reference!r}; there are: {', '.join(results)}")
    others = [method for method in results if method != reference]
    return _correct([_against(results, method, reference, test, level, metric) for method in others])


def compare_metrics(
    results: Mapping[str, Mapping[Seed, Mapping[str, float]]],
    reference: str,
    metrics: Sequence[str] = ("avg", "std"),
    test: Test = "sign-flip",
    level: float = 0.95,
    one_family: bool = True,
) -> dict[str, list[Comparison]]:
    """As `compare_all`, from accuracies per domain, for several metrics over domains.

    Holm's correction is over all methods and metrics, since a claim may come from any of them; `one_family=False` corrects
    within each metric, for questions that were fixed beforehand and are answered apart.

    >>> runs = {seed: {"photo": 80.0 + seed, "sketch": 60.0} for seed in range(8)}
    >>> fairer = {seed: {"photo": 80.0 + seed, "sketch": 66.0} for seed in range(8)}
    >>> found = compare_metrics({"fedavg": runs, "fedheal": fairer}, "fedavg")
    >>> [(name, round(c.mean, 2), c.p_adjusted) for name, cs in found.items() for c in cs]
    [('avg', 3.0, 0.015625), ('std', -4.24, 0.015625)]
    """
    unknown = [metric for metric in metrics if metric not in HIGHER_IS_BETTER]
    if unknown:
        raise ValueError(f"no metric in percent: {', '.join(unknown)}; there are {', '.join(HIGHER_IS_BETTER)}")
    found = {
        metric: compare_all(_measured(results, metric), reference, test, level, metric)
        for metric in dict.fromkeys(metrics)
    }
    if not one_family:
        return found
    corrected = iter(_correct([c for cs in found.values() for c in cs]))
    return {metric: [next(corrected) for _ in cs] for metric, cs in found.items()}


def _measured(results: Mapping[str, Mapping[Seed, Mapping[str, float]]], metric: str) -> dict[str, dict[Seed, float]]:
    return {
        method: {seed: fairness(accuracy)[metric] for seed, accuracy in seeds.items()}
        for method, seeds in results.items()
    }


def _against(
    results: Mapping[str, Mapping[Seed, float]], method: str, reference: str, test: Test, level: float, metric: str
) -> Comparison:
    mine, its = results[method], results[reference]
    both = [seed for seed in its if seed in mine]
    if not both:
        raise ValueError(f"{method!r} and {reference!r} have no seed in common: there is nothing to pair")
    pair = paired([mine[seed] for seed in both], [its[seed] for seed in both], (method, reference), test, level)
    return replace(pair, unpaired=len(mine) + len(its) - 2 * len(both), metric=metric)


def _correct(family: list[Comparison]) -> list[Comparison]:
    adjusted, floors = holm([c.p_value for c in family]), holm([c.smallest_p for c in family])
    return [
        replace(c, p_adjusted=p, smallest_p_adjusted=floor, comparisons=len(family))
        for c, p, floor in zip(family, adjusted, floors, strict=True)
    ]


# --- what may be said ---------------------------------------------------------------------------------------------------------


def verdict(c: Comparison, alpha: float = 0.05, higher_is_better: bool | None = None) -> str:
    """One sentence that says what may be concluded. Unless told, higher is better but for metrics such as "std".

    >>> print(verdict(paired([2.0, 3.0, 4.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0, 2.0], ("fedheal", "fedavg"))))
    5 seeds cannot show a difference at 0.05 with a two-sided exact sign-flip test, whatever the data (smallest possible
    p = 0.0625); 6 or more can (observed: fedheal 1.80 points above fedavg).
    >>> a, b = [72.0, 74.0, 71.0, 75.0, 73.0, 76.0], [70.0, 71.0, 70.0, 71.0, 71.0, 72.0]
    >>> print(verdict(paired(a, b, ("fedheal", "fedavg"))))
    fedheal is better than fedavg by 2.67 points (95 % CI 1.40 to 3.94, p = 0.0312, 6 seeds).
    >>> print(verdict(paired(a, b, ("fedheal", "fedavg")), higher_is_better=False))
    fedheal is worse than fedavg by 2.67 points (95 % CI 1.40 to 3.94, p = 0.0312, 6 seeds).
    >>> print(verdict(paired([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 1.0, 3.5, 3.0, 5.0, 5.0], ("fedprox", "fedavg"))))
    No difference between fedprox and fedavg can be concluded: fedprox is 0.25 points above (95 % CI -0.67 to 1.17,
    p = 0.625, 6 seeds, 1 of them without a difference), which is not evidence of equality; a true difference of up to 1.17
    points fits these seeds.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, not {alpha}")
    if c.smallest_p_adjusted > alpha:
        return _too_few(c, alpha)
    if c.p_adjusted > alpha:
        return _nothing_concluded(c)
    if c.direction * c.mean <= 0:
        return (
            f"No claim about the mean{_in(c)}: the ranks favour a {'higher' if c.direction > 0 else 'lower'} {c.a} than {c.b} "
            f"but the mean does not ({_evidence(c)}); a few seeds differ the other way by much."
        )
    if higher_is_better is None:
        higher_is_better = HIGHER_IS_BETTER.get(c.metric, True)
    word = "better" if (c.mean > 0) == higher_is_better else "worse"
    doubt = (
        "; the interval, which rests on other assumptions, includes 0: a borderline case" if _includes_zero(c) else ""
    )
    return f"{c.a} is {word} than {c.b}{_in(c)} by {abs(c.mean):.2f} points ({_evidence(c, size=True)}){doubt}."


def _too_few(c: Comparison, alpha: float) -> str:
    corrected = f" after Holm's correction over {c.comparisons} comparisons" if c.comparisons > 1 else ""
    seeds = f"{c.n} seeds cannot" if c.n > 1 else "1 seed cannot"
    fewest = _fewest(alpha, c.comparisons)
    many = c.comparisons * smallest_p(EXACT_UP_TO + 1) <= alpha  # whose test is by random flips, and no longer exact
    enough = (
        "no number of seeds can" if fewest is None else f"{fewest} {'or more' if many else f'to {EXACT_UP_TO}'} can"
    )
    return (
        f"{seeds} show a difference{_in(c)} at {alpha:g} with a two-sided {c.test} test{corrected}, whatever the data "
        f"(smallest possible p = {c.smallest_p_adjusted:.4g}); {enough} "
        f"(observed: {c.a} {_observed(c)} {c.b})."
    )


def _nothing_concluded(c: Comparison) -> str:
    start = f"No difference between {c.a} and {c.b}{_in(c)} can be concluded: "
    if c.equal == c.n:
        return f"{start}they are the same in all {c.n} seeds, which is not evidence that they are in others."
    equal = f", {c.equal} of them without a difference" if c.equal else ""
    fits = "" if c.low is None or c.high is None else f"{max(-c.low, c.high):.2f}"
    if _includes_zero(c):
        tail = f"which is not evidence of equality; a true difference of up to {fits} points fits these seeds"
    else:
        tail = "which is not evidence of equality: the interval excludes 0, but it rests on stronger assumptions than the test"
    return f"{start}{c.a} is {_observed(c)} ({_evidence(c)}{equal}), {tail}."


def _observed(c: Comparison) -> str:
    return f"{abs(c.mean):.2f} points {'below' if c.mean < 0 else 'above'}"


def _evidence(c: Comparison, size: bool = False) -> str:
    """`size`: the interval of how much better or worse, rather than of a - b."""
    parts = []
    if c.low is not None and c.high is not None:
        low, high = (-c.high, -c.low) if size and c.mean < 0 else (c.low, c.high)
        parts.append(f"{100 * c.level:g} % CI {low:.2f} to {high:.2f}")
    p = f"p = {c.p_adjusted:.3g}" if c.p_adjusted >= 1e-4 else "p < 0.0001"
    parts.append(p + (f" after Holm's correction over {c.comparisons} comparisons" if c.comparisons > 1 else ""))
    left_out = f" (those that only one of the two has are left out: {c.unpaired})" if c.unpaired else ""
    return ", ".join([*parts, f"{c.n} seeds{left_out}"])


def _in(c: Comparison) -> str:
    return f" in {c.metric.upper()}" if c.metric else ""


def _includes_zero(c: Comparison) -> bool:
    return c.low is None or c.high is None or c.low <= 0 <= c.high


# --- checks on what comes in --------------------------------------------------------------------------------------------------


def _values(values: ArrayLike) -> Floats:
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or not len(x):
        raise ValueError("one value per seed is needed, and at least one")
    if not np.isfinite(x).all():
        raise ValueError(
            "values must be finite: leaving a diverged run out would favour its method, so give it a value"
        )
    return x


def _differences(a: ArrayLike, b: ArrayLike) -> Floats:
    x, y = _values(a), _values(b)
    if len(x) != len(y):
        raise ValueError(f"paired values are needed, one of each per seed: {len(x)} and {len(y)} were given")
    return _snap(x - y, float(np.abs([x, y]).max()))


def _snap(values: ArrayLike, scale: float) -> Floats:
    """Rounded to 12 digits of the scale, so that 0.3 - (0.1 + 0.2) is 0 and equal differences are ties."""
    if scale == 0:
        return np.zeros_like(np.asarray(values, np.float64))
    return np.asarray(np.round(np.asarray(values, np.float64), min(200, 12 - math.ceil(math.log10(scale)))))
