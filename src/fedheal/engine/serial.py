"""The obvious engine: one client after another, on any device.

A client starts from the global model with a fresh optimiser (SGD with momentum and weight decay), takes its epochs or
steps over its own shuffled examples (the last, smaller batch included) and returns what it changed. A method's terms have
their say at each step and at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedheal.data.augment import augmented, normalised
from fedheal.data.domains import Split
from fedheal.layout import Layout, Packed
from fedheal.local.proximal import Proximal
from fedheal.local.term import Arrays, Batch, Context, Term, reach
from fedheal.rng import derive, generator
from fedheal.types import Reply

EVALUATE_BATCH = 512


@dataclass(frozen=True)
class Training:
    """How a client trains: `epochs` over its data or, where given, so many `steps`."""

    lr: float
    batch_size: int
    epochs: int = 1
    steps: int | None = None
    momentum: float = 0.9
    weight_decay: float = 1e-5
    augment: str = "none"


@dataclass(frozen=True)
class Bench:
    """What an engine works with: a module to train in, its layout, and the clients' examples on the device."""

    module: nn.Module
    layout: Layout
    training: Training
    seed: int
    device: torch.device
    examples: dict[str, Split]  # by client
    classes: int = 0
    rounds: int = 1
    terms: tuple[Term, ...] = ()
    received_loss: bool = False  # whether clients report the loss of the model they receive
    validation: dict[str, Split] = field(default_factory=dict)  # by client


@dataclass(frozen=True)
class Task:
    """One client's round: its slots are what each term left with it."""

    client: str
    round: int
    slots: tuple[Arrays, ...] = ()


@dataclass(frozen=True)
class Trained:
    """What comes of a task: the reply, the client's new slots, and each term's message to the server."""

    reply: Reply
    slots: tuple[Arrays, ...] = ()
    messages: tuple[Arrays, ...] = ()


def train(bench: Bench, model: Packed, shared: tuple[Arrays, ...], task: Task) -> Trained:
    """A client's round, starting from the global `model`."""
    examples, training, module = bench.examples[task.client], bench.training, bench.module
    contexts = _contexts(bench, model, shared, task)
    metrics = {"loss": judge(bench, model, examples)[0]} if bench.received_loss else {}
    start = model
    for term, ctx in zip(bench.terms, contexts, strict=True):
        start = term.prepare(ctx, start)
    local, loss = _fit(bench, start, task, "batches", contexts)
    sent, slots, messages = local, [], []
    for term, ctx in zip(bench.terms, contexts, strict=True):
        sent = term.sent(ctx, sent)
        metrics |= term.metrics(ctx, local)
        slot, message = term.finish(ctx, local)
        slots.append(slot)
        messages.append(message)
    taken = steps_of(len(examples), training)
    far = reach(training.lr, training.momentum, taken)
    metrics |= {"train_loss": loss, "steps": float(taken), "lr": training.lr, "reach": far}
    reply = Reply(
        task.client,
        sent.params - model.params,
        len(examples),
        sent.buffers if len(sent.buffers) else None,
        sent.counters if len(sent.counters) else None,
        metrics,
    )
    module.zero_grad(set_to_none=True)
    return Trained(reply, tuple(slots), tuple(messages))


def _contexts(bench: Bench, model: Packed, shared: tuple[Arrays, ...], task: Task) -> list[Context]:
    training, examples = bench.training, bench.examples[task.client]

    def fit(start: Packed, strength: float) -> Packed:
        anchored = Proximal(strength)
        (ctx,) = _contexts(replace(bench, terms=(anchored,)), model, ({},), replace(task, slots=({},)))
        anchored.prepare(ctx, start)
        return _fit(replace(bench, terms=(anchored,)), start, task, "personal", [ctx])[0]

    return [
        Context(
            client=task.client,
            round=task.round,
            rounds=bench.rounds,
            lr=training.lr,
            momentum=training.momentum,
            steps=steps_of(len(examples), training),
            classes=bench.classes,
            module=bench.module,
            layout=bench.layout,
            received=model,
            slot=slot,
            shared=values,
            fit=fit,
            gradient=lambda at: _gradient(bench, at, task),
            validate=lambda at: judge(bench, at, bench.validation[task.client]),
        )
        for slot, values in zip(task.slots, shared, strict=True)
    ]


