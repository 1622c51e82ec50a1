"""Max-pooling of 2 x 2 inputs, with a ReLU behind it if there is one, by one kernel each way on a GPU.

torch's gradient for channels-last feature maps searches windows that may overlap, and adds to zeros. For a small
network this takes more time than its convolutions. Pooling has no parameters and acts on single examples, so it is the
same for one client and for several.
"""

import torch
from torch import Tensor, nn

from fedheal.core.import_path import import_triton_kernels

KERNELS = "fedheal.models._max_pooling_cuda"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class FusedMaxPool2d(nn.Module):
    """Pooling as `nn.MaxPool2d(2)` does it.

    Attributes:
        relu: Whether it applies ReLU to the result.
        uses_kernels: Whether it may use its kernels.
    """

    def __init__(self, relu: bool = False) -> None:
        super().__init__()
        self.relu, self.uses_kernels = relu, True

    def forward(self, x: Tensor) -> Tensor:
        """Take the largest input of each window."""
        kernels = import_triton_kernels(KERNELS, x.device.type) if self.uses_kernels else None
        if kernels is not None and kernels.supports_pooling(x):
            fused: Tensor = kernels.MaxPooling.apply(x, self.relu)
            return fused
        y = torch.max_pool2d(x, 2)
        return torch.relu(y) if self.relu else y


def replace_pooling(module: nn.Module) -> None:
    """Replace the poolings of 2 x 2 inputs that do not overlap, and a ReLU that follows one in an `nn.Sequential`.

    >>> replace_pooling(layers := nn.Sequential(nn.MaxPool2d(2), nn.ReLU(), nn.MaxPool2d(3)))
    >>> [type(layer).__name__ for layer in layers]
    ['FusedMaxPool2d', 'Identity', 'MaxPool2d']
    """
    for parent in list(module.modules()):
        children = list(parent._modules.items())
        for i, (name, child) in enumerate(children):
            if not _is_plain_pooling(child):
                continue
            next_name, follower = children[i + 1] if i + 1 < len(children) else ("", None)
            has_relu = type(parent) is nn.Sequential and type(follower) is nn.ReLU and not has_hooks(follower)
            parent.set_submodule(name, FusedMaxPool2d(has_relu))
            if has_relu:
                parent.set_submodule(next_name, nn.Identity())


def _is_plain_pooling(module: nn.Module | None) -> bool:
    if type(module) is not nn.MaxPool2d or module.ceil_mode or module.return_indices or has_hooks(module):
        return False
    settings = ((module.kernel_size, 2), (module.stride, 2), (module.padding, 0), (module.dilation, 1))
    return all(found in (number, (number, number)) for found, number in settings)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, which a faster layer in its place would not call."""
    return any(getattr(module, key) for key in HOOKS)
