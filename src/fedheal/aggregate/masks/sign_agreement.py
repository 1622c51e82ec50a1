"""How often entries of a client's updates point the same way: the observation behind FPHL.

Chen, Huang and Ye (CVPR 2024, section 3.2) count for every entry the rounds in which its update had the same direction,
over 10 and 100 rounds. `sign_agreement_report` does so as a stage that changes nothing; `bin_consistency` reads the
counts that FPHL keeps. As in FPHL an update of exactly zero counts as going up, so entries that never move look
perfectly consistent.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate.client_index import index_clients
from fedheal.aggregate.draft import Draft
from fedheal.aggregate.masks.consistency import ConsistencyState
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Integers
from fedheal.core.layout import Layout
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.core.state import State, expect

BINS = 10  # from half of the rounds (no direction at all) to all of them
DIRECTIONS_BLOCK = Parameter("block", 10, "rounds of a short count", "FedHEAL paper, figure on consistency", ge=2)
DIRECTIONS_LONG = Parameter("long", 100, "rounds of the long count", "FedHEAL paper, figure on consistency", ge=2)


@dataclass(frozen=True)
class SignAgreementState(State, kind="sign-agreement"):
    """Per client: participations in the current block and in all, and how often each entry went up in each."""

    clients: tuple[str, ...]
    n: Tensor  # int64 [clients, 2]: in the block, in all
    up: Tensor  # int32 [clients, 2, parameters]

    def __post_init__(self) -> None:
        if self.n.shape[1:] != (2,) or self.up.ndim != 3 or self.up.shape[1] != 2:
            shapes = f"{tuple(self.n.shape)} and {tuple(self.up.shape)}"
            raise ValueError(f"sign agreement of shapes {shapes} does not belong to clients")


@declare_parameters(DIRECTIONS_BLOCK, DIRECTIONS_LONG)
def sign_agreement_report(block: int = DIRECTIONS_BLOCK.default, long: int = DIRECTIONS_LONG.default) -> Stage:
    """Change nothing; report how many entries kept their direction over every `block` rounds and the first `long`.

    The report's `directions` has, for `block` and `long`, by client and tensor, what `count_agreeing` returns.
    """

    def init(layout: Layout) -> State:
        up = torch.zeros(0, 2, layout.sizes().params, dtype=torch.int32)
        return SignAgreementState((), torch.zeros(0, 2, dtype=torch.int64), up)

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, SignAgreementState)
        clients, slots = index_clients(before.clients, draft.clients)
        new = len(clients) - len(before.clients)
        n = torch.cat([before.n, torch.zeros(new, 2, dtype=torch.int64)])
        device = draft.updates.deltas.device
        up = torch.cat([before.up.to(device), torch.zeros(new, *before.up.shape[1:], dtype=torch.int32, device=device)])
        windows: dict[str, dict[str, Any]] = {}
        for client, row, slot in zip(draft.clients, draft.rows, slots, strict=True):
            n[slot] += 1
            up[slot] += draft.updates.deltas[int(row)] >= 0
            for i, (window, length) in enumerate((("block", block), ("long", long))):
                if n[slot, i] == length:
                    parts = zip(draft.sizes.tensors, torch.split(up[slot, i], draft.sizes.lengths), strict=True)
                    by_tensor = {name: count_agreeing(part, length).tolist() for (name, _), part in parts}
                    windows.setdefault(window, {})[client] = by_tensor
            if n[slot, 0] == block:
                n[slot, 0] = 0
                up[slot, 0] = 0
        report = dict(draft.report) | ({"directions": windows} if windows else {})
        return replace(draft, report=report), SignAgreementState(clients, n, up)

    return Stage(init, apply, gives=frozenset())


def count_agreeing(up: Tensor, n: int) -> Integers:
    """Return how many entries pointed the same way in ceil(n/2), ..., n of n rounds, from how often each went up."""
    counts = torch.bincount(up.to(torch.int64), minlength=n + 1).cpu().numpy()
    folded = counts + counts[::-1]  # k ups and n - k ups are the same number of equal directions
    if n % 2 == 0:
        folded[n // 2] //= 2
    return np.asarray(folded[(n + 1) // 2 :])


def bin_consistency(state: State) -> dict[str, list[float]] | None:
    """Return by client the share of entries in `BINS` bins by their consistency; None if no stage counts signs."""
    if isinstance(state, ConsistencyState):
        return {client: _bin_client(state, slot) for slot, client in enumerate(state.clients) if state.n[slot] > 1}
    values = [item for value in vars(state).values() for item in (value if isinstance(value, tuple) else (value,))]
    found = (bin_consistency(value) for value in values if isinstance(value, State))
    return next((bins for bins in found if bins is not None), None)


def _bin_client(state: ConsistencyState, slot: int) -> list[float]:
    n = int(state.n[slot])
    agreeing = count_agreeing(state.counts[slot], n)
    share = np.arange((n + 1) // 2, n + 1) / n
    bins = np.minimum(((share - 0.5) * 2 * BINS + 1e-9).astype(np.int64), BINS - 1)
    return [round(float(x), 5) for x in np.bincount(bins, agreeing, BINS) / max(agreeing.sum(), 1)]
