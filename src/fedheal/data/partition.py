"""Assign training samples to clients.

A domain's training split is shuffled by the seed and the domain's name, and cut into consecutive pieces: clients of a domain
never share a sample, other domains and the number of rounds do not matter, and a client keeps its samples when clients are
added after it. Label skew and class filling choose from the same shuffled order (see `skew`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fedheal.data import skew


@dataclass(frozen=True)
class Client:
    """A client: its id, its domain, and its samples as positions in that domain's training split."""

    id: str
    domain: str
    indices: torch.Tensor  # int64 [samples]


def partition_samples(
    sizes: Mapping[str, int],
    clients: Mapping[str, int],
    samples: Mapping[str, int],
    seed: int,
    labels: Mapping[str, torch.Tensor] | None = None,
    dirichlet: float | None = None,
    class_filling: bool = False,
) -> tuple[Client, ...]:
    """Return the clients of every domain, in the order of `sizes`. Raise ValueError if a domain has too few samples.

    Args:
        sizes: Number of training samples of each domain.
        clients: Number of clients of each domain.
        samples: Number of samples per client of each domain.
        seed: Seed of the shuffle.
        labels: Labels of the training samples, for `dirichlet` and `class_filling`.
        dirichlet: Concentration of the label skew; the smaller, the more skewed.
        class_filling: Give every client every class.

    >>> two = partition_samples({"street": 10}, {"street": 2}, {"street": 3}, seed=0)
    >>> [client.id for client in two], [len(client.indices) for client in two]
    (['street-0', 'street-1'], [3, 3])
    """
    assigned: list[Client] = []
    for domain, size in sizes.items():
        count, each = _get_count(clients, domain, "clients"), _get_count(samples, domain, "samples per client")
        if count * each > size:
            raise ValueError(
                f"{count} clients with {each} samples each need {count * each} samples of domain {domain!r}, "
                f"which has {size}"
            )
        order = _shuffle(size, domain, seed)
        if dirichlet is None and not class_filling:
            indices = [order[k * each : (k + 1) * each].copy() for k in range(count)]
        elif labels is None or (dirichlet is not None and class_filling):
            raise ValueError("dirichlet and class_filling need labels, and exclude each other")
        elif dirichlet is not None:
            indices = skew.assign_by_dirichlet(order, labels[domain].numpy(), count, each, dirichlet, seed, domain)
        else:
            indices = skew.assign_with_class_filling(order, labels[domain].numpy(), count, each, seed, domain)
        assigned += [Client(f"{domain}-{k}", domain, torch.from_numpy(own)) for k, own in enumerate(indices)]
    return tuple(assigned)


def _get_count(counts: Mapping[str, int], domain: str, what: str) -> int:
    if domain not in counts:
        raise ValueError(f"the number of {what} is missing for domain {domain!r}")
    if counts[domain] < 1:
        raise ValueError(f"the number of {what} of {domain!r} must be at least 1, not {counts[domain]}")
    return counts[domain]


def _shuffle(size: int, domain: str, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return a permutation of range(size) by sorting raw PCG64 output, a stream that numpy keeps fixed."""
    digest = hashlib.sha256(f"partition/{domain}".encode()).digest()
    words = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 32, 4)]
    keys = np.random.PCG64(np.random.SeedSequence([seed, *words])).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int64)
