"""A test set is a sample too: how far its images, rather than the seeds, decide. Accuracies in percent, errors in points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats


@dataclass(frozen=True)
class ExampleComparison:
    """Two models on one test set: `difference` is accuracy of a minus that of b, in points."""

    n: int
    only_a: int  # examples only a has right
    only_b: int
    difference: float
    low: float
    high: float
    p_value: float
    level: float = 0.95


class AccuracyError(NamedTuple):
    """In points: the standard error, and a 95 % interval's ends."""

    se: float
    low: float
    high: float


def accuracy_error(accuracy_percent: float, n_examples: int, level: float = 0.95) -> AccuracyError:
    """Sampling error of an accuracy, by Wilson's interval; the standard error is taken at that interval's centre.

    At the centre since 30 right of 30 is not an error of 0. An accuracy may be a mean over rounds: it need not be a whole
    number of images, and such a mean is over the same images, so its error is that of one round.

    >>> [round(value, 1) for value in accuracy_error(80.0, 30)]
    [7.7, 62.7, 90.5]
    >>> [round(value, 1) for value in accuracy_error(100.0, 30)]
    [4.2, 88.6, 100.0]
    """
    if n_examples < 1 or not 0 <= accuracy_percent <= 100:
        raise ValueError(f"no accuracy: {accuracy_percent} % of {n_examples} examples")
    p, z2 = accuracy_percent / 100, float(stats.norm.ppf(0.5 + level / 2)) ** 2
    centre = (p + z2 / (2 * n_examples)) / (1 + z2 / n_examples)
    half = math.sqrt(z2 * (p * (1 - p) / n_examples + z2 / (4 * n_examples**2))) / (1 + z2 / n_examples)
    se = math.sqrt(centre * (1 - centre) / n_examples)
    return AccuracyError(100 * se, 100 * max(0.0, centre - half), 100 * min(1.0, centre + half))


def smallest_step(n_examples: int) -> float:
    """What one image is worth, in points.

    >>> smallest_step(30) == 100 / 30
    True
    """
    if n_examples < 1:
        raise ValueError("a test set needs at least one example")
    return 100 / n_examples


def note_on_test_sets(accuracies: Mapping[str, float], sizes: Mapping[str, int], limit: float = 2.0) -> str:
    """Names the domains whose test set is so small that one standard error of the accuracy exceeds `limit` points.

    >>> print(note_on_test_sets({"dslr": 80.0, "amazon": 75.0}, {"dslr": 30, "amazon": 10_000}))
    One standard error of the accuracy exceeds 2 points in dslr (30 images: one image is 3.33 points, standard error 7.73,
    95 % interval 62.7 to 90.5); more seeds do not shrink it where they share the test images.
    >>> print(note_on_test_sets({"amazon": 75.0}, {"amazon": 10_000}))
    One standard error of the accuracy is at most 0.43 points in every domain.
    """
    missing = [domain for domain in accuracies if domain not in sizes]
    if missing or not accuracies:
        raise ValueError(f"sizes are missing for: {', '.join(missing)}" if missing else "no domains")
    errors = {domain: accuracy_error(accuracy, sizes[domain]) for domain, accuracy in accuracies.items()}
    small = [
        f"{domain} ({sizes[domain]} images: one image is {smallest_step(sizes[domain]):.2f} points, standard error "
        f"{error.se:.2f}, 95 % interval {error.low:.1f} to {error.high:.1f})"
        for domain, error in errors.items()
        if error.se > limit
    ]
    if not small:
        return f"One standard error of the accuracy is at most {max(e.se for e in errors.values()):.2f} points in every domain."
    return (
        f"One standard error of the accuracy exceeds {limit:g} points in {', '.join(small)}; more seeds do not shrink it where "
        "they share the test images."
    )


def paired_examples(correct_a: ArrayLike, correct_b: ArrayLike, level: float = 0.95) -> ExampleComparison:
    """Two models on the same test examples: exact McNemar test, and Bonett and Price's interval for the difference.

    Only examples that one has right and the other wrong count. A bootstrap over examples has no width where there are none
    of these; this interval adds one to either count and keeps one. It speaks of these two trained models, not of the methods.

    >>> a = [True] * 26 + [False] * 4
    >>> b = [True] * 20 + [False] * 10
    >>> c = paired_examples(a, b)
    >>> c.only_a, c.only_b, c.difference, round(c.low, 1), round(c.high, 1), c.p_value
    (6, 0, 20.0, 2.7, 34.8, 0.03125)
    """
    a, b = _correct_flags(correct_a), _correct_flags(correct_b)
    if a.shape != b.shape:
        raise ValueError(f"the same examples are needed: {len(a)} and {len(b)} were given")
    n, only_a, only_b = len(a), int((a & ~b).sum()), int((b & ~a).sum())
    p = float(stats.binomtest(only_a, only_a + only_b, 0.5).pvalue) if only_a + only_b else 1.0
    for_a, for_b = (only_a + 1) / (n + 2), (only_b + 1) / (n + 2)
    half = float(stats.norm.ppf(0.5 + level / 2)) * math.sqrt((for_a + for_b - (for_a - for_b) ** 2) / (n + 2))
    low, high = max(-1.0, for_a - for_b - half), min(1.0, for_a - for_b + half)
    return ExampleComparison(n, only_a, only_b, 100 * (only_a - only_b) / n, 100 * low, 100 * high, p, level)


def _correct_flags(correct: ArrayLike) -> NDArray[np.bool_]:
    flags = np.asarray(correct)
    if flags.ndim != 1 or not len(flags) or not np.isin(flags, (0, 1)).all():
        raise ValueError("give one true or false per test example")
    return flags.astype(bool)
