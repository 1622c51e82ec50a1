"""Gains and losses by domain: the errors of seeds and of test images, for all domains together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedheal.analysis.domain_changes import compare_domains, is_supported
from fedheal.analysis.standard_error import fairness_errors, mean_error, sampling_error


def make_results(differences, base=70.0):
    """Return the results of two methods whose accuracies differ by `differences[seed][domain]`."""
    reference = {seed: dict.fromkeys(by_domain, base) for seed, by_domain in enumerate(differences)}
    other = {seed: {d: base + x for d, x in by_domain.items()} for seed, by_domain in enumerate(differences)}
    return {"fedavg": reference, "fedheal": other}


@pytest.mark.parametrize("seeds", [1, 2, 3, 10])
def test_the_error_is_at_least_that_of_the_test_images(seeds):
    """Three seeds may agree to 0.2 points, but 100 test images have a larger error."""
    results = make_results([{"photo": 10.0 + 0.2 * (seed % 2)} for seed in range(seeds)])
    (c,) = compare_domains(results, "fedavg", {"photo": 100})
    binomial = math.sqrt(70 * 30 / 100 + 80 * 20 / 100)  # 6.1 points
    assert (c.high - c.low) / 2 >= 1.95 * binomial
    assert not is_supported(c)


def test_few_seeds_have_students_quantile():
    """With a negligible error of test images, t has n - 1 degrees of freedom: 4.30 for three seeds, not 2."""
    results = make_results([{"photo": x} for x in (9.0, 10.0, 11.0)])
    (c,) = compare_domains(results, "fedavg", {"photo": 10**9})
    assert c.high - c.mean == pytest.approx(stats.t.ppf(0.975, 2) / 3**0.5, rel=1e-3)
    # Where both errors are equal, Welch and Satterthwaite's: (1 + 1)^2 / (1 / 2) = 8.
    images = 2 * 70 * 30 * 3  # of 70 %, so that the images' variance is the seeds' 1 / 3
    (c,) = compare_domains(make_results([{"photo": x} for x in (-1.0, 0.0, 1.0)]), "fedavg", {"photo": images})
    assert c.high - c.mean == pytest.approx(stats.t.ppf(0.975, 8) * (2 / 3) ** 0.5, rel=1e-3)


def test_extremes_are_corrected_for_all_domains_they_were_picked_from():
    single = compare_domains(make_results([{"a": 5.0}] * 2), "fedavg", {"a": 500})
    many = compare_domains(make_results([dict.fromkeys("abcdefgh", 5.0)] * 2), "fedavg", dict.fromkeys("abcdefgh", 500))
    assert many[0].high - many[0].low == pytest.approx(
        (single[0].high - single[0].low) * stats.norm.ppf(1 - 0.025 / 8) / stats.norm.ppf(0.975)
    )
    assert (single[0].comparisons, many[0].comparisons) == (1, 8)
    assert many[0].smallest_p_adjusted == min(1.0, 8 * single[0].smallest_p_adjusted)


@pytest.mark.parametrize("seeds", [2, 3, 6])
def test_intervals_hold_together_where_seeds_and_test_images_vary(seeds):
    """Four domains of 200 images without a true difference: all four intervals include 0 in 95 % of experiments."""
    rng = np.random.default_rng(seeds)
    covered = 0
    for _ in range(200):
        samples = rng.normal(0, math.sqrt(2 * 70 * 30 / 200), 4)  # the test images': the same for all seeds
        differences = [dict(zip("abcd", samples + rng.normal(0, 3, 4), strict=True)) for _ in range(seeds)]
        actual = compare_domains(make_results(differences), "fedavg", dict.fromkeys("abcd", 200))
        covered += all(c.low <= 0 <= c.high for c in actual)
    assert covered / 200 > 0.92


def test_unknown_sizes_leave_the_spread_over_seeds_alone():
    (c,) = compare_domains(make_results([{"a": 5.0}]), "fedavg", {"a": 0})
    assert (c.low, c.high) == (None, None)
    (c,) = compare_domains(make_results([{"a": 4.0}, {"a": 6.0}]), "fedavg", {})
    assert c.high - c.mean == pytest.approx(stats.t.ppf(0.975, 1))


def test_errors_of_means_and_of_fairness():
    assert sampling_error(50.0, 100) == pytest.approx(5.0)
    assert sampling_error([0.0, 100.0], 100).min() > 1.0  # 100 right of 100 is not an error of 0
    assert mean_error([60.0], 5.0) == 5.0
    assert mean_error([60.0, 66.0], 4.0) == pytest.approx(5.0)  # the seeds' part is 3
    rng = np.random.default_rng(0)
    accuracy, errors = np.array([90.0, 80.0, 60.0]), np.array([0.5, 1.0, 2.0])
    samples = accuracy[:, None] + errors[:, None] * rng.normal(size=(3, 20_000))
    actual = fairness_errors(accuracy[:, None], errors[:, None])
    assert actual["avg"][0] == pytest.approx(samples.mean(axis=0).std(), rel=0.03)
    assert actual["std"][0] == pytest.approx(samples.std(axis=0, ddof=1).std(), rel=0.03)
    assert actual["worst"][0] == 2.0
    assert fairness_errors(accuracy[:1, None], errors[:1, None])["std"][0] == 0.0
