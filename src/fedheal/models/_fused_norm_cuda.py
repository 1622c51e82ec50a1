"""The Triton kernels of `fused_norm`. A feature map is a matrix of positions by channels (channels last).

Forward and backward have three passes each: sums over chunks of rows, by enough programs to fill a GPU; their totals, in a
fixed order; and the result for every row. Variances come from chunk means and squared deviations (Chan et al., 1979).
"""

import math
from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

PROGRAMS = 512  # about as many as a GPU runs at once
TILE_ROWS = 64
TOTAL_CHANNELS = 16  # channels whose totals one program computes


class NormRelu(torch.autograd.Function):
    """Compute `relu((x - mean) / deviation * weight + bias + shortcut)` and update the running statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shortcut: Tensor | None, weight: Tensor, bias: Tensor, running_mean: Tensor,
        running_var: Tensor, batches_tracked: Tensor, momentum: float, eps: float, relu: bool,
    ) -> Tensor:  # fmt: skip
        rows, channels = x.numel() // x.shape[1], x.shape[1]
        width, max_chunks, chunks, chunk_rows = _choose_tiles(rows, channels)
        partials, statistics = _allocate_sums(x, chunks)
        sizes, running = (rows, chunk_rows, channels, chunks), (running_mean, running_var, batches_tracked)
        _moments[(chunks, channels // width)](x, partials, *sizes, tile_rows=TILE_ROWS, width=width)
        _statistics[(channels // TOTAL_CHANNELS,)](
            partials, statistics, *running, *sizes, momentum, eps, max_chunks=max_chunks, total_channels=TOTAL_CHANNELS
        )
        y = torch.empty_like(x)
        ctx.relu, ctx.has_shortcut = relu, shortcut is not None
        tensors = (x, y if shortcut is None else shortcut, y, statistics, weight, bias)
        flags = {"tile_rows": TILE_ROWS, "width": width, "has_shortcut": ctx.has_shortcut, "relu": relu}
        _apply[(triton.cdiv(rows, TILE_ROWS), channels // width)](*tensors, rows, channels, **flags)
        # Where ReLU was active follows from the input, unless a shortcut was added.
        ctx.save_for_backward(x, y if relu and ctx.has_shortcut else x, weight, bias, statistics)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weight, bias, statistics = ctx.saved_tensors
        dy = gradient.contiguous(memory_format=torch.channels_last)
        rows, channels = x.numel() // x.shape[1], x.shape[1]
        width, max_chunks, chunks, chunk_rows = _choose_tiles(rows, channels)
        partials, totals = _allocate_sums(x, chunks)
        saved = (dy, x, y, statistics)
        flags = {"tile_rows": TILE_ROWS, "width": width, "relu": ctx.relu, "has_shortcut": ctx.has_shortcut}
        _gradient_sums[(chunks, channels // width)](
            *saved, weight, bias, partials, rows, chunk_rows, channels, chunks, **flags
        )
        _reduce_sums[(channels // TOTAL_CHANNELS,)](
            partials, totals, channels, chunks, max_chunks=max_chunks, total_channels=TOTAL_CHANNELS
        )
        dx = torch.empty_like(x)
        # Without ReLU the shortcut's gradient is dy itself.
        shortcut_gradient = torch.empty_like(x) if ctx.has_shortcut and ctx.relu else dy
        _input_gradient[(triton.cdiv(rows, TILE_ROWS), channels // width)](
            *saved, totals, weight, bias, dx, shortcut_gradient, rows, channels, **flags
        )
        dbias, dweight = totals
        return dx, shortcut_gradient if ctx.has_shortcut else None, dweight, dbias, None, None, None, None, None, None


def _allocate_sums(x: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Return memory for two sums per channel: of each chunk, and in total."""
    return torch.empty(2, chunks, x.shape[1], device=x.device), torch.empty(2, x.shape[1], device=x.device)


