"""Label skew by Dirichlet shares, and class filling as in the released code.

Both keep every client's number of samples, and depend on the seed and the domain only.

- Dirichlet: client by client, class shares p ~ Dir(alpha, ..., alpha) decide how many samples of each class it takes from what
  is left of the domain (Hsu et al. 2019). Where a class runs out the client takes more of its other classes. Clients stay
  disjoint, and keep their samples when clients are added after them.
- Class filling, as in the code released with the paper for Office-Caltech: for every class that a client does not hold, a
  random sample of it from the whole training split replaces a random one of a class that the client holds at least twice.
  Clients may then share samples; what was replaced goes back to the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import gammaincinv, gammaln

from fedheal.core.rng import derive

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def assign_by_dirichlet(
    order: Ints, labels: Ints, clients: int, each: int, alpha: float, seed: int, domain: str
) -> list[Ints]:
    """Return each client's samples, taken class by class from `order`, the shuffled positions of the domain.

    >>> order, labels = np.arange(100), np.arange(100) % 2
    >>> [len(indices) for indices in assign_by_dirichlet(order, labels, 3, 20, 0.1, seed=0, domain="street")]
    [20, 20, 20]
    """
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


def assign_with_class_filling(order: Ints, labels: Ints, clients: int, each: int, seed: int, domain: str) -> list[Ints]:
    """Return each client's samples, with every class among them if `each` allows it."""
    present = np.unique(labels)
    pool, assigned = list(order), []
    for client in range(clients):
        bits = np.random.PCG64(derive(seed, "class-filling", domain, client))
        samples = pool[:each]
        for wanted in present:
            counts = np.bincount(labels[samples], minlength=int(present.max()) + 1)
            if counts[wanted] or not (counts >= 2).any():
                continue
            spare = _choose(bits, np.flatnonzero(counts >= 2).tolist())
            samples.remove(_choose(bits, [i for i in samples if labels[i] == spare]))
            samples.append(_choose(bits, np.flatnonzero(labels == wanted).tolist()))
        used = set(samples)
        pool = [i for i in pool if i not in used]
        assigned.append(np.array(samples, dtype=np.int64))
    return assigned


def _draw_shares(uniform: Floats, alpha: float) -> Floats:
    """Return a sample of the Dirichlet distribution, by inverting the gamma distribution's function in logarithms.

    numpy's own sampler may change its stream between versions; this depends on uniform numbers that do not.
    """
    value = gammaincinv(alpha, uniform)
    tiny = (np.log(uniform) + gammaln(alpha + 1)) / alpha  # exact where the value is too small to be a number
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
