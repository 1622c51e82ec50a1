"""FedGA: Zhang et al., "Federated Domain Generalization with Generalization Adjustment", CVPR 2023.

Weights `a` start equal. A client whose validation loss rose most when its model became the global one gets more weight:
`G_m = loss of the model received - loss of the model it sent the round before`, `a_m += (s_t / K) G_m / max |G|`, clipped to
[0, 1], normalised; `s_t = s0 (1 - (t-1)/T)` in round t of T. The gap of a round is known when its model is next received, so it
acts in the round after, with the step of its own round. Public re-implementations have the sign reversed for accuracies.

Deviation: a cohort redistributes only the weight it holds, and a newcomer starts with an equal share, so that absent clients
keep theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from fedheal.aggregate.checks import check_share
from fedheal.aggregate.roster import enrol, extended
from fedheal.aggregate.stage import Stage
from fedheal.aggregate.state import Arrays, Json, State, expect, kind, read_columns, write_columns
from fedheal.types import Draft, Floats


@kind("fedga")
@dataclass(frozen=True)
class FedGAState(State):
    """Per client ever seen: weight `a` (they sum to 1), and the validation loss of the model it sent last."""

    clients: tuple[str, ...]
    a: Floats
    sent: Floats

    def _write(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return write_columns(self, "a", "sent"), {"clients": list(self.clients)}

    @classmethod
    def _read(cls, arrays: Arrays, json: Json) -> FedGAState:
        clients = tuple(json["clients"])
        return cls(clients, *read_columns(arrays, len(clients), "a", "sent"))


def fedga(s0: float = 0.2) -> Stage:
    """The stage: needs the validation losses of the model received and of the model sent, and how far the run was then."""
    check_share("s0", s0)

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, FedGAState)
        clients, slots = enrol(before.clients, draft.clients)
        a, sent = extended(before.a, len(clients)), extended(before.sent, len(clients), np.nan)
        new = len(clients) - len(before.clients)
        a *= 1 - new / len(clients)
        a[len(before.clients) :] = 1 / len(clients)
        mass = a[slots].sum()
        gap = np.nan_to_num(draft.metric("val_received") - sent[slots], nan=0.0)  # 0 for who has sent nothing yet
        most = np.abs(gap).max()
        if most > 0 and mass > 0:
            step = s0 * (1 - draft.metric("progress")) / len(slots)
            moved = np.clip(a[slots] / mass + step * gap / most, 0, 1)
            a[slots] = mass * moved / moved.sum()
        sent[slots] = draft.metric("val_sent")
        report = dict(draft.report) | {"gap": dict(zip(draft.clients, gap.tolist(), strict=True))}
        return replace(draft, weights=a[slots], report=report), FedGAState(clients, a, sent)

    needs = frozenset({"val_received", "val_sent", "progress"})
    return Stage(lambda layout: FedGAState((), np.zeros(0), np.zeros(0)), apply, needs)
