"""The obvious engine: one client after another, on any device.

A client starts from the global model with a fresh optimiser (SGD with momentum and weight decay), takes its epochs or
steps over its own shuffled examples (the last, smaller batch included) and returns what it changed. A method's terms have
their say at each step and at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedheal.core.layout import Layout, Packed, real
from fedheal.core.rng import derive, generator
from fedheal.core.updates import Reply
from fedheal.data.augment import Choices, apply_choices, draw_choices, normalise_images
from fedheal.data.domains import Split
from fedheal.engine.precision import lowered
from fedheal.local.fedprox import Proximal
from fedheal.local.term import Arrays, Batch, Context, Term, effective_step

EVALUATE_BATCH = 512
EVALUATE_PIXELS = 1 << 22  # in a batch on a GPU, which small ones leave idle
CACHED_PIXELS = 1 << 16  # in a batch on a CPU, so that what a network makes of it stays in the caches


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
class LocalTraining:
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
    precision: str = "fp32"


@dataclass(frozen=True)
class Task:
    """One client's round: its slots are what each term left with it."""

    client: str
    round: int
    slots: tuple[Arrays, ...] = ()


@dataclass(frozen=True)
class ClientResult:
    """What comes of a task: the reply, the client's new slots, and each term's message to the server."""

    reply: Reply
    slots: tuple[Arrays, ...] = ()
    messages: tuple[Arrays, ...] = ()


def train(local_training: LocalTraining, model: Packed, shared: tuple[Arrays, ...], task: Task) -> ClientResult:
    """A client's round, starting from the global `model`."""

    def fit(start: Packed, strength: float) -> Packed:
        again, contexts = anchored(local_training, model, task, strength, start)
        return _fit(again, start, task, "personal", contexts)[0]

    contexts = contexts_of(local_training, model, shared, task, fit)
    metrics = (
        {"loss": judge(local_training, model, local_training.examples[task.client])[0]}
        if local_training.received_loss
        else {}
    )
    start = prepared(local_training, contexts, model)
    local, loss = _fit(local_training, start, task, "batches", contexts)
    trained = concluded(local_training, model, task, contexts, local, metrics | {"train_loss": float(loss)})
    local_training.module.zero_grad(set_to_none=True)
    return trained


def prepared(local_training: LocalTraining, contexts: Sequence[Context], start: Packed) -> Packed:
    """The model a client starts from, as all terms will have it."""
    for term, ctx in zip(local_training.terms, contexts, strict=True):
        start = term.prepare(ctx, start)
    return start


def concluded(
    local_training: LocalTraining,
    model: Packed,
    task: Task,
    contexts: Sequence[Context],
    local: Packed,
    metrics: dict[str, float],
    out: Tensor | None = None,
) -> ClientResult:
    """What comes of a client's round that ended with the model `local`; the update goes to `out` where that is given."""
    training, examples = local_training.training, len(local_training.examples[task.client])
    sent, slots, messages = local, [], []
    for term, ctx in zip(local_training.terms, contexts, strict=True):
        sent = term.upload(ctx, sent)
        metrics |= term.metrics(ctx, local)
        slot, message = term.finish(ctx, local)
        slots.append(slot)
        messages.append(message)
    taken = steps_of(examples, training)
    metrics |= {
        "steps": float(taken),
        "lr": training.lr,
        "reach": effective_step(training.lr, training.momentum, taken),
    }
    reply = Reply(
        task.client,
        torch.sub(sent.params, model.params, out=out),
        examples,
        sent.buffers if len(sent.buffers) else None,
        sent.counters if len(sent.counters) else None,
        metrics,
    )
    return ClientResult(reply, tuple(slots), tuple(messages))