def _fit(bench: Bench, start: Packed, task: Task, purpose: str, contexts: list[Context]) -> tuple[Packed, float]:
    """Train from `start` with all terms; the local model and its mean loss (cross-entropy alone)."""
    module, training = bench.module, bench.training
    module.load_state_dict(bench.layout.unpack(start))
    module.train()
    optimiser = torch.optim.SGD(
        module.parameters(), lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
    )
    clips = [term.clip for term in bench.terms if term.clip]
    wanted = any(term.features for term in bench.terms)
    total, taken = torch.zeros((), dtype=torch.float64, device=bench.device), 0
    chance = generator(bench.seed, purpose, task.round, task.client)
    with seeded(derive(bench.seed, f"{purpose} layers", task.round, task.client), bench.device):  # dropout and the like
        for x, y, last in batches(bench.examples[task.client], training, chance):
            optimiser.zero_grad(set_to_none=True)
            features = module.features(x) if wanted else None  # type: ignore[operator]
            logits = module.head(features) if wanted else module(x)  # type: ignore[operator]
            ce = loss = functional.cross_entropy(logits, y)
            for term, ctx in zip(bench.terms, contexts, strict=True):
                added = term.loss(Batch(x, y, logits, ce, features, last), ctx)
                loss = loss if added is None else loss + added
            torch.autograd.backward(loss)
            for term, ctx in zip(bench.terms, contexts, strict=True):
                term.grad(ctx)
            for clip in clips:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimiser.step()
            total += ce.detach()
            taken += 1
    return bench.layout.pack(module.state_dict()), float(total) / max(taken, 1)


def steps_of(examples: int, training: Training) -> int:
    """How many steps a client with so many examples takes in a round."""
    return training.epochs * -(-examples // training.batch_size) if training.steps is None else training.steps


def batches(examples: Split, training: Training, chance: torch.Generator) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """The batches of one client's round, shuffled anew each epoch, none dropped; and whether no later epoch follows."""
    per_epoch = -(-len(examples) // training.batch_size)
    left = steps_of(len(examples), training)
    while left > 0:
        order = torch.randperm(len(examples), generator=chance)
        for chosen in torch.split(order, training.batch_size)[:left]:
            here = chosen.to(examples.labels.device)
            images = augmented(examples.images[here], training.augment, chance)
            yield normalised(images), examples.labels[here], left <= per_epoch
        left -= per_epoch


@torch.no_grad()
def judge(bench: Bench, model: Packed, split: Split) -> tuple[float, float]:
    """A model's mean cross-entropy and accuracy (0 to 1) on some examples, in evaluation mode and without augmentation."""
    module = bench.module
    module.load_state_dict(bench.layout.unpack(model))
    module.eval()
    loss, right = 0.0, 0
    for images, labels in _in_turn(split):
        logits = module(normalised(images))
        loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
        right += int((logits.argmax(dim=1) == labels).sum())
    return loss / len(split), right / len(split)


def _gradient(bench: Bench, model: Packed, task: Task) -> Tensor:
    """The gradient of the mean loss over a client's data, at `model`, as a flat vector."""
    module, examples = bench.module, bench.examples[task.client]
    module.load_state_dict(bench.layout.unpack(model))
    module.train()
    module.zero_grad(set_to_none=True)
    with seeded(derive(bench.seed, "gradient layers", task.round, task.client), bench.device):
        for images, labels in _in_turn(examples):
            loss = functional.cross_entropy(module(normalised(images)), labels, reduction="sum") / len(examples)
            torch.autograd.backward(loss)
    named = dict(module.named_parameters(remove_duplicate=False))
    tensors = [named[name] for name, _ in bench.layout.sizes().tensors]
    return torch.cat([(torch.zeros_like(t) if t.grad is None else t.grad).reshape(-1) for t in tensors]).detach()


def _in_turn(split: Split) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(torch.split(split.images, EVALUATE_BATCH), torch.split(split.labels, EVALUATE_BATCH), strict=True)


@torch.no_grad()
def correct(module: nn.Module, split: Split) -> Tensor:
    """For every example of a split, whether the module's first guess is right; `[N]` booleans on the CPU."""
    module.eval()
    right = [module(normalised(images)).argmax(dim=1) == labels for images, labels in _in_turn(split)]
    return torch.cat(right).cpu()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's own generators seeded for a while, and put back afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
