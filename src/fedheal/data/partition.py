"""Assign training samples to clients.

A domain's training split is shuffled by the seed and the domain's name, and cut into consecutive pieces: clients of a domain
never share a sample, other domains and the number of rounds do not matter, and a client keeps its samples when clients are
added after it. Two other ways choose from the same shuffled order, and keep every client's number of samples:

- Dirichlet: client by client, class shares p ~ Dir(alpha, ..., alpha) decide how many samples of each class it takes from what
  is left of the domain (Hsu et al. 2019). Where a class runs out the client takes more of its other classes.
- Class filling, as in the code released with the paper for Office-Caltech: for every class that a client does not hold, a
  random sample of it from the whole training split replaces a random one of a class that the client holds at least twice.
  Clients may then share samples; what was replaced goes back to the others. Held-out samples are those of the plain
  partition: nothing replaces them, and nobody trains with them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy
import torch

from fedheal.core.rng import derive

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Client:
    """A client: its id, its domain, and its samples as positions in that domain's training split."""

    id: str
    domain: str
    indices: torch.Tensor  # int64 [samples]
    held_out: int = 0  # of these, the last so many are for validation


def partition_samples(
    sizes: Mapping[str, int],  # training samples of each domain
    clients: Mapping[str, int],  # of each domain
    samples: Mapping[str, int],  # per client of each domain
    seed: int,
    labels: Mapping[str, torch.Tensor] | None = None,  # of the training samples, for `dirichlet` and `class_filling`
    dirichlet: float | None = None,  # the smaller, the more skewed
    class_filling: bool = False,
    validation: float = 0.0,  # share of each client's samples to hold out
) -> tuple[Client, ...]:
    """Return the clients of every domain, in the order of `sizes`. Raise ValueError if a domain has too few samples."""
    assigned: list[Client] = []
    for domain, size in sizes.items():
        count = _get_count(clients, domain, "clients")
        if count > size:
            raise ValueError(
                f"domain {domain!r} has {size} training samples for {count} clients: set clients_per_domain='{domain}={size}'"
            )
        each = _get_count(samples, domain, "samples per client")
        if count * each > size:
            raise ValueError(
                f"{count} clients with {each} samples each need {count * each} samples of domain {domain!r}, "
                f"which has {size}: use fewer clients_per_domain or samples_per_client"
            )
        order, held_out = _shuffle(size, domain, seed), round(validation * each)
        if dirichlet is None and not class_filling:
            indices = [order[k * each : (k + 1) * each].copy() for k in range(count)]
        elif labels is None or (dirichlet is not None and class_filling):
            raise ValueError("dirichlet and class_filling need labels and cannot be combined: leave one out")
        elif dirichlet is not None:
            indices = assign_by_dirichlet(order, labels[domain].numpy(), count, each, dirichlet, seed, domain)
        else:
            indices = assign_with_class_filling(order, labels[domain].numpy(), count, each, held_out, seed, domain)
        assigned += [Client(f"{domain}-{k}", domain, torch.from_numpy(own), held_out) for k, own in enumerate(indices)]
    return tuple(assigned)


def _get_count(counts: Mapping[str, int], domain: str, what: str) -> int:
    if domain not in counts:
        raise ValueError(f"the number of {what} is missing for domain {domain!r}")
    if counts[domain] < 1:
        raise ValueError(f"the number of {what} of {domain!r} must be at least 1, not {counts[domain]}")
    return counts[domain]


def _shuffle(size: int, domain: str, seed: int) -> Ints:
    """Return a permutation of range(size) by sorting raw PCG64 output, a stream that numpy keeps fixed."""
    digest = hashlib.sha256(f"partition/{domain}".encode()).digest()
    words = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 32, 4)]
    keys = np.random.PCG64(np.random.SeedSequence([seed, *words])).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int64)


