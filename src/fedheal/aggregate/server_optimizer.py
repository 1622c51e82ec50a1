"""The server's step: how far, and with what memory, the global model follows the aggregated one.

`Delta = aggregated - before` is the pseudo-gradient (Reddi et al., "Adaptive Federated Optimization", ICLR 2021). Buffers and
counters are those of the aggregated model. `momentum` is b1 of the adaptive optimisers, which have no bias correction, as
there:

- `sgd`: `v = momentum v + Delta`, `W + lr v`. With lr = 1 and no momentum it gives the aggregated model, bit for bit.
  With momentum it is FedAvgM (Hsu et al. 2019).
- the others: `m = b1 m + (1-b1) Delta`, `W + lr m / (sqrt(v) + eps)`. `adam`: `v = b2 v + (1-b2) Delta^2`. `yogi`: `v = v -
  (1-b2) Delta^2 sign(v - Delta^2)`, which lets a large v fall slowly. `adagrad`: `v = v + Delta^2`.

v starts at 0; the paper asks for at least eps^2, which changes little beside eps in the denominator. Where Delta is well above
eps, a step of an adaptive optimiser is about `lr` whatever Delta: each has defaults of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedheal.core.checks import check_among
from fedheal.core.layout import Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.core.state import State, expect


@dataclass(frozen=True)
class ServerState(State, kind="server"):
    """First and second moments; empty until they are needed."""

    first: Tensor
    second: Tensor


ADAPTIVE_LR = "ours; Reddi et al. 2021 tune 0.001 to 1"
REDDI = "Reddi et al. 2021"
ETA = Parameter("eta", 0.01, "the server's learning rate", ADAPTIVE_LR, gt=0)
BETA1 = Parameter("beta1", 0.9, "decay of the mean of updates", REDDI, ge=0, lt=1)
BETA2 = Parameter("beta2", 0.99, "decay of the mean of squared updates", REDDI, ge=0, lt=1)
EPS = Parameter("eps", 1e-3, "added to the root of v; the larger, the less adaptive (tau of the paper)", REDDI, gt=0)
FEDAVGM_ETA = Parameter("eta", 1.0, "the server's learning rate", "Hsu et al. 2019", gt=0)
FEDAVGM_BETA1 = Parameter(
    "beta1", 0.9, "the server's momentum", f"{REDDI}; Hsu et al. 2019 tune 0 to 0.997", ge=0, lt=1
)
ADAGRAD_BETA1 = replace(BETA1, default=0.0, source="Reddi et al. 2021: usual for Adagrad")

SERVER_DEFAULTS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 1.0, "momentum": 0.0},
    "adam": {"lr": ETA.default, "momentum": BETA1.default},
    "yogi": {"lr": ETA.default, "momentum": BETA1.default},
    "adagrad": {"lr": ETA.default, "momentum": ADAGRAD_BETA1.default},
}


@dataclass(frozen=True, init=False)
class Server:
    """A server optimiser: how far, and with what memory, the global model follows the aggregated one.

    Args:
        optimizer: `"sgd"`, `"adam"`, `"yogi"` or `"adagrad"`. Each has its own defaults of `lr` and `momentum`.
        lr: The server's learning rate.
        momentum: How much of its earlier steps it keeps; beta1 of the adaptive ones.
        beta2: How much of the mean of squared updates the adaptive ones keep.
        eps: Added to the root of that mean; the larger, the less adaptive.

    Raises:
        ValueError: A setting is out of range.

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
        beta2: float = BETA2.default,
        eps: float = EPS.default,
    ) -> None:
        check_among("optimizer", optimizer, tuple(SERVER_DEFAULTS))
        rates = SERVER_DEFAULTS[optimizer]
        lr = rates["lr"] if lr is None else lr
        momentum = rates["momentum"] if momentum is None else momentum
        for parameter, name, value in (
            (ETA, "lr", lr),
            (BETA1, "momentum", momentum),
            (BETA2, "beta2", beta2),
            (EPS, "eps", eps),
        ):
            replace(parameter, name=name).check(value)
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
        second = self._update_second(second, delta)
        step = self.lr * first / (second.sqrt() + self.eps)
        return replace(aggregated, params=before.params + step), ServerState(first, second)

    def _update_second(self, second: Tensor, delta: Tensor) -> Tensor:
        """Return the second moment after a round."""
        if self.optimizer == "adagrad":
            return second + delta**2
        if self.optimizer == "yogi":
            return second - (1 - self.beta2) * delta**2 * torch.sign(second - delta**2)
        return self.beta2 * second + (1 - self.beta2) * delta**2


@declare_parameters(FEDAVGM_ETA, FEDAVGM_BETA1)
def make_fedavgm(eta: float = FEDAVGM_ETA.default, beta1: float = FEDAVGM_BETA1.default) -> Server:
    """Hsu et al. 2019: the server follows the aggregated model with momentum."""
    return Server("sgd", eta, beta1)


@declare_parameters(ETA, BETA1, BETA2, EPS)
def make_fedadam(
    eta: float = ETA.default, beta1: float = BETA1.default, beta2: float = BETA2.default, eps: float = EPS.default
) -> Server:
    """Reddi et al. 2021: Adam on the server, with the aggregated update as gradient."""
    return Server("adam", eta, beta1, beta2, eps)


@declare_parameters(ETA, BETA1, BETA2, EPS)
def make_fedyogi(
    eta: float = ETA.default, beta1: float = BETA1.default, beta2: float = BETA2.default, eps: float = EPS.default
) -> Server:
    """Reddi et al. 2021: Yogi on the server; its step grows back more slowly than Adam's after a large update."""
    return Server("yogi", eta, beta1, beta2, eps)


@declare_parameters(ETA, ADAGRAD_BETA1, EPS)
def make_fedadagrad(eta: float = ETA.default, beta1: float = ADAGRAD_BETA1.default, eps: float = EPS.default) -> Server:
    """Reddi et al. 2021: Adagrad on the server; steps shrink as squared updates add up."""
    return Server("adagrad", eta, beta1, eps=eps)


# The last part of a method's name, behind any local method and any stages.
SERVERS: dict[str, Callable[..., Server]] = {
    "fedavgm": make_fedavgm,
    "fedadam": make_fedadam,
    "fedyogi": make_fedyogi,
    "fedadagrad": make_fedadagrad,
}


def check_plain_server(server: Server, why: str) -> None:
    """Raise ValueError unless the server takes over the aggregated model as it is, which some methods need."""
    if (server.optimizer, server.lr, server.momentum) != ("sgd", 1, 0):
        settings = f"server_lr = {server.lr:g}, server_momentum = {server.momentum:g}"
        raise ValueError(
            f"server_optimizer = {server.optimizer!r}, {settings}: {why}; use 'sgd', server_lr=1 and server_momentum=0"
        )
