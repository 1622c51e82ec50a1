"""The examples of all clients on the device. Batches are made from them in tensor code, so that a step can be captured."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedheal.data.augment import PAD, normalise_images
from fedheal.engine.serial import LocalTraining


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

    def select_clients(self, clients: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the images and labels of some clients, not augmented."""
        device, starts = self.images.device, {c: self.offsets[c] for c in clients}
        index = torch.cat([torch.arange(start, start + self.sizes[c], device=device) for c, start in starts.items()])
        rows, columns = slice(self.pad, self.pad + self.height), slice(self.pad, self.pad + self.width)
        return self.images[index][:, rows, columns].permute(0, 3, 1, 2), self.labels[index]
