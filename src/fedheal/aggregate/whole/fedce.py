"""FedCE: Jiang et al., "Fair Federated Medical Image Segmentation via Client Contribution Estimation", CVPR 2023.

Weights `e` start equal. Gradient space: `cos_m` between a client's update and the weighted sum of the others', averaged
over its rounds; `a_m = 1 - mean cos`, normalised. Data space: `b_m = 1 - mean accuracy`, normalised. The accuracy is
that of the model without the client, on the client's validation data. The client itself averages it over its rounds
(`local/fedce.py`), with 0 for the first. `e ~ a * b` (`mode="times"`) or `a + b` (`"plus"`). The model is averaged with
the new e. a, b and e are floored at 1e-3.

Deviations. The weighted sum of the others uses the last e. The authors' assembler in NVFlare computes it with equal
weights in every round, since it never stores the new e. After a floor our shares sum to 1 again, theirs do not. Absent
clients: means are over a client's own rounds. The mean of the accuracy is over the rounds in which it was measured, and
a client without any takes the mean of the cohort. The 0 of the first round counts for all clients alike, as one of the
most rounds that any client took part in. Otherwise it would favour clients that come seldom. Weights are shares of the
cohort. Between rounds `e` is kept times the cohort's size, so that 1 is an equal part of any cohort. A newcomer starts
at 1.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedheal.aggregate.client_index import extend_column, index_clients
from fedheal.aggregate.draft import Draft
from fedheal.aggregate.gram import compute_gram
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Floats, Integers, normalise_weights
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.core.state import State, expect

FLOOR = 1e-3
ROUNDING = 1e-12  # more than the rounding error of a cosine: updates that are parallel up to that contribute alike
FEDCE_MODE = Parameter(
    "mode", "times", "times or plus: how both contributions combine", "Jiang et al. 2023", choices=("times", "plus")
)


@dataclass(frozen=True)
class FedCEState(State, kind="fedce"):
    """Per client ever seen: rounds, the sum of its cosines, and its last weight times the size of that cohort."""

    clients: tuple[str, ...]
    n: Integers
    cosines: Floats
    e: Floats


@declare_parameters(FEDCE_MODE)
def fedce_stage(mode: str = FEDCE_MODE.default) -> Stage:
    """Jiang et al. 2023: weight by estimated contribution. Needs validation data."""

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, FedCEState)
        clients, slots = index_clients(before.clients, draft.clients)
        n, cosines = extend_column(before.n, len(clients)), extend_column(before.cosines, len(clients))
        e = extend_column(before.e, len(clients), 1)
        n[slots] += 1
        cosines[slots] += cosines_to_others(compute_gram(draft), normalise_weights(e[slots]))
        opposition = 1 - cosines[slots] / n[slots]
        a = _floor_shares(np.where(opposition > ROUNDING, opposition, 0.0))
        accuracy, known = draft.metric("accuracy_without"), draft.metric("measured_rounds") > 0
        accuracy = np.where(known, accuracy, accuracy[known].mean() if known.any() else 0.0)
        b = _floor_shares(1 - (1 - 1 / n.max()) * accuracy)
        weights = _floor_shares(a * b if mode == "times" else a + b)
        e[slots] = weights * len(slots)
        return replace(draft, weights=weights, unnormalised_weights=e[slots]), FedCEState(clients, n, cosines, e)

    start = FedCEState((), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    return Stage(lambda layout: start, apply, frozenset({"accuracy_without", "measured_rounds"}))


def cosines_to_others(gram: Floats, e: Floats) -> Floats:
    """Return `cos(D_m, sum_{j != m} e_j D_j)` from inner products; 0 where one of the two does not move."""
    # A row per client with 0 for itself. To subtract its part from the sum over all clients would cancel digits.
    weights = np.where(np.eye(len(e), dtype=bool), 0.0, e)
    own = np.diag(gram)
    to_others = (weights * gram).sum(axis=1)
    others = ((weights @ gram) * weights).sum(axis=1)
    scale = np.sqrt(np.maximum(own, 0) * np.maximum(others, 0))
    return np.asarray(np.divide(to_others, scale, out=np.zeros_like(own), where=scale > 0))


def _floor_shares(values: Floats) -> Floats:
    """Normalise the values to shares, none below the floor."""
    return normalise_weights(np.maximum(normalise_weights(np.maximum(values, 0)), FLOOR))
