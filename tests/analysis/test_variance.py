"""Variance components of crossed designs."""

from __future__ import annotations

import numpy as np
import pytest

from fedheal.analysis.variance import estimate_components, get_sd_range


def test_a_table_of_two_by_three_is_as_by_hand() -> None:
    """Sums of squares 13.5, 7 and 1 with 1, 2 and 2 degrees of freedom."""
    estimate = estimate_components([[1, 2, 3], [3, 6, 6]], ["split", "init"])
    assert [c.name for c in estimate.components] == ["split", "init", "split x init"]
    assert [c.df for c in estimate.components] == [1, 2, 2]
    assert [c.mean_square for c in estimate.components] == pytest.approx([13.5, 3.5, 0.5])
    assert [c.variance for c in estimate.components] == pytest.approx([13 / 3, 3 / 2, 0.5])
    assert estimate.mean == 3.5
    assert estimate.error == pytest.approx(2.75**0.5)  # (13.5 + 3.5 - 0.5) / 6
    assert estimate.get_share(estimate.components[2]) == pytest.approx(0.5 / (13 / 3 + 2))


def test_a_negative_estimate_is_zero_and_no_variance_has_no_shares() -> None:
    crossed = estimate_components([[0, 1], [1, 0]], ["split", "init"])  # interaction alone: mean squares 0, 0, 1
    assert [c.variance for c in crossed.components] == pytest.approx([0, 0, 1])
    equal = estimate_components(np.full((2, 2), 5.0), ["split", "init"])
    assert equal.error == 0
    assert [equal.get_share(c) for c in equal.components] == [None] * 3


def test_one_factor_is_the_sample_variance() -> None:
    (only,) = estimate_components([1.0, 2.0, 6.0], ["split"]).components
    assert (only.variance, only.df) == (7.0, 2)


def draw_results(shape: tuple[int, ...], sds: dict[str, float], chance: np.random.Generator) -> np.ndarray:
    """Return results with normal effects; `sds` has a standard deviation by the axes that an effect goes over ("02")."""
    x = np.zeros(shape)
    for axes, sd in sds.items():
        x = x + sd * chance.normal(size=[n if str(i) in axes else 1 for i, n in enumerate(shape)])
    return x


def test_mean_squares_are_on_average_what_the_model_expects() -> None:
    """Of three factors with 4, 3 and 2 levels, over 200 drawn designs: within four standard errors."""
    sds = {"0": 3.0, "1": 1.0, "2": 2.0, "01": 0.0, "02": 1.5, "12": 0.0, "012": 0.5}
    expected = [6 * 9 + 3 * 2.25 + 0.25, 8 * 1 + 0.25, 12 * 4 + 3 * 2.25 + 0.25, 0.25, 3 * 2.25 + 0.25, 0.25, 0.25]
    chance = np.random.default_rng(0)
    designs = [
        estimate_components(draw_results((4, 3, 2), sds, chance), ["split", "init", "batch"]) for _ in range(200)
    ]
    assert [c.name for c in designs[0].components[3:5]] == ["split x init", "split x batch"]
    squares = np.array([[c.mean_square for c in estimate.components] for estimate in designs])
    assert (np.abs(squares.mean(axis=0) - expected) < 4 * squares.std(axis=0) / 200**0.5).all()


@pytest.mark.parametrize(
    ("shape", "sds"),
    [
        ((300, 300), {"0": 3.0, "1": 1.0, "01": 2.0}),
        ((60, 70, 50), {"0": 3.0, "1": 1.0, "2": 2.0, "01": 0.0, "02": 1.5, "12": 0.4, "012": 0.5}),
    ],
)
def test_known_components_are_recovered_from_a_large_design(shape: tuple[int, ...], sds: dict[str, float]) -> None:
    estimate = estimate_components(
        draw_results(shape, sds, np.random.default_rng(1)), ["split", "init", "batch"][: len(shape)]
    )
    assert [c.sd for c in estimate.components] == pytest.approx(list(sds.values()), rel=0.2, abs=0.05)


def test_the_range_of_a_standard_deviation_covers_as_often_as_it_says() -> None:
    low, high = get_sd_range(2)
    sds = np.random.default_rng(2).normal(size=(20_000, 3)).std(axis=1, ddof=1)
    assert np.mean((low * sds <= 1) & (high * sds >= 1)) == pytest.approx(0.95, abs=0.005)


@pytest.mark.parametrize(
    ("values", "problem"),
    [([[1, 2]], "at least two levels"), ([1, 2], "as many axes"), ([[1, np.nan], [1, 2]], "finite")],
)
def test_what_cannot_be_decomposed_is_refused(values: list[object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        estimate_components(values, ["split", "init"])
