"""Clients whose loss is `1/2 (w - a)^T H (w - a)`, so that a round can be worked out by hand: gradients are exact.

`client` is one client's round and `absorbed` the server's part, for one term; `federation` and `make_engine` put the same
clients into the real loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedheal.aggregate import Aggregator
from fedheal.aggregate.server_optimizer import Server
from fedheal.aggregate.stage import stateless
from fedheal.core.layout import Layout, Packed
from fedheal.core.updates import Reply, Updates
from fedheal.engine.serial import ClientResult, LocalTraining, Task, Training
from fedheal.local.term import Arrays, Context, ServerContext, Term
from fedheal.simulate.federation import Federation

Gradient = Callable[[Tensor], Tensor]


class Point(nn.Module):
    """Parameters and nothing else."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def packed(*values: float) -> Packed:
    return Packed(vector(*values), torch.empty(0), torch.empty(0, dtype=torch.int64))


def bowl(a: Tensor, h: Tensor | None = None) -> Gradient:
    """The gradient of `1/2 (w - a)^T H (w - a)`; H is the identity where none is given."""
    return lambda w: w - a if h is None else h @ (w - a)


def context(term: Term, received: Packed, gradient: Gradient | None = None, **keys: Any) -> Context:
    """A context by hand. What a test does not need refuses to be used."""

    def none(*_: Any) -> Any:
        raise AssertionError("this test has no such thing")

    module = keys.pop("module", None) or Point(len(received.params))
    given: dict[str, Any] = {
        "client": "a",
        "round": 1,
        "rounds": 10,
        "lr": 0.1,
        "momentum": 0.0,
        "steps": 1,
        "classes": 2,
        "module": module,
        "layout": Layout.of(module),
        "received": received,
        "slot": {},
        "shared": {},
        "fit": none,
        "gradient": none if gradient is None else lambda at: gradient(at.params),
        "evaluate": none,
        "validate": none,
    }
    return Context(**given | keys)


def client(term: Term, received: Packed, gradient: Gradient, **keys: Any) -> tuple[Packed, Arrays, Arrays]:
    """A client's round: SGD with momentum on the exact gradient, the term's hooks at their places."""
    module = keys.setdefault("module", Point(len(received.params)))
    ctx = context(term, received, gradient, **keys)
    start = term.prepare(ctx, received)
    module.load_state_dict(ctx.layout.unpack(start))
    optimiser = torch.optim.SGD(module.parameters(), lr=ctx.lr, momentum=ctx.momentum)
    for _ in range(ctx.steps):
        module.w.grad = gradient(module.w.detach()).clone()
        term.grad(ctx)
        if term.clip:
            nn.utils.clip_grad_norm_(module.parameters(), term.clip)
        optimiser.step()
    local = ctx.layout.pack(module.state_dict())
    return local, *term.finish(ctx, local)


def absorbed(
    term: Term,
    before: Packed,
    locals_: Mapping[str, Tensor],
    messages: Sequence[Arrays],
    shared: Arrays,
    *,
    weights: Sequence[float],
    unnormalised_weights: Sequence[float] | None = None,
    everyone: int | None = None,
    slots: Mapping[str, Arrays] | None = None,
    number: int = 1,
) -> tuple[Packed, Arrays]:
    """The server's part after these clients came with these local parameters, averaged with these weights.

    `unnormalised_weights`: what they were before they were made shares; the same numbers, where it is not given.
    """
    deltas = torch.stack([local - before.params for local in locals_.values()])
    u = torch.tensor(weights, dtype=torch.float64)
    aggregated = replace(before, params=before.params + u.to(deltas) @ deltas)
    updates = Updates(list(locals_), deltas, [1] * len(locals_))
    layout = Layout.flat(len(before.params))
    q = torch.tensor(unnormalised_weights or weights, dtype=torch.float64)
    ctx = ServerContext(number, 10, everyone or len(locals_), updates, u, q, layout, slots or {})
    return term.absorb(before, aggregated, messages, shared, ctx)


def weighted(p: Mapping[str, float]) -> Aggregator:
    """The mean with these weights, whatever the clients hold."""
    return Aggregator(stateless(lambda draft: replace(draft, weights=np.array([p[c] for c in draft.clients]))))


def federation(
    term: Term | None,
    p: Mapping[str, float],
    size: int,
    *,
    lr: float = 0.1,
    momentum: float = 0.0,
    steps: int = 5,
    rounds: int = 1000,
    participation: float = 1.0,
) -> Federation:
    """The real loop's fixed parts, without examples: `make_engine` knows the losses."""
    module = Point(size)
    training = Training(lr, 1, steps=steps, momentum=momentum, weight_decay=0.0)
    terms = () if term is None else (term,)
    local_training = LocalTraining(module, Layout.of(module), training, 0, torch.device("cpu"), {}, 2, rounds, terms)
    return Federation(local_training, tuple(p), weighted(p), Server(), {}, {}, participation=participation)


def make_engine(fed: Federation, gradients: Mapping[str, Gradient]) -> Any:
    """An engine for `run_round` whose clients have these gradients."""
    local_training, training = fed.local_training, fed.local_training.training

    def train(model: Packed, shared: tuple[Arrays, ...], task: Task) -> ClientResult:
        term, slot, given = (
            (local_training.terms[0], task.slots[0], shared[0]) if local_training.terms else (Term(), {}, {})
        )
        local, left, told = client(
            term,
            model,
            gradients[task.client],
            client=task.client,
            round=task.round,
            rounds=local_training.rounds,
            lr=training.lr,
            momentum=training.momentum,
            steps=training.steps,
            slot=slot,
            shared=given,
            module=local_training.module,
        )
        reply = Reply(task.client, local.params - model.params, 1)
        return ClientResult(reply, (left,) * len(local_training.terms), (told,) * len(local_training.terms))

    return SimpleNamespace(train=lambda model, shared, tasks: (train(model, shared, task) for task in tasks))
