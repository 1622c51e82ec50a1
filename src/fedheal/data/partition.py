"""Which training samples each client holds.

A domain's training split is shuffled once, by the seed and the domain's name alone, and cut into consecutive
pieces: clients of a domain never share a sample, and neither other domains nor the length of the training
change who holds what. A client keeps its samples when clients are added behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch


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
) -> tuple[Client, ...]:
    """Give every domain's clients their own samples.

    Per domain, `sizes` is the number of training samples, `clients` how many clients it gets, `samples` how many
    samples each of these holds. Clients come in the order of `sizes`, named "domain-0", "domain-1", ...

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
                f"which has {size}."
            )
        order = torch.from_numpy(_shuffled(size, domain, seed))
        found += [Client(f"{domain}-{k}", domain, order[k * each : (k + 1) * each].clone()) for k in range(count)]
    return tuple(found)


def _asked(numbers: Mapping[str, int], domain: str, what: str) -> int:
    if domain not in numbers:
        raise ValueError(f"The number of {what} is missing for domain {domain!r}.")
    if numbers[domain] < 1:
        raise ValueError(f"The number of {what} of {domain!r} must be at least 1, not {numbers[domain]}.")
    return numbers[domain]


def _shuffled(size: int, domain: str, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A permutation of range(size) by sorting raw PCG64 output, a stream that numpy keeps fixed."""
    digest = hashlib.sha256(f"partition/{domain}".encode()).digest()
    words = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 32, 4)]
    keys = np.random.PCG64(np.random.SeedSequence([seed, *words])).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int64)