def _choose_tiles(rows: int, channels: int) -> tuple[int, int, int, int]:
    """Return a program's channels, the largest number of chunks of rows, the number of chunks, and the rows of a chunk.

    The largest number of chunks depends on the channels alone, so other batch sizes reuse the compiled kernels.
    """
    width = next(width for width in (64, 32, 16) if channels % width == 0)
    max_chunks = max(1, 2 ** int(math.log2(PROGRAMS * width / channels)))
    chunks = min(max_chunks, max(1, rows // TILE_ROWS))
    return width, max_chunks, chunks, -(-rows // chunks)


@triton.jit(do_not_specialize=["rows", "chunk_rows", "chunks"])  # type: ignore[untyped-decorator, unused-ignore]
def _moments(x, partials, rows, chunk_rows, channels, chunks, tile_rows: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute a chunk's mean and sum of squared deviations from differences to its first row."""
    p, c = tl.program_id(0), tl.program_id(1) * width + tl.arange(0, width)
    first, last = tl.minimum(p * chunk_rows, rows), tl.minimum((p + 1) * chunk_rows, rows)  # a last chunk may be empty
    origin = tl.load(x + tl.minimum(first, rows - 1).to(tl.int64) * channels + c).to(tl.float32)
    total = tl.zeros((tile_rows, width), dtype=tl.float32)
    square = tl.zeros((tile_rows, width), dtype=tl.float32)
    for start in range(first, last, tile_rows):
        r = start + tl.arange(0, tile_rows)
        inside = (r < last)[:, None]
        v = tl.load(x + r.to(tl.int64)[:, None] * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
        d = tl.where(inside, v - origin[None, :], 0.0)
        total += d
        square += d * d
    number = tl.maximum(last - first, 1).to(tl.float32)
    shift, deviations = tl.sum(total, axis=0), tl.sum(square, axis=0)
    tl.store(partials + p * channels + c, origin + shift / number)
    tl.store(partials + (chunks + p) * channels + c, deviations - shift * shift / number)


@triton.jit(do_not_specialize=["rows", "chunk_rows", "chunks"])  # type: ignore[untyped-decorator, unused-ignore]
def _statistics(  # type: ignore[no-untyped-def]
    partials, statistics, running_mean, running_var, batches_tracked, rows, chunk_rows, channels, chunks, momentum,
    eps,
    max_chunks: tl.constexpr, total_channels: tl.constexpr,
):  # fmt: skip
    """Compute a channel's mean and inverse deviation from its chunks', and update the running statistics."""
    c, p = tl.program_id(0) * total_channels + tl.arange(0, total_channels), tl.arange(0, max_chunks)
    is_chunk = (p < chunks)[:, None]
    number = (tl.minimum((p + 1) * chunk_rows, rows) - tl.minimum(p * chunk_rows, rows)).to(tl.float32)[:, None]
    means = tl.load(partials + p[:, None] * channels + c[None, :], mask=is_chunk, other=0.0)
    squares = tl.load(partials + (chunks + p)[:, None] * channels + c[None, :], mask=is_chunk, other=0.0)
    mean = tl.sum(number * means, axis=0) / rows
    shift_of_mean = means - mean[None, :]
    deviations = tl.sum(squares + number * shift_of_mean * shift_of_mean, axis=0)
    tl.store(statistics + c, mean)
    tl.store(statistics + channels + c, 1.0 / tl.sqrt(deviations / rows + eps))
    old = tl.load(running_mean + c)
    tl.store(running_mean + c, old + momentum * (mean - old))
    old = tl.load(running_var + c)
    tl.store(running_var + c, old + momentum * (deviations / (rows - 1) - old))
    if tl.program_id(0) == 0:
        tl.store(batches_tracked, tl.load(batches_tracked) + 1)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator, unused-ignore]
def _apply(  # type: ignore[no-untyped-def]
    x, shortcut, y, statistics, weight, bias, rows, channels,
    tile_rows: tl.constexpr, width: tl.constexpr, has_shortcut: tl.constexpr, relu: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1) * width + tl.arange(0, width)
    scale = tl.load(statistics + channels + c) * tl.load(weight + c)
    offset = tl.load(bias + c) - tl.load(statistics + c) * scale
    r = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    inside = (r < rows)[:, None]
    at = r.to(tl.int64)[:, None] * channels + c[None, :]
    result = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + offset[None, :]
    if has_shortcut:
        result += tl.load(shortcut + at, mask=inside, other=0.0).to(tl.float32)
    if relu:
        result = tl.maximum(result, 0.0)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "chunk_rows", "chunks"])  # type: ignore[untyped-decorator, unused-ignore]
def _gradient_sums(  # type: ignore[no-untyped-def]
    dy, x, y, statistics, weight, bias, partials, rows, chunk_rows, channels, chunks,
    tile_rows: tl.constexpr, width: tl.constexpr, relu: tl.constexpr, has_shortcut: tl.constexpr,
):  # fmt: skip
    """Sum a chunk's gradient, and its product with the normalised input."""
    p, c = tl.program_id(0), tl.program_id(1) * width + tl.arange(0, width)
    first, last = tl.minimum(p * chunk_rows, rows), tl.minimum((p + 1) * chunk_rows, rows)
    mean, inverse = tl.load(statistics + c), tl.load(statistics + channels + c)
    scale = inverse * tl.load(weight + c)
    offset = tl.load(bias + c) - mean * scale
    plain = tl.zeros((tile_rows, width), dtype=tl.float32)
    product = tl.zeros((tile_rows, width), dtype=tl.float32)
    for start in range(first, last, tile_rows):
        r = start + tl.arange(0, tile_rows)
        inside = (r < last)[:, None]
        at = r.to(tl.int64)[:, None] * channels + c[None, :]
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if relu and has_shortcut:
            g = tl.where(tl.load(y + at, mask=inside, other=0.0).to(tl.float32) > 0, g, 0.0)
        elif relu:
            g = tl.where(v * scale[None, :] + offset[None, :] > 0, g, 0.0)
        plain += g
        product += g * (v - mean[None, :])
    tl.store(partials + p * channels + c, tl.sum(plain, axis=0))
    tl.store(partials + (chunks + p) * channels + c, tl.sum(product, axis=0) * inverse)


@triton.jit(do_not_specialize=["chunks"])  # type: ignore[untyped-decorator, unused-ignore]
def _reduce_sums(partials, totals, channels, chunks, max_chunks: tl.constexpr, total_channels: tl.constexpr):  # type: ignore[no-untyped-def]
    c, p = tl.program_id(0) * total_channels + tl.arange(0, total_channels), tl.arange(0, max_chunks)
    at, is_chunk = p[:, None] * channels + c[None, :], (p < chunks)[:, None]
    tl.store(totals + c, tl.sum(tl.load(partials + at, mask=is_chunk, other=0.0), axis=0))
    tl.store(
        totals + channels + c, tl.sum(tl.load(partials + chunks * channels + at, mask=is_chunk, other=0.0), axis=0)
    )


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator, unused-ignore]
def _input_gradient(  # type: ignore[no-untyped-def]
    dy, x, y, statistics, totals, weight, bias, dx, shortcut_gradient, rows, channels,
    tile_rows: tl.constexpr, width: tl.constexpr, relu: tl.constexpr, has_shortcut: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1) * width + tl.arange(0, width)
    mean, inverse = tl.load(statistics + c), tl.load(statistics + channels + c)
    scale = inverse * tl.load(weight + c)
    plain, product = tl.load(totals + c) / rows, tl.load(totals + channels + c) / rows
    r = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    inside = (r < rows)[:, None]
    at = r.to(tl.int64)[:, None] * channels + c[None, :]
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if relu and has_shortcut:
        g = tl.where(tl.load(y + at, mask=inside, other=0.0).to(tl.float32) > 0, g, 0.0)
        tl.store(shortcut_gradient + at, g.to(shortcut_gradient.dtype.element_ty), mask=inside)
    elif relu:
        offset = tl.load(bias + c) - mean * scale
        g = tl.where(v * scale[None, :] + offset[None, :] > 0, g, 0.0)
    normal = (v - mean[None, :]) * inverse[None, :]
    result = scale[None, :] * (g - plain[None, :] - normal * product[None, :])
    tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)
