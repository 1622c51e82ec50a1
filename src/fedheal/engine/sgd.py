"""SGD with momentum and weight decay on a CPU: torch's operations in torch's order, hence its bits.

`torch.optim` loads torch's whole compiler when an optimiser is first made: more than a second in every process, as long as
a small network's first round.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor


class Optimiser(Protocol):
    """What a step needs of one, torch's or ours."""

    def zero_grad(self) -> None: ...  # none afterwards, rather than zero

    def step(self) -> object: ...


class SGD:
    """`g = grad + weight_decay p`; `v = momentum v + g`, which starts as `g`; `p = p - lr v`."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        self.params = list(params)
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.velocity: dict[int, Tensor] = {}  # by place

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for place, param in enumerate(self.params):
            if param.grad is None:
                continue
            g = param.grad
            if self.weight_decay:
                g = g.add(param, alpha=self.weight_decay)
            if self.momentum:
                v = self.velocity.get(place)
                g = self.velocity[place] = g.clone() if v is None else v.mul_(self.momentum).add_(g)
            param.add_(g, alpha=-self.lr)
