"""Batch normalisation, the addition of a shortcut and ReLU in one operation.

`norm_relu(norm, x, shortcut)` is `relu(norm(x) + shortcut)`. In training on a GPU it is three fused passes forward and three
backward (Triton) instead of about a dozen kernels, which take much of a small network's time (`benchmarks/kernels.py`
measures both), and in evaluation one. Elsewhere it is the plain composition. Sums over a channel have a fixed order, so results
repeat bit for bit.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedheal.core.import_path import import_triton_kernels
from fedheal.models.stacked_layers import KERNELS as STACKED_KERNELS
from fedheal.models.stacked_layers import StackedBatchNorm

KERNELS = "fedheal.models._fused_norm_cuda"


def norm_relu(norm: nn.Module, x: Tensor, shortcut: Tensor | None = None, relu: bool = True) -> Tensor:
    """Return `relu(norm(x) + shortcut)`, without the shortcut if it is None and without ReLU if `relu` is False."""
    if isinstance(norm, StackedBatchNorm):
        return norm.norm_relu(x, shortcut, relu)
    stacked_kernels = import_triton_kernels(STACKED_KERNELS, x.device.type)
    if stacked_kernels is not None and stacked_kernels.supports_evaluation(norm, x, shortcut):
        evaluated: Tensor = stacked_kernels.evaluate_norm(norm, x, shortcut, relu)
        return evaluated
    kernels = import_triton_kernels(KERNELS, x.device.type)
    if kernels is not None and isinstance(norm, nn.BatchNorm2d) and _is_supported(norm, x, shortcut):
        if shortcut is not None:
            shortcut = shortcut.contiguous(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
        running = norm.running_mean, norm.running_var, norm.num_batches_tracked, norm.momentum
        fused: Tensor = kernels.NormRelu.apply(x, shortcut, norm.weight, norm.bias, *running, norm.eps, relu)
        return fused
    y: Tensor = norm(x)
    if shortcut is not None:
        y = y + shortcut
    return functional.relu(y) if relu else y


def _is_supported(norm: nn.BatchNorm2d, x: Tensor, shortcut: Tensor | None) -> bool:
    """Return whether the fused kernels support this layer and these tensors."""
    is_plain = norm.training and norm.affine and norm.track_running_stats and norm.momentum is not None
    is_same = shortcut is None or (shortcut.shape == x.shape and shortcut.dtype == x.dtype)
    is_float = x.dtype in (torch.float32, torch.bfloat16, torch.float16) and norm.weight.dtype == torch.float32
    return is_plain and is_same and is_float and x.numel() > x.shape[1] > 0 and x.shape[1] % 16 == 0
