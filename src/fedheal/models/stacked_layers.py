"""Layers that hold the parameters of several clients and apply each client's to its own part of the batch.

The activations of C clients are one tensor `[C * N, ...]`, client after client. Operations on single examples (ReLU,
pooling, residual sums) need no change. In a copy of the user's module, the layers of this module replace the layers
with parameters. The clients share nothing, so one backward pass over the sum of their losses gives each client's own
gradient. A client's batch may end with padding: `ClientRows.valid` says how many examples count, and batch
normalisation leaves out the rest.

The layers use the kernels of `stacked_kernels` on a GPU. Elsewhere, and for what the kernels do not support, they use the
plain composition of torch's operations, client by client.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedheal.core.import_path import import_triton_kernels
from fedheal.models.client_rows import ClientRows
from fedheal.models.max_pooling import FusedMaxPool2d, has_hooks, replace_pooling

KERNELS = "fedheal.models.stacked_kernels"
NORM_KERNELS = "fedheal.models._stacked_norm_cuda"
LINEAR_KERNELS = "fedheal.models._stacked_linear_cuda"


class DoesNotFitError(Exception):
    """The module or a term cannot be trained with all clients stacked; the message says why."""


class StackedLayer(nn.Module):
    """A layer with parameters of several clients.

    Attributes:
        rows: The clients' values.
        name: The layer's name in the module.
        calls: How often the layer was applied.
        uses_kernels: Whether it may use kernels that overwrite gradients: not if it is applied twice in a step.
    """

    def __init__(self, layer: nn.Module, rows: ClientRows, name: str) -> None:
        super().__init__()
        self.rows, self.name, self.calls, self.uses_kernels = rows, name, 0, True
        self.parameter_names = [key for key, _ in layer.named_parameters(recurse=False)]

    def get(self, name: str) -> Tensor | None:
        """Return the parameter of this name of the active clients, or None if the layer has no such parameter."""
        return self.rows.get_parameter(f"{self.name}.{name}") if name in self.parameter_names else None

    def count_call(self, x: Tensor) -> None:
        """Count a call. Raise `DoesNotFitError` if `x` does not consist of the clients' batches."""
        self.calls += 1
        if x.shape[0] % (self.rows.active * self.rows.batch_size):
            raise DoesNotFitError(f"layer '{self.name}' gets {x.shape[0]} rows, no multiple of the batch size")

    def split(self, x: Tensor) -> Tensor:
        """Return `[clients, examples, ...]`."""
        return x.view(self.rows.active, -1, *x.shape[1:])

    def scale(self, x: Tensor, dim: int) -> Tensor:
        """Return `x * weight + bias` of `[clients, examples, ...]`, whose dimensions from `dim` on are the weight's."""
        for name in ("weight", "bias"):
            parameter = self.get(name)
            if parameter is not None:
                shape = [len(parameter), *[1] * (dim - 1), *parameter.shape[1:]]
                shape += [1] * (x.ndim - len(shape))
                x = x * parameter.view(shape) if name == "weight" else x + parameter.view(shape)
        return x


