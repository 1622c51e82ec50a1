"""Assign training samples to clients.

A domain's training split is shuffled by the seed and the domain's name, and cut into consecutive pieces. So clients of
a domain never share a sample. Other domains and the number of rounds do not matter. A client keeps its samples when
clients are added after it. Other ways choose from the same shuffled order:

- Dirichlet: each client draws class shares p ~ Dir(alpha, ..., alpha). They decide how many samples of each class it
  takes from what is left of the domain (Hsu et al. 2019). If a class runs out, the client takes more of its other
  classes.
- Pathological: each client holds samples of so many classes and no others (McMahan et al. 2017; Li et al. 2022, "#C = k").
  Clients take their classes in turn from a shuffled order, so that all classes are held by nearly the same number of
  clients. A class is divided equally among its clients. One whose classes have too few samples holds fewer than others.
- Class filling, as in the code released with the paper for Office-Caltech: every client gets every class. For each
  class that a client does not hold, it gets a random sample from the whole training split. This replaces a random
  sample of a class that the client holds at least twice. Clients may then share samples. A replaced sample may go to
  other clients. Held-out samples are those of the plain partition: nothing replaces them, and nobody trains with them.

Quantity skew changes how many samples each client of a domain holds. It goes with any of these but class filling. The
clients' shares of the domain's samples are drawn from Dir(alpha, ..., alpha) (Li et al. 2022), and every client holds
at least ten.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy
import torch

from fedheal.core.arrays import Floats, Integers
from fedheal.core.rng import derive

MIN_SAMPLES = 10  # of a client under quantity skew, as in Li et al. 2022


@dataclass(frozen=True)
class Client:
    """A client: its id, its domain, and its samples as positions in that domain's training split."""

    id: str
    domain: str
    indices: torch.Tensor  # int64 [samples]
    held_out: int = 0  # of these, the last so many are for validation


@dataclass(frozen=True)
class Skew:
    """How the clients of a domain differ in labels and size; by default not at all, but for chance."""

    dirichlet: float | None = None  # label skew: the smaller, the stronger
    pathological: int | None = None  # classes per client
    quantity: float | None = None  # skew of the clients' sizes: the smaller, the stronger
    class_filling: bool = False

    def __post_init__(self) -> None:
        chosen = {key: value for key, value in vars(self).items() if value}
        if len(chosen) > 1 and (self.class_filling or (self.dirichlet and self.pathological)):
            both = " and ".join(f"{key} = {value}" for key, value in chosen.items())
            raise ValueError(f"{both} exclude each other: give one of them")


def partition_samples(
    sizes: Mapping[str, int],  # training samples of each domain
    clients: Mapping[str, int],  # of each domain
    samples: Mapping[str, int],  # per client of each domain
    seed: int,
    labels: Mapping[str, torch.Tensor] | None = None,  # of the training samples, for skew of labels
    skew: Skew = Skew(),  # noqa: B008 (it is frozen)
    validation: float = 0.0,  # share of each client's samples to hold out
) -> tuple[Client, ...]:
    """Return the clients of every domain, in the order of `sizes`. Raise ValueError if a domain has too few samples."""
    assigned: list[Client] = []
    for domain, size in sizes.items():
        count = _get_count(clients, domain, "clients")
        if count > size:
            raise ValueError(
                f"domain {domain!r} has {size} training samples for {count} clients: use at most {size} clients_per_domain"
            )
        each = _get_count(samples, domain, "samples per client")
        if count * each > size:
            need = "1 client needs" if count == 1 else f"{count} clients with {each} samples each need"
            fewer = "samples_per_client" if count == 1 else "clients_per_domain or samples_per_client"
            raise ValueError(f"{need} {count * each} samples of domain {domain!r}, which has {size}: use fewer {fewer}")
        own = None if labels is None else labels[domain].numpy()
        indices = _assign_domain(domain, _shuffle(size, domain, seed), own, [each] * count, seed, skew, validation)
        assigned += [
            Client(f"{domain}-{k}", domain, torch.from_numpy(held), round(validation * len(held)))
            for k, held in enumerate(indices)
        ]
    return tuple(assigned)


