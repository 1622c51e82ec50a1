"""Which training samples each client holds.

A domain's training split is shuffled once, by the seed and the domain's name alone, and cut into consecutive
pieces: clients of a domain never share a sample, and neither other domains nor the length of the training
change who holds what. A client keeps its samples when clients are added behind it. Label skew and the filling-in of missing
classes, where they are asked for, choose from the same shuffled order (see `skew`).
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
    """One participant: its name, its domain, and its samples as positions in that domain's training split."""

    id: str
    domain: str
    indices: torch.Tensor  # int64 [samples]


def partition(
    sizes: Mapping[str, int],
    clients: Mapping[str, int],
    samples: Mapping[str, int],
    seed: int,
    labels: Mapping[str, torch.Tensor] | None = None,
    dirichlet: float | None = None,
    class_filling: bool = False,
) -> tuple[Client, ...]:
    """Give every domain's clients their own samples.

    Per domain, `sizes` is the number of training samples, `clients` how many clients it gets, `samples` how many
    samples each of these holds. Clients come in the order of `sizes`, named "domain-0", "domain-1", ...
    `dirichlet` (the smaller, the more skewed) and `class_filling` need the `labels` of the training samples.

    >>> two = partition({"street": 10}, {"street": 2}, {"street": 3}, seed=0)
    >>> [client.id for client in two], [len(client.indices) for client in two]
    (['street-0', 'street-1'], [3, 3])
    """
    found: list[Client] = []
    for domain, size in sizes.items():
        count, each = _asked(clients, domain, "clients"), _asked(samples, domain, "samples per client")
        if count * each > size:
            raise ValueError(
                f"{count} clients with {each} samples each need {count * each} samples of domain {domain!r}, "
                f"which has {size}"
            )
        order = _shuffled(size, domain, seed)
        if dirichlet is None and not class_filling:
            held = [order[k * each : (k + 1) * each].copy() for k in range(count)]
        elif labels is None or (dirichlet is not None and class_filling):
            raise ValueError("dirichlet and class_filling need labels, and exclude each other")
        elif dirichlet is not None:
            held = skew.dirichlet(order, labels[domain].numpy(), count, each, dirichlet, seed, domain)
        else:
            held = skew.filled(order, labels[domain].numpy(), count, each, seed, domain)
        found += [Client(f"{domain}-{k}", domain, torch.from_numpy(h)) for k, h in enumerate(held)]
    return tuple(found)


def _asked(numbers: Mapping[str, int], domain: str, what: str) -> int:
    if domain not in numbers:
        raise ValueError(f"the number of {what} is missing for domain {domain!r}")
    if numbers[domain] < 1:
        raise ValueError(f"the number of {what} of {domain!r} must be at least 1, not {numbers[domain]}")
    return numbers[domain]


def _shuffled(size: int, domain: str, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A permutation of range(size) by sorting raw PCG64 output, a stream that numpy keeps fixed."""
    digest = hashlib.sha256(f"partition/{domain}".encode()).digest()
    words = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 32, 4)]
    keys = np.random.PCG64(np.random.SeedSequence([seed, *words])).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int64)
