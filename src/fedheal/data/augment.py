"""From stored bytes to a network's input, for whole batches in tensor code: crop, flip, normalise.

Random choices come from a CPU generator that is passed in, so that they are the same on every device.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

PAD = 4
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, which the paper uses throughout
AUGMENTATIONS = ("none", "crop", "flip", "crop-flip")


def normalised(images: Tensor) -> Tensor:
    """uint8 `[N, 3, H, W]` as float32 with ImageNet's mean and deviation, in the memory format of the images."""
    made = images.to(torch.float32) / 255
    if images.device.type == "cpu" and _channels_last(made):
        # The innermost loop would be over three channels: whole rows of pixels are several times faster.
        mean, std = _row_scale(images.shape[3])
        made.permute(0, 2, 3, 1).flatten(2).sub_(mean).div_(std)
        return made
    mean, std = _scale(images.device)
    return made.sub_(mean).div_(std)


def _channels_last(images: Tensor) -> bool:
    return images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()


@cache
def _scale(device: torch.device) -> tuple[Tensor, Tensor]:
    """Once a device: a copy from the CPU at every batch would make a GPU wait."""
    return tuple(torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))  # type: ignore[return-value]


@cache
def _row_scale(width: int) -> tuple[Tensor, Tensor]:
    """For every pixel of a row, on the CPU."""
    return tuple(torch.tensor(values).repeat(width) for values in (MEAN, STD))  # type: ignore[return-value]


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
    """Rows of pixels are copied whole: a gather of single pixels would cost a small network a tenth of its training."""
    number, channels, height, width = images.shape
    if number == 0:
        return images
    high, wide = height + 2 * PAD, width + 2 * PAD
    framed = images.new_zeros(number, high, wide, channels)
    framed[:, PAD:-PAD, PAD:-PAD] = images.permute(0, 2, 3, 1)
    rows = framed.flatten().unfold(0, width * channels, channels)  # a view: the row of pixels that starts at each pixel
    line = torch.arange(number, device=images.device)[:, None] * high + top[:, None]
    first = (line + torch.arange(height, device=images.device)) * wide + left[:, None]
    return rows.index_select(0, first.flatten()).view(number, height, width, channels).permute(0, 3, 1, 2)
