"""FINCH: Sarfraz, Sharma and Stiefelhagen, "Efficient Parameter-free Clustering Using First Neighbor Relations", CVPR 2019.

Two points belong together if one is the other's nearest neighbour, or both have the same one; the means of the clusters are
clustered again until one is left. FPL takes the coarsest partition that still has more than one cluster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fedheal.core.arrays import Integers


def finch(vectors: NDArray[Any]) -> Integers:
    """Return the cluster of each row, by cosine distance.

    >>> finch(np.array([[1, 0.0], [1, 0.1], [0.0, 1], [0.1, 1]])).tolist()
    [0, 0, 1, 1]
    """
    points = vectors.astype(np.float64)
    labels: Integers = np.arange(len(points), dtype=np.int64)
    partition = np.zeros(len(points), np.int64)
    while len(points) > 1:
        merged = _join_first_neighbours(points)
        clusters = int(merged.max()) + 1  # at most half as many, since each point joins another
        if clusters == 1:
            break
        labels = partition = merged[labels]
        points = np.stack([vectors[labels == k].astype(np.float64).mean(axis=0) for k in range(clusters)])
    return partition


def _join_first_neighbours(points: NDArray[np.float64]) -> Integers:
    """Return the components of the graph that joins each point to its nearest neighbour."""
    unit = points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, -np.inf)
    nearest = similarity.argmax(axis=1)
    graph = coo_array((np.ones(len(points)), (np.arange(len(points)), nearest)), shape=(len(points), len(points)))
    return np.asarray(connected_components(graph, directed=False)[1], np.int64)
