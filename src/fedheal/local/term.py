"""One part of local training, and what it keeps: every hook is neutral by default, and terms add up.

A term may change where a client starts (`prepare`), add to its loss (`loss`) or to its gradients (`grad`), leave something with
the client (`slot`) and tell the server something (`message`) at the end (`finish`), take the last part of the server's step
(`absorb`) and say which model is judged (`evaluated`). Slots and shared values are tensors by name and are passed in and out:
a term itself remembers nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedheal.core.layout import Layout, Packed, unreal
from fedheal.core.updates import Updates

Arrays = Mapping[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """One batch as a term's `loss` sees it; `last_epoch` says that no later epoch follows."""

    x: Tensor
    y: Tensor
    logits: Tensor
    ce: Tensor
    features: Tensor | None = None
    last_epoch: bool = False


@dataclass(frozen=True)
class Context:
    """What a term may know during a client's round. `scratch` is this term's own, for this client and round."""

    client: str
    round: int  # from 1
    rounds: int
    lr: float
    momentum: float
    steps: int  # that the client takes this round
    classes: int
    module: nn.Module
    layout: Layout
    received: Packed
    slot: Arrays
    shared: Arrays
    fit: Callable[..., Packed]  # train again from another start: see `engine.serial`
    gradient: Callable[[Packed], Tensor]  # of the mean loss over the client's data, at these parameters
    validate: Callable[[Packed], tuple[float, float]]  # loss and accuracy (0 to 1) on what the client held out
    scratch: dict[str, Any] = field(default_factory=dict)
    nets: dict[str, nn.Module] = field(default_factory=dict)  # an engine may keep them from client to client

    def net(self, name: str, model: Packed) -> nn.Module:
        """A frozen copy of the module with these values, in evaluation mode; one a name."""
        if name not in self.nets:
            self.nets[name] = copy.deepcopy(self.module).eval().requires_grad_(False)
        self.nets[name].load_state_dict(self.layout.unpack(model))
        return self.nets[name]

    @property
    def effective_step(self) -> float:
        return effective_step(self.lr, self.momentum, self.steps)

    @property
    def params(self) -> list[Tensor]:
        """The parameters in training, in the order of the flat vector."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        return [named[name] for name, _ in self.layout.sizes().tensors]

    def views(self, flat: Tensor) -> list[Tensor]:
        """A flat vector cut into the parameters' shapes; for a complex one its two parts are put together."""
        parts = zip(torch.split(flat, self.layout.sizes().lengths), self.params, strict=True)
        return [(unreal(part, p.dtype) if p.is_complex() else part).view(p.shape) for part, p in parts]


@dataclass(frozen=True)
class ServerContext:
    """What a term may know when it absorbs a round. `updates`, `weights` and `messages` hold accepted clients only."""

    round: int
    rounds: int
    clients: int  # in the federation
    updates: Updates
    weights: Tensor  # float64 [k], sum 1
    unnormalised_weights: Tensor  # float64 [k], the weights before they were made shares of this cohort
    layout: Layout
    slots: Mapping[str, Arrays]  # of all clients seen so far, after this round


class Term:
    """All hooks neutral. `features` asks for a module with `features` and `head`; `clip` bounds the gradient's norm."""

    features: bool = False
    clip: float | None = None
    personalised: bool = False
    validates: bool = False  # needs examples held out of the client's training data
    sends: tuple[str, ...] = ()  # which of the shared values travel to every client

    def init(self, layout: Layout) -> Arrays:
        """What is shared before the first round."""
        return {}

    @property
    def needs_plain_server(self) -> str:
        """Why this term works only if the aggregated model is the global model, or "" if any server optimiser will do."""
        return ""

    def broadcast(self, client: str, shared: Arrays) -> Arrays:
        """Which of the shared values travel to this client."""
        return {name: shared[name] for name in self.sends if name in shared}

    def local_bytes(self, module: nn.Module, layout: Layout) -> int:
        """How many bytes of the model do not travel, once a client has its own."""
        return 0

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        """The model the client starts from."""
        return start

    def loss(self, batch: Batch, ctx: Context) -> Tensor | None:
        """What is added to the cross-entropy.

        This and `grad` read of `ctx` what `prepare` put into `ctx.scratch`, and nothing else that differs between clients or
        rounds: then the step can be captured once and replayed for all (see `engine.lanes`).
        """
        return None

    def grad(self, ctx: Context) -> None:
        """Change the gradients of `ctx.params`, before momentum."""

    def metrics(self, ctx: Context, local: Packed) -> Mapping[str, float]:
        """Numbers that the aggregation needs from the client; asked for before `finish`."""
        return {}

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        """The client's new slot, and its message to the server."""
        return ctx.slot, {}

    def upload(self, ctx: Context, local: Packed) -> Packed:
        """What of the local model is sent; the rest stays with the client."""
        return local

    def absorb(
        self, before: Packed, aggregated: Packed, messages: Sequence[Arrays], shared: Arrays, ctx: ServerContext
    ) -> tuple[Packed, Arrays]:
        """The last part of the server's step."""
        return aggregated, shared

    def evaluated(self, model: Packed, shared: Arrays, slots: Mapping[str, Arrays]) -> Packed:
        """The model that is judged for the domain whose clients' slots these are."""
        return model


def effective_step(lr: float, momentum: float, steps: int) -> float:
    """How far K momentum steps on a constant unit gradient move: `eta * A_K`.

    `A_K = [K - rho (1 - rho^K) / (1 - rho)] / (1 - rho)`; without momentum `eta K`.

    >>> round(effective_step(1.0, 0.9, 10), 1), effective_step(0.5, 0.0, 4)
    (41.4, 2.0)
    """
    rho = momentum
    return lr * (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
