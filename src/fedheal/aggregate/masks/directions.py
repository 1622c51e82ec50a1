"""How often entries of a client's updates point the same way: the observation behind FPHL.

Chen, Huang and Ye (CVPR 2024, section 3.2) train four clients, one a domain, and count for every entry the rounds in which
its update had the same direction, over 10 and 100 rounds and over the last 10. `directions` counts the same as a stage that
changes nothing, so that any method can be watched; `spread` says it of the counts that FPHL keeps anyway.

As in FPHL an update of exactly zero counts as going up, so entries that never move look perfectly consistent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate.client_index import enrol
from fedheal.aggregate.draft import Draft
from fedheal.aggregate.masks.consistency import ConsistencyState
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Integers
from fedheal.core.layout import Layout, Sizes
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.core.state import Arrays, Json, State, expect, kind

BINS = 10  # from half of the rounds (no direction at all) to all of them
DIRECTIONS_BLOCK = Parameter(
    "block", description="rounds of a short count", source="FedHEAL paper, figure on consistency", default=10, ge=2
)
DIRECTIONS_LONG = Parameter(
    "long", description="rounds of the long count", source="FedHEAL paper, figure on consistency", default=100, ge=2
)


@kind("directions")
@dataclass(frozen=True)
class DirectionsState(State):
    """Per client: participations in the running block and in all, and how often each entry went up in each."""

    clients: tuple[str, ...]
    n: Integers  # [clients, 2]: in the block, in all
    up: Tensor  # int32 [clients, 2, parameters]

    def _write(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"n": torch.from_numpy(self.n), "up": self.up}, {"clients": list(self.clients)}

    @classmethod
    def _read(cls, arrays: Arrays, json: Json) -> DirectionsState:
        clients, n, up = tuple(json["clients"]), arrays["n"].numpy(), arrays["up"]
        if n.shape != (len(clients), 2) or up.shape[:2] != (len(clients), 2):
            raise ValueError(f"directions of shape {tuple(up.shape)} do not belong to {len(clients)} clients")
        return cls(clients, n, up)


@declare_parameters(DIRECTIONS_BLOCK, DIRECTIONS_LONG)
def directions(block: int = DIRECTIONS_BLOCK.default, long: int = DIRECTIONS_LONG.default) -> Stage:
    """Change nothing; report how many entries kept their direction over every `block` rounds and the first `long`.

    The report's `directions` has, for `block` and `long`, by client and tensor, how many entries pointed the same way in
    ceil(n/2), ..., n of the n rounds. A client's rounds are those it took part in.
    """

    def init(layout: Layout) -> State:
        return DirectionsState(
            (), np.zeros((0, 2), np.int64), torch.zeros(0, 2, layout.sizes().params, dtype=torch.int32)
        )

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, DirectionsState)
        clients, slots = enrol(before.clients, draft.clients)
        new = len(clients) - len(before.clients)
        n = np.concatenate([before.n, np.zeros((new, 2), np.int64)])
        device = draft.updates.deltas.device
        up = torch.cat([before.up.to(device), torch.zeros(new, *before.up.shape[1:], dtype=torch.int32, device=device)])
        told: dict[str, dict[str, Any]] = {}
        for client, row, slot in zip(draft.clients, draft.rows, slots, strict=True):
            n[slot] += 1
            up[slot] += draft.updates.deltas[int(row)] >= 0
            for i, (window, length) in enumerate((("block", block), ("long", long))):
                if n[slot, i] == length:
                    told.setdefault(window, {})[client] = _by_tensor(up[slot, i], length, draft.sizes)
            if n[slot, 0] == block:
                n[slot, 0] = 0
                up[slot, 0] = 0
        report = dict(draft.report) | ({"directions": told} if told else {})
        return replace(draft, report=report), DirectionsState(clients, n, up)

    return Stage(init, apply, gives=frozenset())


def _by_tensor(up: Tensor, n: int, sizes: Sizes) -> dict[str, list[int]]:
    found, start = {}, 0
    for name, length in sizes.tensors:
        found[name] = same(up[start : start + length], n).tolist()
        start += length
    return found


def same(up: Tensor, n: int) -> Integers:
    """How many entries pointed the same way in ceil(n/2), ..., n of n rounds.

    >>> same(torch.tensor([0, 1, 2, 3]), 3)  # up 0 or 3 times: always the same way; up once or twice: twice the same way
    array([2, 2])
    """
    counts = torch.bincount(up.to(torch.int64), minlength=n + 1).cpu().numpy()
    folded = counts + counts[::-1]  # k ups and n - k ups are the same number of equal directions
    if n % 2 == 0:
        folded[n // 2] //= 2
    largest: Integers = folded[(n + 1) // 2 :]
    return largest


def spread(state: State) -> dict[str, list[float]] | None:
    """By client, the share of entries in `BINS` bins by how consistent they were; `None` where no stage counts signs."""
    for part in _parts(state):
        if isinstance(part, ConsistencyState):
            return {client: _binned(part, slot) for slot, client in enumerate(part.clients) if part.n[slot] > 1}
    return None


def _binned(state: ConsistencyState, slot: int) -> list[float]:
    n = int(state.n[slot])
    by_count = same(state.counts[slot], n)
    share = np.arange((n + 1) // 2, n + 1) / n
    bins = np.minimum(((share - 0.5) * 2 * BINS + 1e-9).astype(np.int64), BINS - 1)
    return [round(float(x), 5) for x in np.bincount(bins, by_count, BINS) / max(by_count.sum(), 1)]


def _parts(state: State) -> Iterator[State]:
    yield state
    for value in vars(state).values():
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, State):
                yield from _parts(inner)
