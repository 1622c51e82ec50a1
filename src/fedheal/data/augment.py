"""From stored bytes to a network's input, for whole batches in tensor code: crop, flip, normalise.

Random choices come from a CPU generator that is passed in, so that they are the same on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

PAD = 4
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, which the paper uses throughout
AUGMENTATIONS = ("none", "crop", "flip", "crop-flip")


def normalised(images: Tensor) -> Tensor:
    """uint8 `[N, 3, H, W]` as float32 with ImageNet's mean and deviation."""
    mean = torch.tensor(MEAN, device=images.device).view(1, 3, 1, 1)
    std = torch.tensor(STD, device=images.device).view(1, 3, 1, 1)
    return (images.to(torch.float32) / 255 - mean) / std


def augmented(images: Tensor, how: str, generator: torch.Generator) -> Tensor:
    """A random version of each image: `crop` shifts by up to four pixels (black beyond the edge), `flip` mirrors half."""
    if "crop" in how:
        images = _cropped(images, generator)
    if "flip" in how:
        mirrored = torch.rand(len(images), generator=generator).to(images.device) < 0.5
        images = torch.where(mirrored.view(-1, 1, 1, 1), images.flip(3), images)
    return images


def _cropped(images: Tensor, generator: torch.Generator) -> Tensor:
    number, _, height, width = images.shape
    padded = functional.pad(images, (PAD, PAD, PAD, PAD))
    top, left = torch.randint(0, 2 * PAD + 1, (2, number, 1), generator=generator).to(images.device)
    rows = top + torch.arange(height, device=images.device)
    columns = left + torch.arange(width, device=images.device)
    which = torch.arange(number, device=images.device).view(-1, 1, 1)
    return padded[which, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)
