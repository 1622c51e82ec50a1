"""Batch normalisation, the addition of a shortcut and ReLU in one operation.

`norm_relu(norm, x, shortcut)` is `relu(norm(x) + shortcut)`. For stacked clients on a GPU, and in evaluation there, it is a few
fused passes (Triton) instead of about a dozen kernels. Elsewhere it is the plain composition.
"""

from torch import Tensor, nn
from torch.nn import functional

from fedheal.core.import_path import import_triton_kernels
from fedheal.models.stacked_layers import KERNELS, StackedBatchNorm


class FusedBatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation that is one pass in evaluation on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        evaluated = _evaluate(self, x, None, relu=False)
        return super().forward(x) if evaluated is None else evaluated


def norm_relu(norm: nn.Module, x: Tensor, shortcut: Tensor | None = None, relu: bool = True) -> Tensor:
    """Return `relu(norm(x) + shortcut)`, without the shortcut if it is None and without ReLU if `relu` is False."""
    if isinstance(norm, StackedBatchNorm):
        return norm.norm_relu(x, shortcut, relu)
    evaluated = _evaluate(norm, x, shortcut, relu)
    if evaluated is not None:
        return evaluated
    y: Tensor = norm(x)
    if shortcut is not None:
        y = y + shortcut
    return functional.relu(y) if relu else y


def _evaluate(norm: nn.Module, x: Tensor, shortcut: Tensor | None, relu: bool) -> Tensor | None:
    """Return the result of the kernel for evaluation, or None if there is none for this."""
    kernels = import_triton_kernels(KERNELS, x.device.type)
    if kernels is None or not kernels.supports_evaluation(norm, x, shortcut):
        return None
    evaluated: Tensor = kernels.evaluate_norm(norm, x, shortcut, relu)
    return evaluated
