"""How images are normalised before a network sees them: by ImageNet's mean and deviation, which the paper uses throughout."""

from functools import cache

import torch
from torch import Tensor

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@cache
def get_pixel_scale(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and deviation on a device. Cached, since a copy from the CPU for every batch would stall a GPU."""
    return tuple(torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))  # type: ignore[return-value]


@cache
def get_row_scale(width: int) -> tuple[Tensor, Tensor]:
    """Return mean and deviation for a row of pixels on the CPU, channel by channel."""
    return tuple(scale.flatten().repeat(width) for scale in get_pixel_scale(torch.device("cpu")))  # type: ignore[return-value]
