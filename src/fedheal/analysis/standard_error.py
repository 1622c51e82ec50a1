"""The error of an accuracy that comes from drawing the test images. Accuracies in percent, errors in points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import scipy


class AccuracyError(NamedTuple):
    """The standard error of an accuracy and the ends of its 95 % interval."""

    se: float
    low: float
    high: float


def accuracy_error(accuracy_percent: float, n_examples: int) -> AccuracyError:
    """Return the sampling error of an accuracy, by Wilson's interval.

    The standard error is taken at the interval's centre, since 30 right of 30 is not an error of 0. An accuracy may be a mean
    over rounds: the rounds share the test images, so its error is that of one round.

    >>> [round(value, 1) for value in accuracy_error(80.0, 30)]
    [7.7, 62.7, 90.5]
    >>> [round(value, 1) for value in accuracy_error(100.0, 30)]
    [4.2, 88.6, 100.0]
    """
    if n_examples < 1 or not 0 <= accuracy_percent <= 100:
        raise ValueError(f"{accuracy_percent} % of {n_examples} examples is not an accuracy")
    p, z2 = accuracy_percent / 100, float(scipy.stats.norm.ppf(0.975)) ** 2
    centre = (p + z2 / (2 * n_examples)) / (1 + z2 / n_examples)
    half = math.sqrt(z2 * (p * (1 - p) / n_examples + z2 / (4 * n_examples**2))) / (1 + z2 / n_examples)
    se = math.sqrt(centre * (1 - centre) / n_examples)
    return AccuracyError(100 * se, 100 * max(0.0, centre - half), 100 * min(1.0, centre + half))


def note_on_test_sets(accuracies: Mapping[str, float], sizes: Mapping[str, int], limit: float = 2.0) -> str:
    """Name the domains with a test set so small that one standard error of the accuracy exceeds `limit` points.

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
        f"{domain} ({sizes[domain]} images: one image is {100 / sizes[domain]:.2f} points, standard error "
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
