"""Max-pooling of 2 x 2 inputs by one kernel each way on a GPU.

torch's gradient for channels-last feature maps searches windows that may overlap and adds to zeros, which takes a small network
more time than its convolutions. Pooling has no parameters and acts on single examples, so it is the same for one client and for
several.
"""

import torch
from torch import Tensor, nn

from fedheal.core.import_path import import_triton_kernels

KERNELS = "fedheal.models._max_pooling_cuda"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class FusedMaxPool2d(nn.Module):
    """Pooling as `nn.MaxPool2d(2)` does it.

    Attributes:
        uses_kernels: Whether it may use its kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uses_kernels = True

    def forward(self, x: Tensor) -> Tensor:
        """Take the largest input of each window."""
        kernels = import_triton_kernels(KERNELS, x.device.type) if self.uses_kernels else None
        if kernels is not None and kernels.supports_pooling(x):
            pooled: Tensor = kernels.MaxPooling.apply(x)
            return pooled
        return torch.max_pool2d(x, 2)


def can_replace_pooling(module: nn.Module) -> bool:
    """Return whether a module is a pooling that `FusedMaxPool2d` replaces: of 2 x 2 inputs that do not overlap.

    >>> can_replace_pooling(nn.MaxPool2d(2)), can_replace_pooling(nn.MaxPool2d(3, stride=2, padding=1))
    (True, False)
    """
    if type(module) is not nn.MaxPool2d or module.ceil_mode or module.return_indices:
        return False
    has_hooks = any(getattr(module, key) for key in HOOKS)
    settings = ((module.kernel_size, 2), (module.stride, 2), (module.padding, 0), (module.dilation, 1))
    return not has_hooks and all(found in (number, (number, number)) for found, number in settings)
