"""From stored bytes to a network's input, for whole batches in tensor code: crop, flip, normalise.

Random choices come from a CPU generator that is passed in, so that they are the same on every device.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

PAD = 4
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, which the paper uses throughout
AUGMENTATIONS = ("none", "crop", "flip", "crop-flip")


def normalised(images: Tensor) -> Tensor:
    """uint8 `[N, 3, H, W]` as float32 with ImageNet's mean and deviation."""
    mean, std = _scale(images.device)
    return (images.to(torch.float32) / 255 - mean) / std


@cache
def _scale(device: torch.device) -> tuple[Tensor, Tensor]:
    """Once a device: a copy from the CPU at every batch would make a GPU wait."""
    return tuple(torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))  # type: ignore[return-value]


class Choices(NamedTuple):
    """One batch's random choices, `[N]` each and on the CPU; `None` for what is not varied."""

    top: Tensor | None
    left: Tensor | None
    mirrored: Tensor | None


def drawn(number: int, how: str, generator: torch.Generator) -> Choices:
    """`crop` shifts an image by up to four pixels (black beyond the edge), `flip` mirrors half of them."""
    top = left = mirrored = None
    if "crop" in how:
        top, left = torch.randint(0, 2 * PAD + 1, (2, number, 1), generator=generator)[:, :, 0]
    if "flip" in how:
        mirrored = torch.rand(number, generator=generator) < 0.5
    return Choices(top, left, mirrored)


def augmented(images: Tensor, how: str, generator: torch.Generator) -> Tensor:
    """A random version of each image."""
    return altered(images, drawn(len(images), how, generator))


def altered(images: Tensor, choices: Choices) -> Tensor:
    """The images as chosen."""
    if choices.top is not None and choices.left is not None:
        images = _cropped(images, choices.top.to(images.device), choices.left.to(images.device))
    if choices.mirrored is not None:
        images = torch.where(choices.mirrored.to(images.device).view(-1, 1, 1, 1), images.flip(3), images)
    return images


def _cropped(images: Tensor, top: Tensor, left: Tensor) -> Tensor:
    number, _, height, width = images.shape
    padded = functional.pad(images, (PAD, PAD, PAD, PAD))
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = left[:, None] + torch.arange(width, device=images.device)
    which = torch.arange(number, device=images.device).view(-1, 1, 1)
    return padded[which, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)
