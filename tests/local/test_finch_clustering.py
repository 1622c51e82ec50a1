"""FINCH against clusters made by hand, and the cases at the edge."""

from __future__ import annotations

import numpy as np
import pytest

from fedheal.local.fpl import finch


def make_unit_vectors(*degrees: float) -> np.ndarray:
    """Return unit vectors at these angles."""
    radians = np.deg2rad(degrees)
    return np.stack([np.cos(radians), np.sin(radians)], axis=1)


def group_points(labels: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in set(labels.tolist())}


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ([0, 5, 90, 95], [{0, 1}, {2, 3}]),
        ([0, 90, 5, 95], [{0, 2}, {1, 3}]),
        ([0, 5, 8, 90, 95], [{0, 1, 2}, {3, 4}]),  # 0 -> 5 <-> 8: a chain of nearest neighbours
        ([0, 5, 90, 95, 180, 185], [{0, 1}, {2, 3}, {4, 5}]),  # three means always join into one: the finer one stays
        ([0, 2, 10, 12, 100, 102, 110, 112], [{0, 1, 2, 3}, {4, 5, 6, 7}]),  # four pairs, then two: the coarser one
        ([0, 10, 21, 33, 46], [{0, 1, 2, 3, 4}]),  # one chain, at once
    ],
    ids=str,
)
def test_clusters_by_hand(degrees: list[float], expected: list[set[int]]) -> None:
    assert group_points(finch(make_unit_vectors(*degrees))) == {frozenset(group) for group in expected}


def test_only_the_angle_counts() -> None:
    points = make_unit_vectors(0, 5, 90, 95) * np.array([[1.0], [1000.0], [0.001], [5.0]])
    assert group_points(finch(points)) == {frozenset({0, 1}), frozenset({2, 3})}


def test_labels_count_from_zero_without_gaps() -> None:
    rng = np.random.default_rng(0)
    for size in range(1, 30):
        labels = finch(rng.normal(size=(size, 4)))
        assert labels.shape == (size,)
        assert sorted(set(labels.tolist())) == list(range(labels.max() + 1))


@pytest.mark.parametrize(
    "points",
    [
        np.ones((1, 3)),
        np.zeros((1, 3)),
        np.ones((5, 3)),
        np.zeros((4, 3)),
        np.array([[1.0, 0.0], [0.0, 1.0]]),
        np.array([[1.0, 0.0], [-1.0, 0.0]]),
        np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]),
    ],
    ids=["one point", "one zero", "all equal", "all zero", "two", "two opposite", "zeros and a point"],
)
def test_what_is_one_cluster(points: np.ndarray) -> None:
    assert finch(points).tolist() == [0] * len(points)


def test_no_points_are_no_clusters() -> None:
    assert finch(np.zeros((0, 3))).tolist() == []


def test_the_order_of_the_points_does_not_change_the_clusters() -> None:
    points = make_unit_vectors(0, 2, 10, 12, 100, 102, 110, 112)
    shuffled = np.random.default_rng(1).permutation(len(points))
    clusters = {frozenset(shuffled[list(group)].tolist()) for group in group_points(finch(points[shuffled]))}
    assert clusters == group_points(finch(points))


def test_single_precision_and_huge_or_tiny_vectors() -> None:
    for scale in (1e-30, 1.0, 1e30):
        points = (make_unit_vectors(0, 5, 90, 95) * scale).astype(np.float32)
        assert group_points(finch(points)) == {frozenset({0, 1}), frozenset({2, 3})}, scale
