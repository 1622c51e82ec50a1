"""The Triton kernels of `cohort_loss`: one launch for the clients' losses and the gradients of each by itself.

If terms add to the loss, another one scales the gradients.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedheal.models.client_rows import ClientRows
from fedheal.models.kernel_launches import launch

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

FLOATS = (torch.float32, torch.bfloat16)
MAX_CLASSES = 1024
TILE = 4096  # logits that a program holds
BLOCK = 1024


def supports_losses(logits: Tensor, rows: ClientRows) -> bool:
    """Return whether the kernels compute the losses of these logits."""
    is_plain = logits.ndim == 2 and len(logits) == rows.active * rows.batch_size
    return is_plain and logits.dtype in FLOATS and 0 < logits.shape[1] <= MAX_CLASSES


class ClientLosses(torch.autograd.Function):
    """Compute the mean cross-entropy of each client in float32; add it to the totals, and move the cursor on."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, rows: ClientRows, totals: Tensor, cursor: Tensor, is_whole: bool
    ) -> Tensor:
        classes = logits.shape[1]
        losses = torch.empty(rows.active, dtype=torch.float32, device=logits.device)
        # The factors of the losses in a sum are 1: gradients need no scaling then.
        dtype = logits.dtype if is_whole else torch.float32
        gradients = torch.empty(logits.shape, dtype=dtype, device=logits.device)
        tile_classes = triton.next_power_of_2(classes)
        tile_rows = min(TILE // tile_classes, triton.next_power_of_2(rows.batch_size))
        launch(
            average_cross_entropy, (rows.active,),
            logits.contiguous(), labels, rows.valid, losses, gradients, totals, cursor, rows.batch_size, classes,
            tile_rows=tile_rows, tile_classes=tile_classes,
        )  # fmt: skip
        ctx.dtype, ctx.is_whole = logits.dtype, is_whole
        ctx.save_for_backward(gradients)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (gradients,) = ctx.saved_tensors
        if ctx.is_whole:
            return gradients, None, None, None, None, None
        scaled, length = torch.empty_like(gradients, dtype=ctx.dtype), gradients.numel() // len(factors)
        launch(
            scale_gradients, (triton.cdiv(length, BLOCK), len(factors)),
            gradients, factors, scaled, length, factors.stride(0), block=BLOCK,
        )  # fmt: skip
        return scaled, None, None, None, None, None


@triton.jit(do_not_specialize=["batch_size", "classes"])
def average_cross_entropy(
    logits, labels, valid, losses, gradients, totals, cursor, batch_size, classes, tile_rows: tl.constexpr,
    tile_classes: tl.constexpr,
):  # fmt: skip
    """Write a client's mean loss over the examples that count, and its gradient, which is 0 for the others.

    The loss is added to the client's total, and the cursor moves on.
    """
    client, c = tl.program_id(0).to(tl.int64), tl.arange(0, tile_classes)
    is_class = (c < classes)[None, :]
    number = tl.load(valid + client)
    divisor = tl.maximum(number, 1).to(tl.float32)
    total = tl.zeros((tile_rows,), dtype=tl.float32)
    for start in range(0, batch_size, tile_rows):
        r = start + tl.arange(0, tile_rows)
        row, counts = client * batch_size + r, (r < number) & (r < batch_size)
        at = row[:, None] * classes + c[None, :]
        v = tl.load(logits + at, mask=counts[:, None] & is_class, other=0.0).to(tl.float32)
        v = tl.where(is_class, v, -float("inf"))
        v -= tl.max(v, axis=1)[:, None]
        powers = tl.exp(v)
        sums = tl.sum(powers, axis=1)
        is_label = c[None, :] == tl.load(labels + row, mask=counts, other=0)[:, None]
        of_label = tl.sum(tl.where(is_label, v, 0.0), axis=1)
        total += tl.where(counts, tl.log(sums) - of_label, 0.0)
        gradient = (powers / sums[:, None] - is_label.to(tl.float32)) / divisor
        gradient = tl.where(counts[:, None], gradient, 0.0)
        gradient = gradient.to(gradients.dtype.element_ty)
        tl.store(gradients + at, gradient, mask=(r < batch_size)[:, None] & is_class)
    loss = tl.sum(total, axis=0) / divisor
    tl.store(losses + client, loss)
    tl.store(totals + client, tl.load(totals + client) + loss.to(tl.float64))
    if client == 0:  # no other kernel of a step reads it after the first, which gathers the batch
        tl.store(cursor, tl.load(cursor) + 1)


@triton.jit(do_not_specialize=["length", "factors_apart"])
def scale_gradients(gradients, factors, scaled, length, factors_apart, block: tl.constexpr):
    """Multiply each client's gradient by that of its loss."""
    client = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * block + tl.arange(0, block)
    at, known = client * length + i, i < length
    g = tl.load(gradients + at, mask=known, other=0.0) * tl.load(factors + client * factors_apart)
    tl.store(scaled + at, g.to(scaled.dtype.element_ty), mask=known)
