"""The examples of all clients on the device. Batches are made from them in tensor code, so that a step can be captured."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedheal.core.layout import Packed
from fedheal.core.rng import generator
from fedheal.data.augment import PAD, Choices, normalise_images
from fedheal.data.domains import Split
from fedheal.engine import serial
from fedheal.engine.precision import autocast
from fedheal.engine.serial import LocalTraining, Task, Training

PLANNED_STEPS = 8  # planned at a time, at most


class DeviceData:
    """All clients' images as bytes, channels last, padded as far as random crops shift them."""

    def __init__(self, local_training: LocalTraining) -> None:
        splits, augment = local_training.examples, local_training.training.augment
        clients = sorted(splits)
        self.pad = PAD if "crop" in augment else 0
        padded = [functional.pad(splits[c].images, [self.pad] * 4).permute(0, 2, 3, 1) for c in clients]
        self.images = torch.cat([images.contiguous() for images in padded])
        self.labels = torch.cat([splits[c].labels for c in clients])
        self.sizes = {c: len(splits[c]) for c in clients}
        ends = np.cumsum(list(self.sizes.values()))
        self.offsets = {c: int(end) - self.sizes[c] for c, end in zip(clients, ends, strict=True)}
        self.height, self.width = splits[clients[0]].images.shape[-2:]
        self.augments = augment != "none"
        self.rows = torch.arange(self.height, device=local_training.device)
        self.columns = torch.arange(self.width, device=local_training.device)
        every_byte = torch.arange(256, device=local_training.device).to(torch.uint8)
        # What `normalise_images` makes of every byte, `[256, channels]`.
        self.pixel_values = normalise_images(every_byte.view(-1, 1, 1, 1).expand(-1, 3, 1, 1))[:, :, 0, 0].contiguous()

    def plan_client(
        self, local_training: LocalTraining, task: Task, purpose: str
    ) -> tuple[Tensor, list[tuple[int, bool]]]:
        """Plan a client's batches of a round.

        Returns:
            The plan `[steps, 4, batch_size]` on the CPU, see `make_batch`, and for each step the size of the batch and whether
            it belongs to the last epoch.
        """
        steps = serial.list_batch_sizes(self.sizes[task.client], local_training.training)
        plan = torch.zeros(len(steps), 4, local_training.training.batch_size, dtype=torch.int64)
        for row, planned in zip(plan.numpy(), self._list_batches(local_training, task, purpose), strict=True):
            row[:, : planned.shape[1]] = planned
        return plan, steps

    def plan_cohort(
        self, local_training: LocalTraining, tasks: Sequence[Task], purpose: str, plan: Tensor
    ) -> Iterator[int]:
        """Plan the batches of clients that train together, a few steps at a time; yield the number of steps planned so far.

        The device takes the first steps while later ones are planned. It waits only for the very first.

        Args:
            local_training: What is trained.
            tasks: The clients.
            purpose: What the batches are for, part of their seed.
            plan: Receives the plans, `[steps, clients, 4, batch_size]`.
        """
        batches = [self._list_batches(local_training, task, purpose) for task in tasks]
        longest = max(serial.count_steps(self.sizes[task.client], local_training.training) for task in tasks)
        start, number = 0, 1
        while start < longest:
            part = torch.zeros(min(number, longest - start), *plan.shape[1:], dtype=plan.dtype)
            rows = part.numpy()
            for t in range(len(rows)):
                for i, of_client in enumerate(batches):
                    if (planned := next(of_client, None)) is not None:
                        rows[t, i, :, : planned.shape[1]] = planned
            plan[start : start + len(part)] = upload(part, plan.device)
            start, number = start + len(part), min(2 * number, PLANNED_STEPS)
            yield start

    def _list_batches(self, local_training: LocalTraining, task: Task, purpose: str) -> Iterator[NDArray[np.int64]]:
        """Yield a client's batches as `[4, size]`: index, top and left shift, and whether an image is mirrored."""
        training, examples = local_training.training, self.sizes[task.client]
        rng = generator(local_training.seed, purpose, task.round, task.client)
        for order, choices, size in plan_epochs(examples, training, rng):
            planned = np.zeros((4, len(order)), np.int64)
            planned[0] = order.numpy() + self.offsets[task.client]
            for channel, choice in enumerate(choices, start=1):
                if choice is not None:
                    planned[channel] = choice.numpy()
            for start in range(0, len(order), size):
                yield planned[:, start : start + size]

    def make_batch(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images and labels of a plan `[4, size]`: index, top and left shift, and whether it is mirrored."""
        index, top, left, mirrored = plan.unbind()
        if self.augments:
            rows = top[:, None] + self.rows
            columns = left[:, None] + torch.where(mirrored[:, None] > 0, self.columns.flip(0), self.columns)
            images = self.images[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        else:
            images = self.images[index]
        return normalise_images(images.permute(0, 3, 1, 2)), self.labels[index]

    @torch.no_grad()
    def compute_received_losses(
        self, local_training: LocalTraining, model: Packed, tasks: Sequence[Task]
    ) -> list[dict[str, float]]:
        """Return the loss of the received model on each client's data if it is needed, computed for all in one pass."""
        if not local_training.received_loss or not tasks:
            return [{} for _ in tasks]
        module = local_training.load_model(model, training=False)
        images, labels = self.select_clients([task.client for task in tasks])
        losses = []
        for x, y in serial.eval_batches(Split(images, labels)):
            with autocast(local_training.precision, local_training.device):
                logits = module(normalise_images(x)).to(torch.float32)
            losses.append(functional.cross_entropy(logits, y, reduction="none"))
        parts = torch.split(torch.cat(losses).double(), [self.sizes[task.client] for task in tasks])
        return [{"loss": loss} for loss in torch.stack([part.mean() for part in parts]).tolist()]

    def select_clients(self, clients: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the images and labels of some clients, not augmented."""
        device, starts = self.images.device, {c: self.offsets[c] for c in clients}
        index = torch.cat([torch.arange(start, start + self.sizes[c], device=device) for c, start in starts.items()])
        rows, columns = slice(self.pad, self.pad + self.height), slice(self.pad, self.pad + self.width)
        return self.images[index][:, rows, columns].permute(0, 3, 1, 2), self.labels[index]


def plan_epochs(examples: int, training: Training, rng: torch.Generator) -> Iterator[tuple[Tensor, Choices, int]]:
    """Yield examples and choices as `serial.plan_batches` does, for several batches at a time, and the size of a batch.

    Shifts are drawn one number after another, so those of an epoch can be drawn at once, which is faster. Mirrored images come
    from numbers of another kind, in between: then batches are planned one by one.
    """
    if "flip" in training.augment:
        for order, choices, _ in serial.plan_batches(examples, training, rng):
            yield order, choices, max(1, len(order))
        return
    size, steps_left = training.batch_size, serial.count_steps(examples, training)
    while steps_left > 0:
        order = torch.randperm(examples, generator=rng)[: steps_left * size]
        steps_left -= -(-examples // size)
        if "crop" not in training.augment:
            yield order, Choices(None, None, None), size
            continue
        drawn = torch.randint(0, 2 * PAD + 1, (2 * len(order),), generator=rng)
        full = len(order) // size * size
        # Each batch has its shifts down, then those to the right.
        shifts = drawn[: 2 * full].view(-1, 2, size).transpose(0, 1).reshape(2, full)
        top, left = torch.cat([shifts, drawn[2 * full :].view(2, -1)], dim=1)
        yield order, Choices(top, left, None), size


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor's copy on the device, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
