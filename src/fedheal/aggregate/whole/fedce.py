"""FedCE: Jiang et al., "Fair Federated Medical Image Segmentation via Client Contribution Estimation", CVPR 2023.

Weights `e` start equal. Gradient space: `cos_m` between a client's update and the weighted sum of the others', averaged over
its rounds; `a_m = 1 - mean cos`, normalised. Data space: the accuracy on the client's validation data of the model without
it, averaged over its rounds by the client itself (`local/validated.py`), with 0 for the first; `b_m = 1 - mean accuracy`,
normalised. `e ~ a * b` (`mode="times"`) or `a + b` (`"plus"`), each floored at 1e-3. The model is averaged with the new e.

Deviations, for clients that were absent; with everyone there it is the original. Means are over a client's own rounds, those of
the accuracy over the rounds in which it could be told, and who has none yet takes the mean of the cohort. The 0 of the first
round counts for all alike, as one of as many rounds as anyone was there: for each by itself, it would weigh most for who was
seldom there, and give it more weight. Weights are shares of the cohort; between rounds `e` is kept times the cohort's size, so
that 1 is an equal part among any number, and where a newcomer starts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedheal.aggregate.client_index import enrol, extended
from fedheal.aggregate.draft import Draft
from fedheal.aggregate.inner_products import gram_matrix
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Floats, Integers, normalised
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.core.state import Arrays, Json, State, expect, kind, read_columns, write_columns

FLOOR = 1e-3
FEDCE_MODE = Parameter(
    "mode",
    description="times or plus: how both contributions combine",
    source="Jiang et al. 2023",
    default="times",
    choices=("times", "plus"),
)


@kind("fedce")
@dataclass(frozen=True)
class FedCEState(State):
    """Per client ever seen: rounds, the sum of its cosines, and its last weight times the size of that cohort."""

    clients: tuple[str, ...]
    n: Integers
    cosines: Floats
    e: Floats

    def _write(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return write_columns(self, "n", "cosines", "e"), {"clients": list(self.clients)}

    @classmethod
    def _read(cls, arrays: Arrays, json: Json) -> FedCEState:
        clients = tuple(json["clients"])
        return cls(clients, *read_columns(arrays, len(clients), "n", "cosines", "e"))


@declare_parameters(FEDCE_MODE)
def fedce(mode: str = FEDCE_MODE.default) -> Stage:
    """Jiang et al. 2023: weight by estimated contribution. Needs validation data.

    The stage needs the mean accuracy, on a client's validation data, of the model without it, and over how many rounds.
    """

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, FedCEState)
        clients, slots = enrol(before.clients, draft.clients)
        n, cosines = extended(before.n, len(clients)), extended(before.cosines, len(clients))
        e = extended(before.e, len(clients), 1)
        n[slots] += 1
        cosines[slots] += cosines_to_others(gram_matrix(draft), normalised(e[slots]))
        a = _floored(1 - cosines[slots] / n[slots])
        known = _filled(draft.metric("without_me"), draft.metric("judged") > 0)
        b = _floored(1 - (1 - 1 / n.max()) * known)
        weights = normalised(a * b if mode == "times" else a + b)
        e[slots] = weights * len(slots)
        return replace(draft, weights=weights, unnormalised_weights=e[slots]), FedCEState(clients, n, cosines, e)

    def init(layout: object) -> State:
        return FedCEState((), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))

    return Stage(init, apply, frozenset({"without_me", "judged"}))


def cosines_to_others(gram: Floats, e: Floats) -> Floats:
    """`cos(D_m, sum_{j != m} e_j D_j)` from inner products; 0 where one of the two does not move."""
    with_sum = gram @ e
    own = np.diag(gram)
    to_others = with_sum - e * own
    others = e @ gram @ e - 2 * e * with_sum + e**2 * own
    scale = np.sqrt(np.maximum(own, 0) * np.maximum(others, 0))
    return np.asarray(np.divide(to_others, scale, out=np.zeros_like(own), where=scale > 0))


def _filled(values: Floats, known: NDArray[np.bool_]) -> Floats:
    """The values, the unknown replaced by the mean of the others; 0 where there are no others."""
    return np.where(known, values, values[known].mean() if known.any() else 0.0)


def _floored(values: Floats) -> Floats:
    """Shares, none below the floor."""
    return normalised(np.maximum(normalised(np.maximum(values, 0)), FLOOR))
