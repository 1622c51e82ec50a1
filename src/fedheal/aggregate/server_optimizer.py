"""The server's step: how far, and with what memory, the global model follows the aggregated one.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, with `Delta = aggregated - before` as pseudo-gradient.
`sgd`: `v = momentum v + Delta`, `W + lr v`; with lr = 1 and no momentum exactly the aggregated model. `adam`: `m = b1 m
+ (1-b1) Delta`, `v = b2 v + (1-b2) Delta^2`, `W + lr m / (sqrt(v) + eps)`, without bias correction, as there;
`momentum` is b1. Buffers and counters are taken from the aggregated model.

Where Delta is well above eps, a step of Adam is about `lr` whatever Delta: each has defaults of its own. Adam's b1, b2
and eps are those of Reddi et al., who tune lr from 1e-3 to 1; 0.01 is ours.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedheal.core.checks import check_among
from fedheal.core.layout import Packed
from fedheal.core.state import State, expect


@dataclass(frozen=True)
class ServerState(State, kind="server"):
    """First and second moments; empty until they are needed."""

    first: Tensor
    second: Tensor


SERVER_DEFAULTS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 1.0, "momentum": 0.0},
    "adam": {"lr": 0.01, "momentum": 0.9},
}


@dataclass(frozen=True, init=False)
class Server:
    """A server optimiser. `lr` and `momentum` have defaults of their own for each `optimizer`, `"sgd"` or `"adam"`.

    >>> Server("adam")
    Server(optimizer='adam', lr=0.01, momentum=0.9, beta2=0.99, eps=0.001)
    """

    optimizer: str
    lr: float
    momentum: float
    beta2: float
    eps: float

    def __init__(
        self,
        optimizer: str = "sgd",
        lr: float | None = None,
        momentum: float | None = None,
        beta2: float = 0.99,
        eps: float = 1e-3,
    ) -> None:
        check_among("optimizer", optimizer, tuple(SERVER_DEFAULTS))
        rates = SERVER_DEFAULTS[optimizer]
        lr = rates["lr"] if lr is None else lr
        momentum = rates["momentum"] if momentum is None else momentum
        vars(self).update(optimizer=optimizer, lr=lr, momentum=momentum, beta2=beta2, eps=eps)

    def init(self) -> ServerState:
        """Return the state before the first round."""
        return ServerState(torch.empty(0), torch.empty(0))

    def apply(self, before: Packed, aggregated: Packed, state: State) -> tuple[Packed, ServerState]:
        """Return the new global model and state, from the model before the round and the aggregated one."""
        moments = expect(state, ServerState)
        if self.optimizer == "sgd" and self.momentum == 0 and self.lr == 1:
            return aggregated, moments
        delta = aggregated.params - before.params
        if self.optimizer == "sgd" and self.momentum == 0:
            return replace(aggregated, params=before.params + self.lr * delta), moments
        first = moments.first if len(moments.first) else torch.zeros_like(delta)
        if self.optimizer == "sgd":
            first = self.momentum * first + delta
            return replace(aggregated, params=before.params + self.lr * first), replace(moments, first=first)
        second = moments.second if len(moments.second) else torch.zeros_like(delta)
        first = self.momentum * first + (1 - self.momentum) * delta
        second = self.beta2 * second + (1 - self.beta2) * delta**2
        step = self.lr * first / (second.sqrt() + self.eps)
        return replace(aggregated, params=before.params + step), ServerState(first, second)


def check_plain_server(server: Server, why: str) -> None:
    """Raise ValueError unless the server takes over the aggregated model as it is, which some methods need."""
    if (server.optimizer, server.lr, server.momentum) != ("sgd", 1, 0):
        settings = f"server_lr = {server.lr:g}, server_momentum = {server.momentum:g}"
        raise ValueError(
            f"server_optimizer = {server.optimizer!r}, {settings}: {why}; use 'sgd', server_lr=1 and server_momentum=0"
        )
