"""The error of an accuracy that comes from drawing the test images, alone and with the spread over seeds.

Accuracies are in percent, errors in points. Seeds share the test images: more seeds shrink the spread's part of an error and
leave the test images' part as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from fedheal.core.arrays import Floats

LARGE_ERROR = 2.0  # points
Z2 = NormalDist().inv_cdf(0.975) ** 2


def sampling_error(accuracy: ArrayLike, n_examples: float) -> Floats:
    """Return the standard errors of accuracies in percent on one test set; 0 if its size is not known.

    They are taken at the centre of Wilson's interval, since 30 right of 30 is not an error of 0. An accuracy may be a mean over
    rounds. The rounds share the test images, so its error is that of one round.

    >>> sampling_error([80.0, 100.0], 30).round(1).tolist()
    [7.7, 4.2]
    """
    x = np.asarray(accuracy, np.float64)
    if n_examples < 1:
        return np.zeros_like(x)
    centre = _find_centre(np.clip(x, 0, 100), n_examples)
    return np.asarray(np.sqrt(centre * (100 - centre) / n_examples), np.float64)


def _find_centre(accuracy: ArrayLike, n_examples: float) -> Floats:
    return (np.asarray(accuracy, np.float64) + 50 * Z2 / n_examples) / (1 + Z2 / n_examples)


def mean_error(values: ArrayLike, sampling: ArrayLike, independent: int | None = None) -> Floats:
    """Return the standard error of a mean over runs (first axis): their spread, if there are several, and test images.

    `independent` is how many independent runs they count as, fewer than all where they share seeds.
    """
    x = np.asarray(values, np.float64)
    spread = x.var(axis=0, ddof=1) / (independent or len(x)) if len(x) > 1 else 0.0
    return np.asarray(np.sqrt(spread + np.square(sampling)), np.float64)


def fairness_errors(accuracy: Floats, errors: Floats) -> dict[str, Floats]:
    """Return the errors of AVG, STD and worst over domains (first axis) from those of the accuracies, to first order."""
    deviation = accuracy - accuracy.mean(axis=0)
    norm = (len(accuracy) - 1) * accuracy.std(axis=0, ddof=1) if len(accuracy) > 1 else np.zeros_like(accuracy[0])
    std = np.sqrt(np.square(deviation * errors).sum(axis=0)) / np.where(norm > 0, norm, np.inf)
    worst = np.take_along_axis(errors, accuracy.argmin(axis=0)[None], axis=0)[0]
    return {"avg": np.sqrt(np.square(errors).sum(axis=0)) / len(errors), "std": std, "worst": worst}


def note_on_test_sets(accuracies: Mapping[str, float], sizes: Mapping[str, int], are_shared: bool = False) -> str:
    """Name the domains with a test set so small that one standard error of the accuracy exceeds 2 points.

    `are_shared` says that all runs are known to use the same test images.

    >>> print(note_on_test_sets({"dslr": 80.0, "amazon": 75.0}, {"dslr": 30, "amazon": 10_000}))
    One standard error of the accuracy exceeds 2 points in dslr (30 images: one image is 3.33 points, standard error up to
    7.73); more seeds do not shrink it if all runs use the same test images.
    >>> print(note_on_test_sets({"amazon": 75.0}, {"amazon": 10_000}))
    One standard error of the accuracy is at most 0.43 points in every domain.
    """
    missing = [domain for domain in accuracies if domain not in sizes]
    if missing or not accuracies:
        raise ValueError(f"sizes are missing for: {', '.join(missing)}" if missing else "no domains")
    errors = {domain: float(sampling_error(accuracy, sizes[domain])) for domain, accuracy in accuracies.items()}
    small = [
        f"{domain} ({sizes[domain]} images: one image is {100 / sizes[domain]:.2f} points, standard error up to {se:.2f})"
        for domain, se in errors.items()
        if se > LARGE_ERROR
    ]
    if not small:
        return f"One standard error of the accuracy is at most {max(errors.values()):.2f} points in every domain."
    reason = "since all runs use the same test images" if are_shared else "if all runs use the same test images"
    return (
        f"One standard error of the accuracy exceeds {LARGE_ERROR:g} points in {', '.join(small)}; more seeds do not "
        f"shrink it{',' if are_shared else ''} {reason}."
    )