class StackedConv2d(StackedLayer):
    """A convolution."""

    def __init__(self, layer: nn.Conv2d, rows: ClientRows, name: str) -> None:
        super().__init__(layer, rows, name)
        if layer.padding_mode != "zeros":
            raise DoesNotFitError(f"layer '{name}' pads with '{layer.padding_mode}'")
        self.kernel_size, self.stride, self.padding = layer.kernel_size, layer.stride, layer.padding
        self.settings: tuple[Any, ...] = (layer.stride, layer.padding, layer.dilation, layer.groups)
        self.in_channels, self.out_channels = layer.in_channels, layer.out_channels
        size, stride = layer.kernel_size[0], layer.stride[0]
        is_square = len({*layer.kernel_size}) == len({*layer.stride}) == 1 and size in (1, 3) and stride in (1, 2)
        is_plain = layer.padding in (size // 2, (size // 2, size // 2)) and layer.groups == 1
        self.has_kernel = is_square and is_plain and layer.dilation == (1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply each client's convolution to its own examples."""
        weight, bias = self.get("weight"), self.get("bias")
        assert weight is not None
        kernels = import_triton_kernels(KERNELS, x.device.type) if self.has_kernel and self.uses_kernels else None
        self.count_call(x)
        if kernels is not None:
            y: Tensor = kernels.StackedConvolution.apply(x, weight, self)
            return y if bias is None else (self.split(y) + bias[:, None, :, None, None].to(y.dtype)).flatten(0, 1)
        biases = [None] * len(weight) if bias is None else list(bias.unbind())
        parts = zip(x.chunk(len(weight)), weight.unbind(), biases, strict=True)
        return torch.cat([functional.conv2d(part, w, b, *self.settings) for part, w, b in parts])


class StackedLinear(StackedLayer):
    """A linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply each client's matrix to its own examples."""
        self.count_call(x)
        weight, bias = self.get("weight"), self.get("bias")
        assert weight is not None
        examples = self.split(x)
        flat = examples.flatten(1, -2)
        kernels = import_triton_kernels(LINEAR_KERNELS, x.device.type) if self.uses_kernels else None
        if kernels is not None and kernels.supports_linear(self):
            y: Tensor = kernels.StackedProduct.apply(flat, weight, bias, self)
        elif bias is None:
            y = torch.bmm(flat, weight.transpose(1, 2))
        else:
            y = torch.baddbmm(bias[:, None, :], flat, weight.transpose(1, 2))
        return y.view(*x.shape[:-1], y.shape[-1])


class StackedBatchNorm(StackedLayer):
    """Batch normalisation by the statistics of each client's examples, without padding."""

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm, rows: ClientRows, name: str) -> None:
        super().__init__(layer, rows, name)
        if not (layer.affine and layer.track_running_stats and layer.momentum is not None):
            raise DoesNotFitError(f"layer '{name}' has no weights, no running statistics or no momentum")
        self.eps, self.momentum, self.channels = layer.eps, layer.momentum, layer.num_features

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return self.norm_relu(x, relu=False)

    def norm_relu(self, x: Tensor, shortcut: Tensor | None = None, relu: bool = True) -> Tensor:
        """Return `relu(norm(x) + shortcut)`, see `models.fused_norm`."""
        kernels = import_triton_kernels(NORM_KERNELS, x.device.type) if self.uses_kernels else None
        self.count_call(x)
        if kernels is not None and x.ndim == 4 and kernels.supports_norm(x, shortcut):
            fused: Tensor = kernels.normalise_and_scale(self, x, shortcut, relu)
            return fused
        y = self._normalise(x)
        if shortcut is not None:
            y = y + shortcut
        return functional.relu(y) if relu else y

    def _normalise(self, x: Tensor) -> Tensor:
        examples = self.split(x).to(self.rows.params.dtype)
        dims = [1, *range(3, examples.ndim)]
        shape = [self.rows.active, 1, self.channels, *[1] * (examples.ndim - 3)]
        mean, var = (self.rows.get_buffer(f"{self.name}.running_{key}") for key in ("mean", "var"))
        if self.training:
            counts = self.rows.find_padding(examples.shape[1]).view(*examples.shape[:2], *[1] * (examples.ndim - 2))
            number = (counts.sum(dim=1).flatten() * (examples[0, 0, 0].numel())).clamp(min=1)[:, None]
            batch_mean = examples.where(counts, 0.0).sum(dims) / number
            centred = (examples - batch_mean.view(shape)).where(counts, 0.0)
            batch_var = (centred**2).sum(dims) / number
            self._track(mean, var, batch_mean.detach(), batch_var.detach(), number)
            mean, var = batch_mean, batch_var
        y = self.scale((examples - mean.view(shape)) * torch.rsqrt(var.view(shape) + self.eps), 2)
        return y.flatten(0, 1).to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, batch_mean: Tensor, batch_var: Tensor, number: Tensor) -> None:
        rate = self.momentum * (self.rows.valid[: self.rows.active, None] > 0)
        mean += rate * (batch_mean - mean)
        var += rate * (batch_var * number / (number - 1).clamp(min=1) - var)
        self.rows.get_buffer(f"{self.name}.num_batches_tracked").add_(self.rows.valid[: self.rows.active] > 0)


