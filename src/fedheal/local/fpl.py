"""FPL: Huang et al., "Rethinking Federated Learning with Domain Shift: A Prototype View", CVPR 2023.

The server clusters the clients' prototypes of each class. The loss is `CE + CPCL + UPCR`: a contrast to the cluster
means, and consistency with their mean, the unbiased prototype. Clusters are those of FINCH (Sarfraz et al., "Efficient
Parameter-free Clustering Using First Neighbor Relations", CVPR 2019): two points belong together if one is the other's
nearest neighbour, or both have the same one. The means of the clusters are clustered again until one is left. FPL takes
the coarsest partition that still has more than one cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedheal.core.arrays import Integers
from fedheal.core.layout import Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.prototypes import Prototypes, compare_cosine, get_known_classes, get_previous
from fedheal.local.term import Arrays, Batch, Context, ServerContext

FPL_TEMPERATURE = Parameter(
    "temperature", 0.02, "temperature of the contrastive loss", "Huang et al. 2023, released code; MarsFL: 0.2", gt=0
)


@declare_parameters(FPL_TEMPERATURE)
@dataclass(frozen=True)
class FPL(Prototypes):
    """Huang et al. 2023: cluster prototypes by FINCH for contrast, their mean for consistency."""

    temperature: float = FPL_TEMPERATURE.default

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        super().prepare(ctx, start)
        if "clusters" in ctx.scratch:
            # Padded to a power of two: with few shapes, a captured step serves many rounds.
            owner, clusters = ctx.scratch["owner"], ctx.scratch["clusters"]
            padding = (1 << (len(owner) - 1).bit_length()) - len(owner)
            ctx.scratch["owner"] = functional.pad(owner, (0, padding), value=-1)
            ctx.scratch["clusters"] = functional.pad(clusters, (0, 0, 0, padding))
        return start

    def prototype_loss(self, batch: Batch, z: Tensor, ctx: Context) -> Tensor | None:
        known = get_known_classes(ctx)
        if known is None:
            return None
        owner = ctx.scratch["owner"]  # the class of each cluster; -1 is padding
        similarity = compare_cosine(z, ctx.scratch["clusters"]) / self.temperature
        similarity = similarity.masked_fill(owner < 0, -torch.inf)
        has_prototype = known[batch.y]
        # A sample of a class without clusters counts all of them as its own: its contrast is 0.
        is_own = (owner[None, :] == batch.y[:, None]) | ~has_prototype[:, None]
        own = similarity.masked_fill(~is_own, -torch.inf).logsumexp(dim=1)
        contrast = (similarity.logsumexp(dim=1) - own).sum() / len(z)
        gap: Tensor = (z - ctx.scratch["prototypes"][batch.y]) * has_prototype[:, None]
        return contrast + (gap**2).mean()

    def absorb(
        self, before: Packed, aggregated: Packed, messages: Sequence[Arrays], shared: Arrays, ctx: ServerContext
    ) -> tuple[Packed, Arrays]:
        if not messages:
            return aggregated, shared
        previous = get_previous(messages, shared)
        means: dict[int, Tensor] = {}  # class -> the means of its clusters
        if "owner" in previous:
            means = {y: previous["clusters"][previous["owner"] == y] for y in set(previous["owner"].tolist())}
        for y in range(len(messages[0]["count"])):
            prototypes = [message["prototypes"][y] for message in messages if message["count"][y] > 0]
            if prototypes:
                means[y] = _average_clusters(torch.stack(prototypes))
        if not means:
            return aggregated, shared
        unbiased = torch.zeros_like(messages[0]["prototypes"])
        known = torch.zeros(len(unbiased), dtype=torch.int64, device=unbiased.device)
        for y, class_means in means.items():
            unbiased[y], known[y] = class_means.mean(dim=0), 1
        owner = torch.tensor([y for y in sorted(means) for _ in means[y]], device=unbiased.device)
        clusters = torch.cat([means[y] for y in sorted(means)])
        return aggregated, {"prototypes": unbiased, "known": known, "clusters": clusters, "owner": owner}


def _average_clusters(vectors: Tensor) -> Tensor:
    """Cluster the rows and return the mean of each cluster."""
    labels = torch.from_numpy(finch(vectors.detach().cpu().numpy())).to(vectors.device)
    return torch.stack([vectors[labels == label].mean(dim=0) for label in range(int(labels.max()) + 1)])


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
    unit = points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, -np.inf)
    nearest = similarity.argmax(axis=1)
    edges, size = (np.arange(len(points)), nearest), len(points)
    graph = scipy.sparse.coo_array((np.ones(size), edges), shape=(size, size))
    return np.asarray(scipy.sparse.csgraph.connected_components(graph, directed=False)[1], np.int64)