def _assign_domain(
    domain: str, order: Integers, labels: Integers | None, numbers: list[int], seed: int, skew: Skew, validation: float
) -> list[Integers]:
    """Return the samples of each client of a domain; `numbers` says how many each is to hold."""
    if skew.quantity is not None:
        numbers = draw_sizes(numbers, skew.quantity, seed, domain)
    if not (skew.dirichlet or skew.pathological or skew.class_filling):
        return [part.copy() for part in np.split(order, np.cumsum(numbers))[:-1]]
    if labels is None:
        raise ValueError("dirichlet, pathological and class_filling need labels")
    if skew.dirichlet:
        return assign_by_dirichlet(order, labels, numbers, skew.dirichlet, seed, domain)
    if skew.pathological:
        return assign_few_classes(order, labels, numbers, skew.pathological, seed, domain)
    held_out = round(validation * numbers[0])
    return assign_with_class_filling(order, labels, len(numbers), numbers[0], held_out, seed, domain)


def _get_count(counts: Mapping[str, int], domain: str, what: str) -> int:
    if domain not in counts:
        raise ValueError(f"the number of {what} is missing for domain {domain!r}")
    if counts[domain] < 1:
        raise ValueError(f"the number of {what} of {domain!r} must be at least 1, not {counts[domain]}")
    return counts[domain]


def _shuffle(size: int, domain: str, seed: int) -> Integers:
    """Return a permutation of range(size) by sorting raw PCG64 output, a stream that numpy keeps fixed."""
    digest = hashlib.sha256(f"partition/{domain}".encode()).digest()
    words = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 32, 4)]
    keys = np.random.PCG64(np.random.SeedSequence([seed, *words])).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int64)


def draw_sizes(numbers: list[int], alpha: float, seed: int, domain: str) -> list[int]:
    """Return how many samples each client holds: the same in total, at least ten each, the rest by Dir(alpha)."""
    least = min(MIN_SAMPLES, *numbers)
    shares = _draw_shares(_draw_uniform(len(numbers), seed, "quantity", domain, 0), alpha)
    rest = sum(numbers) - least * len(numbers)
    extra: list[int] = _round_shares(shares, rest, np.full(len(numbers), rest)).tolist()
    return [least + number for number in extra]


def assign_by_dirichlet(
    order: Integers, labels: Integers, numbers: list[int], alpha: float, seed: int, domain: str
) -> list[Integers]:
    """Return each client's samples, taken class by class from `order`, the shuffled positions of the domain."""
    classes = int(labels.max()) + 1
    left = [list(order[labels[order] == c]) for c in range(classes)]
    assigned = []
    for client, each in enumerate(numbers):
        shares = _draw_shares(_draw_uniform(classes, seed, "dirichlet", domain, client), alpha)
        counts = _round_shares(shares, each, np.array([len(queue) for queue in left]))
        samples = [queue.pop(0) for queue, count in zip(left, counts, strict=True) for _ in range(count)]
        shuffled = np.argsort(_draw_uniform(each, seed, "dirichlet-order", domain, client), kind="stable")
        assigned.append(np.array(samples, dtype=np.int64)[shuffled])
    return assigned


def assign_few_classes(
    order: Integers, labels: Integers, numbers: list[int], per_client: int, seed: int, domain: str
) -> list[Integers]:
    """Return each client's samples, which are of `per_client` classes."""
    present = np.unique(labels)
    if per_client > len(present):
        raise ValueError(
            f"pathological = {per_client}: domain {domain!r} has {len(present)} classes; use at most as many"
        )
    turns = np.argsort(_draw_uniform(len(present), seed, "pathological", domain, 0), kind="stable")
    classes = [
        present[turns[np.arange(k * per_client, (k + 1) * per_client) % len(present)]] for k in range(len(numbers))
    ]
    owners = np.bincount(np.concatenate(classes), minlength=int(present.max()) + 1)
    queues = {c: list(order[labels[order] == c]) for c in present}
    quota = {c: len(queue) // max(1, owners[c]) for c, queue in queues.items()}
    assigned = []
    for client, (own, wanted) in enumerate(zip(classes, numbers, strict=True)):
        left = np.array([quota[c] for c in own])
        counts = _round_shares(np.full(per_client, 1.0), min(wanted, int(left.sum())), left)
        samples = [queues[c].pop(0) for c, count in zip(own, counts, strict=True) for _ in range(count)]
        if not samples:
            raise ValueError(
                f"pathological = {per_client}: domain {domain!r} has too few samples of the classes of client {client}: "
                "use fewer clients_per_domain or more classes"
            )
        shuffled = np.argsort(_draw_uniform(len(samples), seed, "pathological-order", domain, client), kind="stable")
        assigned.append(np.array(samples, dtype=np.int64)[shuffled])
    return assigned


def assign_with_class_filling(
    order: Integers, labels: Integers, clients: int, each: int, held_out: int, seed: int, domain: str
) -> list[Integers]:
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


def _round_shares(shares: Floats, number: int, left: Integers) -> Integers:
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
