"""FedGA: Zhang et al., "Federated Domain Generalization with Generalization Adjustment", CVPR 2023.

Weights `a` start equal. A client whose validation loss rose most when its model became the global one gets more weight.
Its gap `G_m` is the loss of the model received less the loss of the model that it sent the round before. Then
`a_m += (s_t / K) G_m / max |G|`, clipped to [0, 1] and normalised, with `s_t = s0 (1 - (t-1)/T)` in round t of T. The
gap of a round is known when its model is next received. So it acts in the next round, with the step of its own round.
The authors' script for PACS takes gaps of accuracies by default, with the sign turned; ours are of losses, as in the
paper. Public re-implementations have the sign reversed for accuracies.

Deviations, for clients that were absent. A cohort redistributes only the weight it holds, and a newcomer starts with an
equal share. A gap counts for clients of the last cohort, since the global model changes. The other clients take the
mean of these gaps.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedheal.aggregate.client_index import extend_column, extend_shares, index_clients
from fedheal.aggregate.draft import Draft
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Floats, Integers
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.core.state import State, expect

FEDGA_S0 = Parameter("s0", 0.2, "first step of the weights; it falls linearly", "Zhang et al. 2023", ge=0, le=1)


@dataclass(frozen=True, kw_only=True)
class FedGAState(State, kind="fedga"):
    """The number of cohorts so far, and the clients ever seen.

    Each client has a weight `a`, the validation loss of the model that it sent last, and the number of the cohort it
    was in then. The weights sum to 1.
    """

    rounds: int
    clients: tuple[str, ...]
    a: Floats
    sent: Floats
    last: Integers


@declare_parameters(FEDGA_S0)
def fedga_stage(s0: float = FEDGA_S0.default) -> Stage:
    """Zhang et al. 2023: weight to clients whose validation loss rises most by averaging. Needs validation data."""

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, FedGAState)
        clients, slots = index_clients(before.clients, draft.clients)
        a = extend_shares(before.a, len(clients))
        sent, last = extend_column(before.sent, len(clients)), extend_column(before.last, len(clients), -1)
        mass = a[slots].sum()
        known = last[slots] == before.rounds
        gap = draft.metric("val_received") - sent[slots]
        gap = np.where(known, gap, gap[known].mean() if known.any() else 0.0)
        most = np.abs(gap).max()
        if most > 0 and mass > 0:
            step = s0 * (1 - draft.metric("progress")) / len(slots)
            moved = np.clip(a[slots] / mass + step * gap / most, 0, 1)
            if moved.any():  # a step as long as a weight may take everything from everyone; the weights then stay
                a[slots] = mass * moved / moved.sum()
        sent[slots], last[slots] = draft.metric("val_sent"), before.rounds + 1
        gaps = zip(draft.clients, gap.tolist(), known, strict=True)
        report = {**draft.report, "gap": {client: value for client, value, is_known in gaps if is_known}}
        draft = replace(draft, weights=a[slots], report=report)
        return draft, FedGAState(rounds=before.rounds + 1, clients=clients, a=a, sent=sent, last=last)

    start = FedGAState(rounds=0, clients=(), a=np.zeros(0), sent=np.zeros(0), last=np.zeros(0, np.int64))
    return Stage(lambda layout: start, apply, frozenset({"val_received", "val_sent", "progress"}))
