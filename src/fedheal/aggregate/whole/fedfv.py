"""FedFV: take out of every client's update what works against another's, then average.

Wang, Fan, Qi, Wen, Wang and Yu, "Federated Learning with Fair Averaging", IJCAI 2021.

1. Updates are taken in the order of the clients' losses (of the received model, on their own training data), smallest
   first. Each is projected off every other *original* update that it conflicts with (negative inner product). The share
   `alpha` of clients with the largest losses keep their updates as they are. The mean of the results is `g`.
2. From round `tau` (counted from 0) on, for k = tau-1, ..., 0: take the last updates of the clients last seen k rounds
   ago. Those that conflict with g are added up, and g is projected off the sum. As in the authors' code, k = 0 are this
   round's own clients.
3. g is given the length of the plain mean of the updates. Buffers are averaged evenly.

All of this happens in the span of the updates, so it is done on their inner products. Updates are the negatives of the
paper's gradients, and conflict alike.

Deviations: the authors' code counts rounds from 1, so that step 2 begins a round earlier. An angle within rounding of
90 degrees is no conflict (`TINY`). Where nothing is left of g, the model stays; the authors' code divides by zero.
Equal losses are ordered by client id. With `alpha=0` nobody is kept, as in the authors' code, although its formula for
the share would keep one.

Memory: the state and every checkpoint hold the updates of clients last seen in the `tau - 1` rounds before, as they
were sent. For tau 0 and 1 that is nothing, else at most `(tau - 1) * cohort * G` numbers: 800 MB for 20 clients, 5
million float32 parameters and tau = 3.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedheal.aggregate.draft import Draft
from fedheal.aggregate.gram import iterate_blocks, sum_products
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Floats, Integers
from fedheal.core.layout import Layout
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.core.state import State, expect

TINY = 1e-12  # of the product of two norms: what rounding may leave of a zero
SOURCE = "Wang et al. 2021, released code"
FEDFV_ALPHA = Parameter("alpha", 0.1, "share of the largest losses whose updates stay as they are", SOURCE, ge=0, le=1)
FEDFV_TAU = Parameter("tau", 1, "rounds whose absent clients' conflicts count", SOURCE, ge=0)


@dataclass(frozen=True)
class FedFVState(State, kind="fedfv"):
    """Rounds done, and of clients that step 2 may still need: the round they were last seen in and their update then."""

    rounds: int
    clients: tuple[str, ...]
    last: Integers
    updates: Tensor  # [clients, G]

    def __post_init__(self) -> None:
        if self.updates.ndim != 2:
            raise ValueError(f"remembered updates must be a matrix, got shape {tuple(self.updates.shape)}")


@declare_parameters(FEDFV_ALPHA, FEDFV_TAU)
def fedfv_stage(alpha: float = FEDFV_ALPHA.default, tau: int = FEDFV_TAU.default) -> Stage:
    """Wang et al. 2021: updates that conflict are projected off each other."""

    def init(layout: Layout) -> State:
        return FedFVState(0, (), np.zeros(0, np.int64), torch.zeros(0, layout.sizes().params))

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, FedFVState)
        k, now = len(draft.rows), before.rounds
        past = np.array([client not in draft.clients for client in before.clients], bool)
        remembered = before.updates[torch.from_numpy(past)]
        age = np.concatenate([np.zeros(k, np.int64), now - before.last[past]])
        matrix = sum_products((block for _, block in _iterate_with_past(draft, remembered)), len(age))
        largest = float(np.diag(matrix).max()) or 1.0
        unit = matrix / largest
        order = np.argsort(draft.metric("loss"), kind="stable")
        coefficients = np.zeros(len(age))
        coefficients[:k] = project_internal(unit[:k, :k], order, choose_unprojected(order, alpha)).mean(axis=0)
        if now >= tau:
            coefficients = project_external(unit, coefficients, age, tau)
        step = _combine_updates(draft, remembered, coefficients, TINY * math.sqrt(largest))
        norms = np.sqrt(np.diag(unit)[:k])
        report = {
            "conflicts": int((unit[:k, :k] < -TINY * norms[:, None] * norms).sum()) // 2,
            "coefficients": draft.key_by_client(coefficients[:k]),
        }
        draft = replace(draft, weights=np.ones(k), step=step, report={**draft.report, **report})
        return draft, _remember(before, draft, past, tau)

    return Stage(init, apply, frozenset({"loss"}), frozenset({"weights", "mask"}))


def choose_unprojected(order: Integers, alpha: float) -> Integers:
    """Return the clients with the largest losses: from position `ceil((K-1)(1-alpha))` on, rounding errors aside."""
    return order[math.ceil((len(order) - 1) * (1 - alpha) - 1e-9) :] if alpha > 0 else order[:0]


def project_internal(gram: Floats, order: Integers, unprojected: Integers) -> Floats:
    """Return `[k, k]`: every client's projected update as coefficients of the original ones.

    >>> gram = np.array([[1.0, -1.0], [-1.0, 4.0]])
    >>> project_internal(gram, np.array([0, 1]), np.array([1])).tolist()  # a + b/4 is orthogonal to b
    [[1.0, 0.25], [0.0, 1.0]]
    """
    norms = np.sqrt(np.diag(gram))
    rows = np.eye(len(gram))
    free = ~np.isin(np.arange(len(gram)), unprojected)
    for j in order:
        dots = rows @ gram[:, j]
        against = free & (dots < -TINY * norms * norms[j])
        against[j] = False
        rows[against, j] -= dots[against] / gram[j, j]
    return rows


def project_external(gram: Floats, coefficients: Floats, age: Integers, tau: int) -> Floats:
    """Project the combination off the sum of the updates it conflicts with, those of the longest absent clients first."""
    norms = np.sqrt(np.diag(gram))
    for k in range(tau - 1, -1, -1):
        dots = gram @ coefficients
        against = (age == k) & (dots < -TINY * norms.max() * norms)
        square = float(gram[np.ix_(against, against)].sum())
        if square > 0:
            coefficients = coefficients - against * (dots[against].sum() / square)
    return coefficients


def _iterate_with_past(draft: Draft, remembered: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for columns, block in iterate_blocks(draft):
        yield columns, torch.cat([block, remembered[:, columns].to(block)])


def _combine_updates(draft: Draft, remembered: Tensor, coefficients: Floats, least: float) -> Tensor:
    """Return the combination, with the norm of the plain mean of this round's updates; 0 if shorter than `least`."""
    device = draft.updates.deltas.device
    factors = torch.from_numpy(coefficients).to(device)
    step = torch.zeros(draft.sizes.params, dtype=torch.float64, device=device)
    square = torch.zeros((), dtype=torch.float64, device=device)
    for columns, block in _iterate_with_past(draft, remembered):
        step[columns] = factors @ block
        square += (block[: len(draft.rows)].mean(dim=0) ** 2).sum()
    norm = float(step.norm())
    return step * (math.sqrt(float(square)) / norm if norm > least else 0.0)


def _remember(before: FedFVState, draft: Draft, past: NDArray[np.bool_], tau: int) -> FedFVState:
    """Keep what the next round may need: clients last seen fewer than tau rounds before it."""
    now = before.rounds
    if tau < 2:
        return replace(before, rounds=now + 1)
    old = np.flatnonzero(past & (now + 1 - before.last < tau))
    clients = (*(before.clients[i] for i in old), *draft.clients)
    last = np.concatenate([before.last[old], np.full(len(draft.rows), now, np.int64)])
    new_updates = draft.select_rows(draft.updates.deltas)
    old_updates = before.updates[torch.from_numpy(old).to(before.updates.device)].to(new_updates.device)
    return FedFVState(now + 1, clients, last, torch.cat([old_updates, new_updates]) if len(old) else new_updates)
