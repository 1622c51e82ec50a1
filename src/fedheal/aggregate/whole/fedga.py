"""FedGA: Zhang et al., "Federated Domain Generalization with Generalization Adjustment", CVPR 2023.

Weights `a` start equal. A client whose validation loss rose most when its model became the global one gets more weight:
`G_m = loss of the model received - loss of the model it sent the round before`, `a_m += (s_t / K) G_m / max |G|`, clipped to
[0, 1], normalised; `s_t = s0 (1 - (t-1)/T)` in round t of T. The gap of a round is known when its model is next received, so it
acts in the round after, with the step of its own round. Public re-implementations have the sign reversed for accuracies.

Deviations, for clients that were absent. A cohort redistributes only the weight it holds, and a newcomer starts with an equal
share. The loss of a model sent long ago is no measure: the global model has gone on since, and the gap would be that of the
whole time away. So a gap counts for who was in the last cohort; for the others in this one the mean of those gaps stands in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from fedheal.aggregate.client_index import enrol, extended, uniform_start
from fedheal.aggregate.draft import Draft
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Floats, Integers
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.core.state import Arrays, Json, State, expect, kind, read_columns, write_columns

FEDGA_S0 = Parameter(
    "s0",
    description="first step of the weights; it falls linearly",
    source="Zhang et al. 2023",
    default=0.2,
    ge=0,
    le=1,
)


@kind("fedga")
@dataclass(frozen=True)
class FedGAState(State):
    """How many cohorts there were. Per client ever seen: weight `a` (they sum to 1), the validation loss of the model it sent
    last, and the number of the cohort it was in then."""

    rounds: int
    clients: tuple[str, ...]
    a: Floats
    sent: Floats
    last: Integers

    def _write(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return write_columns(self, "a", "sent", "last"), {"rounds": self.rounds, "clients": list(self.clients)}

    @classmethod
    def _read(cls, arrays: Arrays, json: Json) -> FedGAState:
        clients = tuple(json["clients"])
        return cls(json["rounds"], clients, *read_columns(arrays, len(clients), "a", "sent", "last"))


@declare_parameters(FEDGA_S0)
def fedga(s0: float = FEDGA_S0.default) -> Stage:
    """Zhang et al. 2023: weight to clients whose validation loss rises most by averaging. Needs validation data.

    The stage needs the validation losses of the model received and of the model sent, and how far the run was then.
    """

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, FedGAState)
        clients, slots = enrol(before.clients, draft.clients)
        a = uniform_start(before.a, len(clients))
        sent, last = extended(before.sent, len(clients)), extended(before.last, len(clients), -1)
        mass = a[slots].sum()
        known = last[slots] == before.rounds
        gap = draft.metric("val_received") - sent[slots]
        gap = np.where(known, gap, gap[known].mean() if known.any() else 0.0)
        most = np.abs(gap).max()
        if most > 0 and mass > 0:
            step = s0 * (1 - draft.metric("progress")) / len(slots)
            moved = np.clip(a[slots] / mass + step * gap / most, 0, 1)
            if moved.any():  # a step as long as a weight may take everything from everyone, which says nothing
                a[slots] = mass * moved / moved.sum()
        sent[slots], last[slots] = draft.metric("val_sent"), before.rounds + 1
        measured = {client: float(g) for client, g, was in zip(draft.clients, gap, known, strict=True) if was}
        draft = replace(draft, weights=a[slots], report=dict(draft.report) | {"gap": measured})
        return draft, FedGAState(before.rounds + 1, clients, a, sent, last)

    start = FedGAState(0, (), np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
    return Stage(lambda layout: start, apply, frozenset({"val_received", "val_sent", "progress"}))