def contexts_of(
    local_training: LocalTraining,
    model: Packed,
    shared: tuple[Arrays, ...],
    task: Task,
    fit: Callable[[Packed, float], Packed],
    nets: dict[str, nn.Module] | None = None,
) -> list[Context]:
    """What each term may know of a client's round."""
    training, examples = local_training.training, local_training.examples[task.client]
    return [
        Context(
            client=task.client,
            round=task.round,
            rounds=local_training.rounds,
            lr=training.lr,
            momentum=training.momentum,
            steps=steps_of(len(examples), training),
            classes=local_training.classes,
            module=local_training.module,
            layout=local_training.layout,
            received=model,
            slot=slot,
            shared=values,
            fit=fit,
            gradient=lambda at: _gradient(local_training, at, task),
            validate=lambda at: judge(local_training, at, local_training.validation[task.client]),
            nets={} if nets is None else nets,
        )
        for slot, values in zip(task.slots, shared, strict=True)
    ]


def anchored(
    local_training: LocalTraining, model: Packed, task: Task, strength: float, start: Packed
) -> tuple[LocalTraining, Sequence[Context]]:
    """A second training of a client, held near the received model: the local_training and the contexts for it."""
    again = replace(local_training, terms=(Proximal(strength),))
    contexts = contexts_of(again, model, ({},), replace(task, slots=({},)), _once)
    prepared(again, contexts, start)
    return again, contexts


def _once(start: Packed, strength: float) -> Packed:
    raise RuntimeError("a second training cannot start a third")


def _fit(
    local_training: LocalTraining, start: Packed, task: Task, purpose: str, contexts: Sequence[Context]
) -> tuple[Packed, Tensor]:
    """Train from `start` with all terms; the local model and its mean loss (cross-entropy alone)."""
    module, training = local_training.module, local_training.training
    module.load_state_dict(local_training.layout.unpack(start))
    module.train()
    optimiser = optimiser_of(local_training)
    total, taken = torch.zeros((), dtype=torch.float64, device=local_training.device), 0
    chance = generator(local_training.seed, purpose, task.round, task.client)
    with seeded(layer_seed(local_training, purpose, task), local_training.device):
        for x, y, last in batches(local_training.examples[task.client], training, chance):
            total += step(local_training, optimiser, contexts, x, y, last)
            taken += 1
    return local_training.layout.pack(module.state_dict()), total / max(taken, 1)


def optimiser_of(local_training: LocalTraining) -> torch.optim.SGD:
    training = local_training.training
    return torch.optim.SGD(
        local_training.module.parameters(),
        lr=training.lr,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        fused=local_training.device.type == "cuda",
    )


def layer_seed(local_training: LocalTraining, purpose: str, task: Task) -> int:
    """For dropout and the like."""
    return derive(local_training.seed, f"{purpose} layers", task.round, task.client)


def step(
    local_training: LocalTraining,
    optimiser: torch.optim.Optimizer,
    contexts: Sequence[Context],
    x: Tensor,
    y: Tensor,
    last: bool,
) -> Tensor:
    """One step on one batch; the batch's cross-entropy."""
    module, terms = local_training.module, local_training.terms
    optimiser.zero_grad(set_to_none=True)
    features: Tensor | None = None
    with lowered(local_training.precision, local_training.device):
        if any(term.features for term in terms):
            features = module.features(x)  # type: ignore[operator]
            logits = module.head(features)  # type: ignore[operator]
            features = features.to(x.dtype)
        else:
            logits = module(x)
        logits = logits.to(x.dtype)
        ce = loss = functional.cross_entropy(logits, y)
        batch = Batch(x, y, logits, ce, features, last)
        for term, ctx in zip(terms, contexts, strict=True):
            added = term.loss(batch, ctx)
            loss = loss if added is None else loss + added
    torch.autograd.backward(loss)
    for term, ctx in zip(terms, contexts, strict=True):
        term.grad(ctx)
    for clip in [term.clip for term in terms if term.clip]:
        nn.utils.clip_grad_norm_(module.parameters(), clip)
    optimiser.step()
    return ce.detach()


