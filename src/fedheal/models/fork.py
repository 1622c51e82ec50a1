"""Two branches of a network that begin at the same feature maps: a convolution, and a shortcut around it.

The gradient of the maps is the sum of both branches' gradients. For stacked clients on a GPU one kernel computes the
sum. Otherwise two kernels would each write a gradient, and a third would add them. Elsewhere this is the plain
composition.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedheal.core.import_path import import_triton_kernels
from fedheal.models.stacked_layers import KERNELS, StackedConv2d


def apply_fork(conv: nn.Module, shortcut: nn.Module | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `conv(x)` and `shortcut(x)`, or `x` itself if there is no shortcut; the shortcut is a 1 x 1 convolution."""
    if isinstance(conv, StackedConv2d) and torch.is_grad_enabled():
        kernels = import_triton_kernels(KERNELS, x.device.type) if conv.uses_kernels else None
        if kernels is not None and kernels.supports_fork(conv, shortcut, x):
            forked: tuple[Tensor, Tensor] = kernels.launch_fork(conv, shortcut, x)
            return forked
    return conv(x), x if shortcut is None else _apply_shortcut(shortcut, x)


def _apply_shortcut(conv: nn.Module, x: Tensor) -> Tensor:
    """Apply a 1 x 1 convolution with a stride. With few channels on a CPU, select the pixels first: the result is the same.

    oneDNN's gradient of such weights with channels last writes out of bounds.
    """
    if isinstance(conv, nn.Conv2d) and x.device.type == "cpu" and conv.in_channels < 16:
        down, right = conv.stride
        return functional.conv2d(x[:, :, ::down, ::right], conv.weight)
    y: Tensor = conv(x)
    return y
