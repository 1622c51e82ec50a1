"""Cast a network's weights to lower precision with one kernel for all of them.

Under autocast every convolution casts its own weight, and its gradient back: dozens of kernels a step, which each take longer
to launch than to run. Within `cast_weights` the weights are cast together, and so are their gradients, to the same bits
(`benchmarks/kernels.py` measures both).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class _Cast(torch.autograd.Function):
    """Cast tensors to another dtype, and their gradients back to their own."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        return _cast(weights, [dtype] * len(weights))

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *_cast(gradients, ctx.dtypes))


def _cast(tensors: tuple[Tensor, ...], dtypes: list[torch.dtype]) -> tuple[Tensor, ...]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    torch._foreach_copy_(copies, list(tensors))
    return tuple(copies)


@contextmanager
def cast_weights(convolutions: list[nn.Conv2d], device: torch.device) -> Iterator[None]:
    """Under autocast, let these convolutions use weights in autocast's dtype for the context."""
    if not convolutions or not (
        torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    ):
        yield
        return
    weights = [conv.weight for conv in convolutions]
    cast: tuple[Tensor, ...] = _Cast.apply(torch.get_autocast_dtype(device.type), *weights)  # type: ignore[no-untyped-call]
    # An entry of an object's own dictionary is found before its parameters, which stay as they are.
    for conv, weight in zip(convolutions, cast, strict=True):
        conv.__dict__["weight"] = weight
    try:
        yield
    finally:
        for conv in convolutions:
            conv.__dict__.pop("weight", None)
