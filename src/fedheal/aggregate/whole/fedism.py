"""The server's part of FedISM: weights that grow with the sharpness of the global model on a client's data.

Wu et al., "From Optimization to Generalization: Fair Federated Learning against Quality Shift via Inter-Client
Sharpness Matching", IJCAI 2024. `s_m` is the metric `sharpness`, at least 1e-10. The weights move towards shares in
proportion to `s^q`: `a = (1 - beta) a + beta share`. In the first round the weights are the shares. The clients' part
is in `local/fedism.py`.

Deviations, for clients that were absent: a cohort redistributes only the weight it holds, and a newcomer of a later round
starts with an equal share.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedheal.aggregate.client_index import extend_shares, index_clients
from fedheal.aggregate.draft import Draft
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Floats, normalise_weights
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.core.state import State, expect

LEAST_SHARPNESS = 1e-10
FEDISM_Q = Parameter(
    "q", 2.0, "the power of the sharpness; 0 is uniform", "Wu et al. 2024, released command", ge=0, le=10
)
FEDISM_BETA = Parameter(
    "beta", 0.5, "how fast weights follow the sharpness", "Wu et al. 2024, released code", ge=0, le=1
)


@dataclass(frozen=True)
class FedISMState(State, kind="fedism"):
    """Per client ever seen: its weight; they sum to 1."""

    clients: tuple[str, ...]
    weights: Floats


@declare_parameters(FEDISM_Q, FEDISM_BETA)
def fedism_stage(q: float = FEDISM_Q.default, beta: float = FEDISM_BETA.default) -> Stage:
    """Give weights that follow `sharpness^q`."""

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, FedISMState)
        clients, slots = index_clients(before.clients, draft.clients)
        weights = extend_shares(before.weights, len(clients))
        sharpness = np.maximum(draft.metric("sharpness"), LEAST_SHARPNESS)
        shares = normalise_weights(np.maximum(sharpness / sharpness.max(), LEAST_SHARPNESS) ** q)
        pace = beta if before.clients else 1.0
        moved = (1 - pace) * normalise_weights(weights[slots]) + pace * shares
        weights[slots] = weights[slots].sum() * moved
        report = {**draft.report, "sharpness": draft.key_by_client(draft.metric("sharpness"))}
        return replace(draft, weights=weights[slots], report=report), FedISMState(clients, weights)

    return Stage(lambda layout: FedISMState((), np.zeros(0)), apply, frozenset({"sharpness"}))
