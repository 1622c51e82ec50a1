"""Additions to the gradients of the parameters in training, shared by several terms."""

from __future__ import annotations

import torch

from fedheal.local.term import Context


def add_proximal_gradient(ctx: Context, anchor: list[torch.Tensor], strength: float) -> None:
    """Add `strength * (w - anchor)` to the gradients."""
    rows = [(p, p.grad, a) for p, a in zip(ctx.params, anchor, strict=True) if p.grad is not None]
    if rows:
        params, grads, anchors = (list(column) for column in zip(*rows, strict=True))
        with torch.no_grad():
            torch._foreach_add_(grads, torch._foreach_sub(params, anchors), alpha=strength)


def add_to_gradients(ctx: Context, tensors: list[torch.Tensor], strength: float = 1.0) -> None:
    """Add `strength * tensors` to the gradients."""
    rows = [(p.grad, tensor) for p, tensor in zip(ctx.params, tensors, strict=True) if p.grad is not None]
    if rows:
        grads, addends = (list(column) for column in zip(*rows, strict=True))
        torch._foreach_add_(grads, addends, alpha=strength)
