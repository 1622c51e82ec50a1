"""Sign counts that fade: a client's old rounds say less about what is consistent now. An extension of FPHL.

With each of its participations a client's counts, and the number of rounds they are a share of, keep a share `1 - gamma` of
what they were before this round is added: `pos = (1-gamma) pos + [D >= 0]`, `n = (1-gamma) n + 1`. So n tends to `1/gamma`,
about as many rounds as are remembered. Time passes only while a client takes part: one that is away forgets nothing, and
one that joins late starts as anyone does. `gamma=0` would be FPHL's own counts, which `consistency.py` keeps exactly.

The counts are float32, four bytes an entry instead of one, so equality with tau cannot be exact: a consistency within 2e-5
of tau counts as equal to it, which `paper` keeps and `released`, whose history excludes this round, does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate.client_index import enrol, extended
from fedheal.aggregate.draft import Draft, Graded
from fedheal.aggregate.kernels import reference
from fedheal.aggregate.masks.consistency import kept_fractions, observe_extras, room, width_of
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Floats
from fedheal.core.layout import Layout
from fedheal.core.state import Arrays, Json, State, expect, kind, read_columns

TIE = 2e-5  # no power of ten: with gamma = 0.9 old rounds add up to 1e-5, but for what rounding decides


@kind("forgetting")
@dataclass(frozen=True)
class ForgettingState(State):
    """Per client ever seen: faded participations `n` and faded counts, in a slab that grows as `ConsistencyState`'s."""

    clients: tuple[str, ...]
    n: Floats
    counts: Tensor
    sign: int

    def _write(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        used = self.counts[: len(self.clients)]
        return {"n": torch.from_numpy(self.n), "counts": used}, {"clients": list(self.clients), "sign": self.sign}

    @classmethod
    def _read(cls, arrays: Arrays, json: Json) -> ForgettingState:
        clients, counts = tuple(json["clients"]), arrays["counts"]
        (n,) = read_columns(arrays, len(clients), "n")
        if counts.ndim != 2 or len(counts) != len(clients) or counts.dtype != torch.float32:
            raise ValueError(f"faded counts of shape {tuple(counts.shape)} do not belong to {len(clients)} clients")
        return cls(clients, n, counts, json["sign"])


def forgetting(gamma: float, tau: float, variant: str, soft: bool) -> Stage:
    """The stage that gives the mask of faded counts, soft if asked for (`soft.py`)."""
    past = variant == "released"
    sign, left = -1 if past else 1, 1 - gamma

    def init(layout: Layout) -> State:
        return ForgettingState((), np.zeros(0), torch.zeros(0, width_of(layout.sizes(), variant)), sign)

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, ForgettingState)
        if before.sign != sign or before.counts.shape[1] != width_of(draft.sizes, variant):
            raise ValueError(
                f"this state has faded counts for {before.counts.shape[1]} entries by the rule of sign {before.sign}, this "
                f"aggregator needs {width_of(draft.sizes, variant)} and {sign}: it was made by another one"
            )
        clients, slots = enrol(before.clients, draft.clients)
        n = extended(before.n, len(clients))
        n[slots] = left * n[slots] + 1
        counts = room(before.counts, len(before.clients), len(clients), torch.float32, draft)
        total = n[slots] - past
        need = total * (tau + TIE if past else tau - TIE)
        kept = Graded(counts, slots, total, need, past, sign, soft)
        reference.fade(draft.updates.deltas, draft.rows, counts, slots, left, sign)
        if past:
            observe_extras(draft, kept, left)
        measured = reference.measured(draft.updates.deltas, draft.rows, draft.sizes.lengths, kept)
        report = dict(draft.report) | kept_fractions(draft, measured)
        after = ForgettingState(clients, n, counts, sign)
        return replace(draft, kernel=reference, kept=kept, measured=measured, report=report), after

    return Stage(init, apply, gives=frozenset({"mask"}))
