"""The obvious engine: one client after another, on any device.

A client starts from the global model with a fresh optimiser (SGD with momentum and weight decay), takes its epochs or
steps over its own shuffled examples (the last, smaller batch included) and returns what it changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedheal.data.augment import augmented, normalised
from fedheal.data.domains import Split
from fedheal.layout import Layout, Packed
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


def train(bench: Bench, model: Packed, client: str, number: int) -> Reply:
    """What `client` changes in round `number`, starting from `model`."""
    examples, training, module = bench.examples[client], bench.training, bench.module
    module.load_state_dict(bench.layout.unpack(model))
    module.train()
    optimiser = torch.optim.SGD(
        module.parameters(), lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
    )
    total = torch.zeros((), dtype=torch.float64, device=bench.device)
    taken = 0
    with seeded(derive(bench.seed, "layers", number, client), bench.device):  # dropout and the like
        for x, y in batches(examples, training, generator(bench.seed, "batches", number, client)):
            optimiser.zero_grad(set_to_none=True)
            loss = functional.cross_entropy(module(x), y)
            torch.autograd.backward(loss)
            optimiser.step()
            total += loss.detach()
            taken += 1
    local = bench.layout.pack(module.state_dict())
    metrics = {"train_loss": float(total) / max(taken, 1), "steps": float(taken)}
    buffers = local.buffers if len(local.buffers) else None
    counters = local.counters if len(local.counters) else None
    return Reply(client, local.params - model.params, len(examples), buffers, counters, metrics)


def batches(examples: Split, training: Training, chance: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one client's round: shuffled anew each epoch, none dropped."""
    per_epoch = -(-len(examples) // training.batch_size)
    left = training.epochs * per_epoch if training.steps is None else training.steps
    while left > 0:
        order = torch.randperm(len(examples), generator=chance)
        for chosen in torch.split(order, training.batch_size)[:left]:
            here = chosen.to(examples.labels.device)
            images = augmented(examples.images[here], training.augment, chance)
            yield normalised(images), examples.labels[here]
        left -= per_epoch


@torch.no_grad()
def correct(module: nn.Module, split: Split) -> Tensor:
    """For every example of a split, whether the module's first guess is right; `[N]` booleans on the CPU."""
    module.eval()
    right = [
        module(normalised(images)).argmax(dim=1) == labels
        for images, labels in zip(
            torch.split(split.images, EVALUATE_BATCH), torch.split(split.labels, EVALUATE_BATCH), strict=True
        )
    ]
    return torch.cat(right).cpu()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's own generators seeded for a while, and put back afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
