"""The examples of all clients on the device, from which the batches of a step are made in tensor code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedheal.data.augment import PAD, normalise_images
from fedheal.engine.serial import LocalTraining


class Resident:
    """All clients' examples on the device, as bytes, channels last, with room for shifts."""

    def __init__(self, local_training: LocalTraining) -> None:
        clients, how = sorted(local_training.examples), local_training.training.augment
        self.pad = PAD if "crop" in how else 0
        stored = [
            functional.pad(local_training.examples[c].images, [self.pad] * 4).permute(0, 2, 3, 1) for c in clients
        ]
        self.images = torch.cat([part.contiguous() for part in stored])
        self.labels = torch.cat([local_training.examples[c].labels for c in clients])
        ends = np.cumsum([len(local_training.examples[c]) for c in clients])
        self.first = {c: int(end) - len(local_training.examples[c]) for c, end in zip(clients, ends, strict=True)}
        self.height, self.width = local_training.examples[clients[0]].images.shape[-2:]
        self.varied = how != "none"
        self.rows = torch.arange(self.height, device=local_training.device)
        self.columns = torch.arange(self.width, device=local_training.device)

    def batch(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        """The batch of a plan `[4, size]`: which example, its shifts, whether it is mirrored."""
        which, top, left, mirrored = plan.unbind()
        if self.varied:
            rows = top[:, None] + self.rows
            columns = left[:, None] + torch.where(mirrored[:, None] > 0, self.columns.flip(0), self.columns)
            images = self.images[which[:, None, None], rows[:, :, None], columns[:, None, :]]
        else:
            images = self.images[which]
        return normalise_images(images.permute(0, 3, 1, 2)), self.labels[which]

    def plain(self, clients: Sequence[str], local_training: LocalTraining) -> tuple[Tensor, Tensor]:
        """The examples of some clients as they are."""
        where = torch.cat(
            [
                torch.arange(
                    self.first[c], self.first[c] + len(local_training.examples[c]), device=local_training.device
                )
                for c in clients
            ]
        )
        inner = slice(self.pad, self.pad + self.height), slice(self.pad, self.pad + self.width)
        return self.images[where][:, inner[0], inner[1]].permute(0, 3, 1, 2), self.labels[where]
