"""The examples of all clients on the device. Batches are made from them in tensor code, so that a step can be captured."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedheal.core.layout import Packed
from fedheal.core.rng import generator
from fedheal.core.updates import Metric
from fedheal.data.augment import PAD, normalise_images
from fedheal.data.domains import Split
from fedheal.engine import serial
from fedheal.engine.precision import autocast
from fedheal.engine.serial import LocalTraining, Task, Training

PLANNED_STEPS = 64  # that are uploaded at a time, at most


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
        planned = [*self._list_batches(local_training, task, purpose)]
        steps = serial.list_batch_sizes(self.sizes[task.client], local_training.training)
        return torch.from_numpy(np.concatenate(planned)), steps

    def plan_cohort(
        self, local_training: LocalTraining, tasks: Sequence[Task], purpose: str, shape: Sequence[int]
    ) -> Iterator[Tensor]:
        """Plan the batches of clients that train together, a few steps at a time.

        The device takes the first steps while later ones are planned. It waits only for the very first.

        Args:
            local_training: What is trained.
            tasks: The clients.
            purpose: What the batches are for, part of their seed.
            shape: Of the plan of a step, `[clients, 4, batch_size]`.

        Yields:
            The plans of the next steps, `[steps, *shape]`, in memory from which they can be uploaded without waiting.
        """
        is_cuda = self.images.is_cuda
        batches = [self._list_batches(local_training, task, purpose) for task in tasks]
        left = [serial.count_steps(self.sizes[task.client], local_training.training) for task in tasks]
        none = np.zeros((0, *shape[1:]), np.int64)  # of a client without examples
        planned = [next(of_client, none) for of_client in batches]
        while longest := max(left):
            # Clients that have more steps than they have planned so far limit how many are ready.
            steps = min((len(p) for p, number in zip(planned, left, strict=True) if len(p) < number), default=longest)
            part = torch.empty(min(steps, PLANNED_STEPS), *shape, dtype=torch.int64, pin_memory=is_cuda)
            rows = part.numpy()
            rows[:, len(batches) :] = 0
            for i, of_client in enumerate(batches):
                taken = min(len(rows), left[i])
                if taken < len(rows):
                    rows[taken:, i] = 0
                if taken:
                    rows[:taken, i] = planned[i][:taken]
                    left[i] -= taken
                    planned[i] = planned[i][taken:] if taken < len(planned[i]) or not left[i] else next(of_client)
            yield part

    def _list_batches(self, local_training: LocalTraining, task: Task, purpose: str) -> Iterator[NDArray[np.int64]]:
        """Yield a client's batches, several at a time, as `plan_epochs` does."""
        rng = generator(local_training.seed, purpose, task.round, task.client)
        return plan_epochs(self.sizes[task.client], local_training.training, rng, self.offsets[task.client])

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
    ) -> list[dict[str, Metric]]:
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


def plan_epochs(
    examples: int, training: Training, rng: torch.Generator, offset: int = 0
) -> Iterator[NDArray[np.int64]]:
    """Yield the batches that `serial.plan_batches` yields one by one, several at a time.

    Numbers of one kind are drawn one after another. So the numbers of an epoch can be drawn at once, which is faster.
    Only where shifts and mirrored images take turns, batches are planned one by one.

    Args:
        examples: How many a client has.
        training: How it trains.
        rng: Where the random numbers come from.
        offset: The index of its first example.

    Yields:
        `[batches, 4, batch_size]`: index, top and left shift, and whether an image is mirrored. Zeros fill a smaller batch.
    """
    size, steps_left, augment = training.batch_size, serial.count_steps(examples, training), training.augment
    while steps_left > 0:
        order = torch.randperm(examples, generator=rng)[: steps_left * size]
        steps_left -= -(-examples // size)
        for part in torch.split(order, size) if augment == "crop-flip" else [order]:
            number = part.shape[0]
            planned = np.zeros((-(-number // size), 4, size), np.int64)
            _write_batches(planned[:, :1], part.numpy() + offset)
            if "crop" in augment:
                _write_batches(planned[:, 1:3], torch.randint(0, 2 * PAD + 1, (2 * number,), generator=rng).numpy())
            if "flip" in augment:
                _write_batches(planned[:, 3:], (torch.rand(number, generator=rng) < 0.5).numpy())
            yield planned


def _write_batches(planned: NDArray[np.int64], numbers: NDArray[Any]) -> None:
    """Write numbers into `[batches, channels, batch_size]`, batch after batch; the last one may be smaller."""
    _, channels, size = planned.shape
    full, rest = divmod(numbers.shape[0] // channels, size)
    end = full * channels * size
    planned[:full] = numbers[:end].reshape(full, channels, size)
    if rest:
        planned[full, :, :rest] = numbers[end:].reshape(channels, rest)