class StackedGroupNorm(StackedLayer):
    """Group normalisation."""

    def __init__(self, layer: nn.GroupNorm, rows: ClientRows, name: str) -> None:
        super().__init__(layer, rows, name)
        self.groups, self.eps = layer.num_groups, layer.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, then scale by each client's weights."""
        self.count_call(x)
        return self.scale(self.split(functional.group_norm(x, self.groups, eps=self.eps)), 2).flatten(0, 1)


class StackedLayerNorm(StackedLayer):
    """Layer normalisation."""

    def __init__(self, layer: nn.LayerNorm, rows: ClientRows, name: str) -> None:
        super().__init__(layer, rows, name)
        self.shape, self.eps = layer.normalized_shape, layer.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, then scale by each client's weights."""
        self.count_call(x)
        normal = self.split(functional.layer_norm(x, self.shape, eps=self.eps))
        return self.scale(normal, normal.ndim - len(self.shape)).flatten(0, 1)


class StackedEmbedding(StackedLayer):
    """A table of vectors."""

    def __init__(self, layer: nn.Embedding, rows: ClientRows, name: str) -> None:
        super().__init__(layer, rows, name)
        if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
            raise DoesNotFitError(f"layer '{name}' has max_norm, scale_grad_by_freq or sparse")
        self.padding_idx = layer.padding_idx

    def forward(self, x: Tensor) -> Tensor:
        """Look each example up in its own client's table."""
        self.count_call(x)
        weight = self.get("weight")
        assert weight is not None
        parts = zip(self.split(x).unbind(), weight.unbind(), strict=True)
        return torch.cat([functional.embedding(part, table, self.padding_idx) for part, table in parts])


STACKED: dict[type[nn.Module], type[StackedLayer]] = {
    nn.Conv2d: StackedConv2d,
    nn.Linear: StackedLinear,
    nn.BatchNorm1d: StackedBatchNorm,
    nn.BatchNorm2d: StackedBatchNorm,
    nn.GroupNorm: StackedGroupNorm,
    nn.LayerNorm: StackedLayerNorm,
    nn.Embedding: StackedEmbedding,
}


def check_layers(module: nn.Module) -> None:
    """Raise `DoesNotFitError` if the module has a layer with parameters or buffers that cannot be stacked."""
    owners: dict[int, str] = {}
    for name, part in module.named_modules():
        own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        if own and type(part) not in STACKED:
            raise DoesNotFitError(f"layer '{name}' of type {type(part).__name__} has parameters or buffers of its own")
        if own and has_hooks(part):
            raise DoesNotFitError(f"layer '{name}' has hooks")
        for key, tensor in part.named_parameters(recurse=False):
            if id(tensor) in owners:
                raise DoesNotFitError(f"parameter '{name}.{key}' is also '{owners[id(tensor)]}'")
            owners[id(tensor)] = f"{name}.{key}"
            if not tensor.requires_grad or tensor.dtype != torch.float32:
                raise DoesNotFitError(f"parameter '{name}.{key}' is not trained, or not float32")


def stack_module(module: nn.Module, rows: ClientRows) -> nn.Module:
    """Return a copy of a module in which every layer with parameters is replaced by one that uses these rows.

    Pooling is replaced too, by a faster one.

    Raises:
        DoesNotFitError: A layer cannot be replaced; `check_layers` finds more reasons.
    """
    if type(module) in STACKED:  # a module that is a single layer
        raise DoesNotFitError("the module is a single layer")
    stacked = copy.deepcopy(module)
    for name, part in module.named_modules(remove_duplicate=False):
        if type(part) in STACKED:
            stacked.set_submodule(name, STACKED[type(part)](part, rows, name).train(part.training))
    replace_pooling(stacked)
    return stacked


def list_layers(module: nn.Module) -> list[StackedLayer]:
    """Return the stacked layers of a module."""
    return [part for part in module.modules() if isinstance(part, StackedLayer)]


def allow_kernels(module: nn.Module, is_allowed: bool) -> None:
    """Set whether the layers of a stacked module may use kernels."""
    for part in module.modules():
        if isinstance(part, StackedLayer | FusedMaxPool2d):
            part.uses_kernels = is_allowed
