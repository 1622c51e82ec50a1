"""AFL: more weight to the clients with the largest losses, by projected ascent on the mixture of clients.

Mohri, Sivek and Suresh, "Agnostic Federated Learning", ICML 2019: `min_W max_lambda sum_m lambda_m F_m(W)`, lambda in a
convex part of the simplex. The ascent step is `lambda <- Proj(lambda + gamma F)`, `F_m` the loss of the received model
on the client's own training data, the metric `loss`. The part of the simplex is `lambda_m >= floor/M`, M the clients
ever seen.

Deviations, as in every federated version: clients take many local steps instead of one gradient step. Lambda is updated
before the average that it weights. The last model is used, not the average of all models. Absent clients keep their
weight: a cohort S projects `lambda_S + gamma F_S` on the simplex of mass `sum_S lambda`. If all clients are present,
this is the step above. (Projecting all entries would drive absent ones to 0 with losses all equal.) A newcomer starts
with `1/M` and the others shrink to make room. `reset=True` forgets lambda after every round, as a public benchmark of
FedHEAL's authors does: `Proj(1/K + gamma F)` over the cohort. That code takes the loss of the local model on *test*
data; this one never does.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedheal.aggregate.client_index import extend_shares, index_clients
from fedheal.aggregate.draft import Draft
from fedheal.aggregate.stage import Stage, stateless
from fedheal.core.arrays import Floats
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.core.state import State, expect

NEEDS = frozenset({"loss"})
AFL_GAMMA = Parameter(
    "gamma", 0.01, "how fast weights climb towards larger losses", "released scripts (0.01 to 0.1); MarsFL", ge=0
)
AFL_FLOOR = Parameter(
    "floor", 1e-3, "least weight, as a share of 1/M", "ours: so that no cohort is without weight", ge=0, le=1
)
AFL_RESET = Parameter("reset", False, "start from equal weights every round", "Mohri et al. 2019; MarsFL: true")


@dataclass(frozen=True)
class AflState(State, kind="afl"):
    """Per client ever seen: its weight `lambda`; they sum to 1."""

    clients: tuple[str, ...]
    weights: Floats


@declare_parameters(AFL_GAMMA, AFL_FLOOR, AFL_RESET)
def afl_weights(
    gamma: float = AFL_GAMMA.default, floor: float = AFL_FLOOR.default, reset: bool = AFL_RESET.default
) -> Stage:
    """Mohri, Sivek and Suresh 2019: more weight to larger losses. `gamma=0` is uniform averaging."""

    def ascend(weights: Floats, loss: Floats, least: float) -> Floats:
        with np.errstate(over="ignore"):  # an infinite step goes to the same corner as a very long one
            ascent = gamma * (loss - loss.max())  # a common shift does not change the projection
        return project(weights + ascent, float(weights.sum()), least)

    def apply_from_uniform(draft: Draft) -> Draft:
        k = len(draft.rows)
        weights = ascend(np.full(k, 1 / k), draft.metric("loss"), floor / k)
        return replace(draft, weights=weights, unnormalised_weights=k * weights, report=report_loss(draft))

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, AflState)
        clients, slots = index_clients(before.clients, draft.clients)
        weights = extend_shares(before.weights, len(clients))
        weights[slots] = ascend(weights[slots], draft.metric("loss"), floor / len(clients))
        return replace(draft, weights=weights[slots], report=report_loss(draft)), AflState(clients, weights)

    if reset:
        return stateless(apply_from_uniform, NEEDS)
    return Stage(lambda layout: AflState((), np.zeros(0)), apply, NEEDS)


def project(v: Floats, mass: float = 1.0, floor: float = 0.0) -> Floats:
    """Return the point nearest to v whose entries sum to `mass` and are all at least `floor`.

    It is `floor + max(v - theta, 0)`. Theta follows from sorting: take the largest j for which the j largest entries
    stay positive when they alone share what is left above the floors (Held, Wolfe and Crowder 1974; Duchi et al. 2008).
    """
    free = mass - len(v) * floor
    if free <= 0:
        return np.full(len(v), max(floor, 0.0))
    v = v - v.max()
    largest = np.sort(v)[::-1]
    theta = (np.cumsum(largest) - free) / np.arange(1, len(v) + 1)
    x = np.maximum(v - theta[np.flatnonzero(largest > theta)[-1]], 0)
    return np.asarray(floor + x * (free / x.sum()))


def report_loss(draft: Draft) -> dict[str, object]:
    """Return the draft's report with the clients' losses."""
    return dict(draft.report) | {"loss": draft.key_by_client(draft.metric("loss"))}
