"""Batch normalisation, the addition of a shortcut and ReLU in one go.

`norm_relu(norm, x, shortcut)` is `relu(norm(x) + shortcut)`. In training on a GPU it is three fused passes forward and
three backward (Triton) instead of about a dozen kernels, which small networks spend much of their time in; everywhere else, and
in evaluation, it is the plain composition, its obvious twin. Sums over a channel have a fixed order: the same bits each time.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional


def norm_relu(norm: nn.Module, x: Tensor, shortcut: Tensor | None = None, relu: bool = True) -> Tensor:
    """`relu(norm(x) + shortcut)`; without a shortcut or without ReLU where so asked."""
    kernels = _kernels(x.device.type)
    if kernels is not None and isinstance(norm, nn.BatchNorm2d) and _fits(norm, x, shortcut):
        fused: Tensor = kernels.NormRelu.apply(
            x.contiguous(memory_format=torch.channels_last),
            shortcut if shortcut is None else shortcut.contiguous(memory_format=torch.channels_last),
            norm.weight,
            norm.bias,
            norm.running_mean,
            norm.running_var,
            norm.num_batches_tracked,
            norm.momentum,
            norm.eps,
            relu,
        )
        return fused
    made: Tensor = norm(x)
    if shortcut is not None:
        made = made + shortcut
    return functional.relu(made) if relu else made


def _fits(norm: nn.BatchNorm2d, x: Tensor, shortcut: Tensor | None) -> bool:
    usual = norm.training and norm.affine and norm.track_running_stats and norm.momentum is not None
    same = shortcut is None or (shortcut.shape == x.shape and shortcut.dtype == x.dtype)
    known = x.dtype in (torch.float32, torch.bfloat16, torch.float16) and norm.weight.dtype == torch.float32
    return usual and same and known and x.numel() > x.shape[1] > 0 and x.shape[1] % 16 == 0


@cache
def _kernels(where: str) -> ModuleType | None:
    """Triton comes with torch where it can be used, and is looked for only there."""
    try:
        return importlib.import_module("fedheal.models._fused_cuda") if where == "cuda" else None
    except ImportError:
        return None
