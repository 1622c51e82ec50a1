"""The stacked linear layer in lower precision, with a Triton kernel for the gradients of weight and bias.

Autocast would convert every client's weights in each step, and their gradients back; here both are used as the rows have them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedheal.models.kernel_launches import launch
from fedheal.models.stacked_layers import StackedLinear

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

MAX_OUTPUTS = 128  # cuBLAS is faster for larger products
TILE = 64


def supports_linear(layer: StackedLinear) -> bool:
    """Return whether the layer has weights in the precision of autocast and few outputs, as the head of a network has."""
    low = layer.rows.low
    is_low = low is not None and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == low.dtype
    return is_low and layer.rows.places[f"{layer.name}.weight"].shape[0] <= MAX_OUTPUTS


class StackedProduct(torch.autograd.Function):
    """Apply each client's matrix to its examples `[clients, examples, inputs]`; write the gradients to the client's row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: StackedLinear) -> Tensor:
        assert layer.rows.low is not None
        low = layer.rows.low[: layer.rows.active]
        matrices = layer.rows.places[f"{layer.name}.weight"].view(low)
        ctx.dtype, ctx.layer, ctx.has_bias = x.dtype, layer, bias is not None
        x = x.to(low.dtype).contiguous()
        ctx.save_for_backward(x, matrices)
        if bias is None:
            return torch.bmm(x, matrices.transpose(1, 2))
        return torch.baddbmm(layer.rows.places[f"{layer.name}.bias"].view(low)[:, None, :], x, matrices.transpose(1, 2))

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, matrices = ctx.saved_tensors
        dy, gradients, places = gradient.contiguous(), ctx.layer.rows.gradients, ctx.layer.rows.places
        clients, rows, outputs = dy.shape
        inputs = x.shape[2]
        dweight, dbias = (
            gradients[:, places[f"{ctx.layer.name}.{key}"].row_start :]
            for key in ("weight", "bias" if ctx.has_bias else "weight")
        )
        tile_outputs = min(TILE, max(16, triton.next_power_of_2(outputs)))
        launch(
            linear_gradients, (triton.cdiv(inputs, TILE), triton.cdiv(outputs, tile_outputs), clients),
            x, dy, dweight, dbias, rows, inputs, outputs, gradients.shape[1],
            has_bias=ctx.has_bias, tile_rows=TILE, tile_outputs=tile_outputs, tile_inputs=TILE,
        )  # fmt: skip
        return torch.bmm(dy, matrices).to(ctx.dtype) if ctx.needs_input_grad[0] else None, None, None, None


@triton.jit(do_not_specialize=["rows"])
def linear_gradients(
    x, dy, dweight, dbias, rows, inputs, outputs, row_length, has_bias: tl.constexpr, tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr, tile_inputs: tl.constexpr,
):  # fmt: skip
    """Compute a part of the weights' gradient `[outputs, inputs]`; the programs with the first inputs compute the bias's."""
    client = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * tile_inputs + tl.arange(0, tile_inputs)
    o = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    x += client * rows * inputs
    dy += client * rows * outputs
    total = tl.zeros((tile_outputs, tile_inputs), dtype=tl.float32)
    plain = tl.zeros((tile_outputs,), dtype=tl.float32)
    for start in range(0, rows, tile_rows):
        m = start + tl.arange(0, tile_rows)
        is_row = (m < rows)[:, None]
        a = tl.load(dy + m[:, None] * outputs + o[None, :], mask=is_row & (o < outputs)[None, :], other=0.0)
        b = tl.load(x + m[:, None] * inputs + i[None, :], mask=is_row & (i < inputs)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total)
        plain += tl.sum(a.to(tl.float32), axis=0)
    at = client * row_length + o[:, None] * inputs + i[None, :]
    tl.store(dweight + at, total, mask=(o < outputs)[:, None] & (i < inputs)[None, :])
    if has_bias and tl.program_id(0) == 0:
        tl.store(dbias + client * row_length + o, plain, mask=o < outputs)
