"""Crop, flip and normalise whole batches. Random choices come from a CPU generator, so they are the same on every device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedheal.core.pixels import get_pixel_scale, get_row_scale

PAD = 4


def normalise_images(images: Tensor) -> Tensor:
    """Convert uint8 `[N, 3, H, W]` to float32, normalised by ImageNet's mean and deviation; the memory format stays."""
    scaled = images.to(torch.float32) / 255
    is_channels_last = scaled.is_contiguous(memory_format=torch.channels_last) and not scaled.is_contiguous()
    if images.device.type == "cpu" and is_channels_last:
        # Whole rows of pixels are several times faster than an innermost loop over three channels.
        mean, std = get_row_scale(images.shape[3])
        scaled.permute(0, 2, 3, 1).flatten(2).sub_(mean).div_(std)
        return scaled
    mean, std = get_pixel_scale(images.device)
    return scaled.sub_(mean).div_(std)


class Choices(NamedTuple):
    """The random choices for one batch, `[N]` each and on the CPU; `None` if not varied."""

    top: Tensor | None
    left: Tensor | None
    mirrored: Tensor | None


def draw_choices(count: int, how: str, generator: torch.Generator) -> Choices:
    """Draw shifts of up to four pixels for `crop` (black beyond the edge), and mirror half of the images for `flip`."""
    top = left = mirrored = None
    if "crop" in how:
        top, left = torch.randint(0, 2 * PAD + 1, (2, count, 1), generator=generator)[:, :, 0]
    if "flip" in how:
        mirrored = torch.rand(count, generator=generator) < 0.5
    return Choices(top, left, mirrored)


def apply_choices(images: Tensor, choices: Choices) -> Tensor:
    """Crop and flip the images as chosen."""
    if choices.top is not None and choices.left is not None:
        images = _crop(images, choices.top.to(images.device), choices.left.to(images.device))
    if choices.mirrored is not None:
        images = torch.where(choices.mirrored.to(images.device).view(-1, 1, 1, 1), images.flip(3), images)
    return images


def _crop(images: Tensor, top: Tensor, left: Tensor) -> Tensor:
    """Crop by copying whole rows: gathering single pixels would cost a small network a tenth of its training time."""
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