def steps_of(examples: int, training: Training) -> int:
    """How many steps a client with so many examples takes in a round."""
    return training.epochs * -(-examples // training.batch_size) if training.steps is None else training.steps


def smallest_batch(examples: int, training: Training) -> int:
    """The size of a client's smallest batch in a round: what an epoch leaves over, if a step comes to it."""
    whole, left = divmod(examples, training.batch_size)
    return left if left and steps_of(examples, training) > whole else training.batch_size


def batches(examples: Split, training: Training, chance: torch.Generator) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """The batches of one client's round, and whether no later epoch follows."""
    for order, choices, last in planned(len(examples), training, chance):
        here = order.to(examples.labels.device)
        chosen = examples.images.index_select(0, here)  # copies whole images, where an index in brackets takes bytes
        images = apply_choices(chosen, choices).contiguous(memory_format=torch.channels_last)
        yield normalise_images(images), examples.labels[here], last


def planned(number: int, training: Training, chance: torch.Generator) -> Iterator[tuple[Tensor, Choices, bool]]:
    """Which of a client's examples each batch takes, and how they are varied: shuffled anew each epoch, none dropped."""
    per_epoch = -(-number // training.batch_size)
    left = steps_of(number, training)
    while left > 0:
        order = torch.randperm(number, generator=chance)
        for chosen in torch.split(order, training.batch_size)[:left]:
            yield chosen, draw_choices(len(chosen), training.augment, chance), left <= per_epoch
        left -= per_epoch


@torch.no_grad()
def judge(local_training: LocalTraining, model: Packed, split: Split) -> tuple[float, float]:
    """A model's mean cross-entropy and accuracy (0 to 1) on some examples, in evaluation mode and without augmentation."""
    module = local_training.module
    module.load_state_dict(local_training.layout.unpack(model))
    module.eval()
    loss, right = 0.0, 0
    for images, labels in in_turn(split):
        with lowered(local_training.precision, local_training.device):
            logits = module(normalise_images(images)).to(torch.float32)
        loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
        right += int((logits.argmax(dim=1) == labels).sum())
    return loss / len(split), right / len(split)


def _gradient(local_training: LocalTraining, model: Packed, task: Task) -> Tensor:
    """The gradient of the mean loss over a client's data, at `model`, as a flat vector."""
    module, examples = local_training.module, local_training.examples[task.client]
    module.load_state_dict(local_training.layout.unpack(model))
    module.train()
    module.zero_grad(set_to_none=True)
    with seeded(derive(local_training.seed, "gradient layers", task.round, task.client), local_training.device):
        for images, labels in in_turn(examples):
            with lowered(local_training.precision, local_training.device):
                loss = functional.cross_entropy(module(normalise_images(images)), labels, reduction="sum") / len(
                    examples
                )
            torch.autograd.backward(loss)
    named = dict(module.named_parameters(remove_duplicate=False))
    tensors = [named[name] for name, _ in local_training.layout.sizes().tensors]
    gradients = [real(torch.zeros_like(t) if t.grad is None else t.grad) for t in tensors]
    return torch.cat([gradient.reshape(-1) for gradient in gradients]).detach()


def in_turn(split: Split, cached: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """A split's examples in batches; `cached` where neither sums nor statistics of a batch are part of the outcome."""
    height, width = split.images.shape[-2:]
    size = EVALUATE_BATCH
    if split.images.device.type == "cuda":
        size = max(16, min(1 << 12, EVALUATE_PIXELS // (height * width)))
    elif cached:
        size = max(4, min(EVALUATE_BATCH, CACHED_PIXELS // (height * width)))
    yield from zip(torch.split(split.images, size), torch.split(split.labels, size), strict=True)


@torch.no_grad()
def correct(module: nn.Module, split: Split, precision: str = "fp32") -> Tensor:
    """For every example of a split, whether the module's first guess is right; `[N]` booleans on its device."""
    module.eval()
    right = []
    for images, labels in in_turn(split, cached=True):
        with lowered(precision, images.device):
            right.append(module(normalise_images(images)).argmax(dim=1) == labels)
    return torch.cat(right)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's own generators seeded for a while, and put back afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
