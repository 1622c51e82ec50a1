"""Which domains gain and which lose from one method to another, over seeds and test images.

A domain's mean difference has two errors. The first is the spread of the differences over seeds, which more seeds
shrink. The second is the drawing of the test images, which more seeds do not shrink. It is computed as for two
independent test sets. Both methods are evaluated on the same images and tend to err on the same ones, so this is an
upper limit. The two errors are added in quadrature. Student's t has the degrees of freedom of Welch and Satterthwaite:
n - 1 if the error over seeds dominates, and no limit if there is none. With one seed the interval is about that seed's
models alone.

Whoever looks at the largest gain and the largest loss has looked at all domains. So p-values are Holm's over all domains and
methods, and the intervals hold for all of them together (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import scipy

from fedheal.analysis.paired_tests import LEVEL, Comparison, Seed, compare_all, correct_family
from fedheal.analysis.standard_error import sampling_error

__all__ = ["compare_domains", "is_supported"]


def compare_domains(
    results: Mapping[str, Mapping[Seed, Mapping[str, float]]], reference: str, sizes: Mapping[str, float]
) -> list[Comparison]:
    """Compare every other method with the reference in every domain: one comparison each, whose `metric` is the domain.

    Args:
        results: Accuracies in percent, by method, seed and domain.
        reference: The method to compare with.
        sizes: The number of test images of each domain; 0 if it is not known.

    Returns:
        The comparisons.

    >>> runs = {seed: {"photo": 80.0, "sketch": 60.0} for seed in range(8)}
    >>> fairer = {seed: {"photo": 79.0, "sketch": 72.0 + seed / 4} for seed in range(8)}
    >>> comparisons = compare_domains({"fedavg": runs, "fedheal": fairer}, "fedavg", {"photo": 100, "sketch": 1000})
    >>> [(c.metric, c.mean, round(c.low, 1), round(c.high, 1), is_supported(c)) for c in comparisons]
    [('photo', -1.0, -14.0, 12.0, False), ('sketch', 12.875, 8.2, 17.6, True)]
    """
    domains = list(next(iter(results[reference].values())))
    family = []
    for domain in domains:
        values = {m: {seed: x[domain] for seed, x in seeds.items()} for m, seeds in results.items()}
        family += compare_all(values, reference, domain)
    return [_add_interval(c, results, sizes.get(c.metric, 0), len(family)) for c in correct_family(family)]


def _add_interval(
    c: Comparison, results: Mapping[str, Mapping[Seed, Mapping[str, float]]], size: float, family_size: int
) -> Comparison:
    paired = [seed for seed in results[c.b] if seed in results[c.a]]
    means = [sum(results[name][seed][c.metric] for seed in paired) / c.n for name in (c.a, c.b)]
    images = sum(float(sampling_error(mean, size)) ** 2 for mean in means)
    seeds = (c.sd or 0.0) ** 2 / c.n
    freedom = (images + seeds) ** 2 / (seeds**2 / (c.n - 1)) if seeds else math.inf
    half = float(scipy.stats.t.ppf(1 - (1 - LEVEL) / 2 / family_size, freedom)) * math.sqrt(images + seeds)
    if not half and c.n == 1:
        return c  # neither seeds nor test images to tell an error from
    return replace(c, low=c.mean - half, high=c.mean + half)


def is_supported(c: Comparison, alpha: float = 1 - LEVEL) -> bool:
    """Return whether a difference may be stated: the paired test supports it, and its interval, if any, excludes 0.

    Args:
        c: The comparison.
        alpha: The level of significance.
    """
    return c.p_adjusted <= alpha and (c.low is None or c.high is None or not c.low <= 0 <= c.high)
