"""The server's step: how far, and with what memory, the global model follows the aggregated one.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, with `Delta = aggregated - before` as pseudo-gradient.
`sgd`: `v = momentum v + Delta`, `W + lr v`; with lr = 1 and no momentum exactly the aggregated model.
`adam`: `m = b1 m + (1-b1) Delta`, `v = b2 v + (1-b2) Delta^2`, `W + lr m / (sqrt(v) + eps)`, without bias correction, as there.
Buffers and counters are taken from the aggregated model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedheal.aggregate.state import Arrays, Json, State, expect, kind
from fedheal.layout import Packed


@kind("server")
@dataclass(frozen=True)
class ServerState(State):
    """First and second moments; empty until they are needed."""

    first: Tensor
    second: Tensor

    def _write(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"first": self.first, "second": self.second}, {}

    @classmethod
    def _read(cls, arrays: Arrays, json: Json) -> ServerState:
        return cls(arrays["first"], arrays["second"])


@dataclass(frozen=True)
class Server:
    """A server optimiser; `init() -> state`, `apply(before, aggregated, state) -> model, state`."""

    optimizer: str = "sgd"
    lr: float = 1.0
    momentum: float = 0.0
    beta2: float = 0.99
    eps: float = 1e-3

    def init(self) -> ServerState:
        return ServerState(torch.empty(0), torch.empty(0))

    def apply(self, before: Packed, aggregated: Packed, state: State) -> tuple[Packed, ServerState]:
        moments = expect(state, ServerState)
        if self.optimizer == "sgd" and self.momentum == 0:
            if self.lr == 1:
                return aggregated, moments
            return replace(aggregated, params=before.params + self.lr * (aggregated.params - before.params)), moments
        delta = aggregated.params - before.params
        first = moments.first if len(moments.first) else torch.zeros_like(delta)
        if self.optimizer == "sgd":
            first = self.momentum * first + delta
            return replace(aggregated, params=before.params + self.lr * first), replace(moments, first=first)
        second = moments.second if len(moments.second) else torch.zeros_like(delta)
        first = self.momentum * first + (1 - self.momentum) * delta
        second = self.beta2 * second + (1 - self.beta2) * delta**2
        step = self.lr * first / (second.sqrt() + self.eps)
        return replace(aggregated, params=before.params + step), ServerState(first, second)
