"""Batch normalisation, the addition of a shortcut and ReLU in one operation.

`norm_relu(norm, x, shortcut)` is `relu(norm(x) + shortcut)`. For stacked clients on a GPU, and in evaluation there, it is a few
fused passes (Triton) instead of about a dozen kernels. Elsewhere it is the plain composition.
"""

from torch import Tensor, nn
from torch.nn import functional

from fedheal.core.import_path import import_triton_kernels
from fedheal.models.stacked_layers import NORM_KERNELS, StackedBatchNorm


def norm_relu(norm: nn.Module, x: Tensor, shortcut: Tensor | None = None, relu: bool = True) -> Tensor:
    """Return `relu(norm(x) + shortcut)`, without the shortcut if it is None and without ReLU if `relu` is False."""
    if isinstance(norm, StackedBatchNorm):
        return norm.norm_relu(x, shortcut, relu)
    kernels = import_triton_kernels(NORM_KERNELS, x.device.type)
    if kernels is not None and kernels.supports_evaluation(norm, x, shortcut):
        evaluated: Tensor = kernels.evaluate_norm(norm, x, shortcut, relu)
        return evaluated
    y: Tensor = norm(x)
    if shortcut is not None:
        y = y + shortcut
    return functional.relu(y) if relu else y