def assign_by_dirichlet(
    order: Ints, labels: Ints, clients: int, each: int, alpha: float, seed: int, domain: str
) -> list[Ints]:
    """Return each client's samples, taken class by class from `order`, the shuffled positions of the domain."""
    classes = int(labels.max()) + 1
    left = [list(order[labels[order] == c]) for c in range(classes)]
    assigned = []
    for client in range(clients):
        shares = _draw_shares(_draw_uniform(classes, seed, "dirichlet", domain, client), alpha)
        counts = _round_shares(shares, each, np.array([len(queue) for queue in left]))
        samples = [queue.pop(0) for queue, count in zip(left, counts, strict=True) for _ in range(count)]
        shuffled = np.argsort(_draw_uniform(each, seed, "dirichlet-order", domain, client), kind="stable")
        assigned.append(np.array(samples, dtype=np.int64)[shuffled])
    return assigned


def assign_with_class_filling(
    order: Ints, labels: Ints, clients: int, each: int, held_out: int, seed: int, domain: str
) -> list[Ints]:
    """Return each client's samples, the last `held_out` for validation and every class among the others, if they allow it."""
    validation = order[: clients * each].reshape(clients, each)[:, each - held_out :]
    is_free = ~np.isin(np.arange(len(labels)), validation)
    present = np.unique(labels[is_free])
    pool, assigned = order[is_free[order]].tolist(), []
    for client in range(clients):
        bits = np.random.PCG64(derive(seed, "class-filling", domain, client))
        samples = pool[: each - held_out]
        for wanted in present:
            counts = np.bincount(labels[samples], minlength=int(present.max()) + 1)
            if counts[wanted] or not (counts >= 2).any():
                continue
            spare = _choose(bits, np.flatnonzero(counts >= 2).tolist())
            samples.remove(_choose(bits, [i for i in samples if labels[i] == spare]))
            samples.append(_choose(bits, np.flatnonzero(is_free & (labels == wanted)).tolist()))
        used = set(samples)
        pool = [i for i in pool if i not in used]
        assigned.append(np.array([*samples, *validation[client]], dtype=np.int64))
    return assigned


def _draw_shares(uniform: Floats, alpha: float) -> Floats:
    """Return a sample of the Dirichlet distribution. numpy's own sampler may change its stream between versions."""
    value = scipy.special.gammaincinv(alpha, uniform)  # the gamma distribution's function, inverted
    # Exact where the value is too small to be a number.
    tiny = (np.log(uniform) + scipy.special.gammaln(alpha + 1)) / alpha
    with np.errstate(divide="ignore"):
        logs = np.where(value > 1e-200, np.log(value), tiny)
    odds = np.exp(logs - logs.max())
    shares: Floats = odds / odds.sum()
    return shares


def _round_shares(shares: Floats, number: int, left: Ints) -> Ints:
    """Return integers in these proportions that sum to `number`, none above what is left."""
    counts = np.zeros(len(left), dtype=np.int64)
    while (missing := number - int(counts.sum())) > 0:
        open_ = counts < left
        weights = np.where(open_, np.maximum(shares, 1e-300), 0.0)
        target = missing * weights / weights.sum()
        step = np.minimum(np.floor(target).astype(np.int64), left - counts)
        if not step.any():  # the last few, by largest remainder
            first = np.argsort(-target, kind="stable")[:missing]
            step = np.zeros_like(counts)
            step[[c for c in first if open_[c]]] = 1
        counts += step
    return counts


def _draw_uniform(number: int, seed: int, purpose: str, domain: str, client: int) -> Floats:
    """Return uniform numbers strictly between 0 and 1, from a raw stream that numpy keeps fixed."""
    raw = np.random.PCG64(derive(seed, purpose, domain, client)).random_raw(number)
    uniform: Floats = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * math.ldexp(1, -53)
    return uniform


def _choose(bits: np.random.PCG64, items: Sequence[int]) -> int:
    return items[int(bits.random_raw()) % len(items)]
