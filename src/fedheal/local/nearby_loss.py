"""What FedSAM, FedISM and FedDG share: the loss of a batch at parameters near those in training."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from fedheal.local.term import Batch, Context

TINY = 1e-12  # added to a norm: a gradient of zero has no direction


def compute_loss_at(ctx: Context, params: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of the module with these parameters, and its own where none is named.

    Running statistics do not move: they belong to the parameters in training, and to the images as they are.
    """
    buffers = {name: buffer.clone() for name, buffer in ctx.module.named_buffers()}
    logits: Tensor = functional_call(ctx.module, {**params, **buffers}, (x,))
    return functional.cross_entropy(logits.to(x.dtype), y)


def get_trained(ctx: Context) -> dict[str, Tensor]:
    """Return the parameters that are trained by name; tied ones have one name."""
    return {name: param for name, param in ctx.module.named_parameters() if param.requires_grad}


def compute_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the norm of all tensors together, in float32 or better."""
    norms = [torch.linalg.vector_norm(tensor) for tensor in tensors]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([widen(norm) for norm in norms]))
    return norm


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 if its dtype is smaller."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def keep_batch(batch: Batch, ctx: Context) -> None:
    """Keep a batch, and whether its forward pass was in lower precision, for `compute_climbed_gradients`."""
    kind = batch.x.device.type
    ctx.scratch["batch"] = batch, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


@torch.enable_grad()
def compute_climbed_gradients(ctx: Context, rho: float) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients `g` that the parameters have, and those of the same batch's cross-entropy at `w + rho g / |g|`."""
    batch, is_lower, dtype = ctx.scratch.pop("batch")
    params = {name: param for name, param in get_trained(ctx).items() if param.grad is not None}
    gradients = [param.grad for param in params.values() if param.grad is not None]
    step = rho / (compute_norm(gradients) + TINY)
    climbed = {
        name: (param.detach() + (step * gradient).to(param.dtype)).requires_grad_()
        for (name, param), gradient in zip(params.items(), gradients, strict=True)
    }
    with torch.autocast(batch.x.device.type, dtype, enabled=is_lower):
        loss = compute_loss_at(ctx, climbed, batch.x, batch.y)
    return gradients, list(torch.autograd.grad(loss, list(climbed.values()), materialize_grads=True))
