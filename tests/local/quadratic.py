"""Clients whose loss is `1/2 (w - a)^T H (w - a)`, so that a round can be worked out by hand: gradients are exact.

`run_client` is a client's round and `absorb_updates` the server's, for one term; `make_quadratic_federation` and `make_engine`
put the same clients into the real loop.
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


def make_packed(*values: float) -> Packed:
    return Packed(vector(*values), torch.empty(0), torch.empty(0, dtype=torch.int64))


def make_gradient(a: Tensor, h: Tensor | None = None) -> Gradient:
    """Return the gradient of `1/2 (w - a)^T H (w - a)`; H is the identity by default."""
    return lambda w: w - a if h is None else h @ (w - a)


def make_term_context(term: Term, received: Packed, gradient: Gradient | None = None, **keys: Any) -> Context:
    """Return a context by hand, whose functions raise unless they are given."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("this test has no such thing")

    module = keys.pop("module", None) or Point(len(received.params))
    fields: dict[str, Any] = {
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
        "fit": refuse,
        "gradient": refuse if gradient is None else lambda at: gradient(at.params),
        "evaluate": refuse,
        "validate": refuse,
    }
    return Context(**fields | keys)


def run_client(term: Term, received: Packed, gradient: Gradient, **keys: Any) -> tuple[Packed, Arrays, Arrays]:
    """Run a client's round: SGD with momentum on the exact gradient, with the term's hooks."""
    module = keys.setdefault("module", Point(len(received.params)))
    ctx = make_term_context(term, received, gradient, **keys)
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


def absorb_updates(
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
    """Call the term's `absorb` after a round with these local parameters and weights.

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


def make_weighted_mean(p: Mapping[str, float]) -> Aggregator:
    """Return an aggregator that averages with these weights."""
    return Aggregator(stateless(lambda draft: replace(draft, weights=np.array([p[c] for c in draft.clients]))))


def make_quadratic_federation(
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
    """Return a federation without examples, for an engine of `make_engine`."""
    module = Point(size)
    training = Training(lr, 1, steps=steps, momentum=momentum, weight_decay=0.0)
    terms = () if term is None else (term,)
    local_training = LocalTraining(module, Layout.of(module), training, 0, torch.device("cpu"), {}, 2, rounds, terms)
    return Federation(local_training, tuple(p), make_weighted_mean(p), Server(), {}, {}, participation=participation)


def make_engine(fed: Federation, gradients: Mapping[str, Gradient]) -> Any:
    """Return an engine for `run_round` whose clients have these gradients."""
    local_training, training = fed.local_training, fed.local_training.training

    def train(model: Packed, shared: tuple[Arrays, ...], task: Task) -> ClientResult:
        term, slot, shared_values = (
            (local_training.terms[0], task.slots[0], shared[0]) if local_training.terms else (Term(), {}, {})
        )
        local, new_slot, message = run_client(
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
            shared=shared_values,
            module=local_training.module,
        )
        reply = Reply(task.client, local.params - model.params, 1)
        return ClientResult(reply, (new_slot,) * len(local_training.terms), (message,) * len(local_training.terms))

    return SimpleNamespace(train=lambda model, shared, tasks: (train(model, shared, task) for task in tasks))
