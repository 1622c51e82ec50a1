"""The Triton kernels of `fused`. A feature map is a matrix here: a row a position, a column a channel (channels last).

Each way has three passes: sums over chunks of rows, by enough programs to fill a GPU; their totals, in a fixed order; and rows
into results. Variances come from chunk means and squared deviations (Chan et al., 1979).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

PROGRAMS = 512  # about as many as a GPU runs at once
TALL = 64  # rows of a tile
FEW = 16  # channels whose totals one program takes


class NormRelu(torch.autograd.Function):
    """`relu((x - mean) / deviation * weight + bias + shortcut)`, with the running statistics brought up to date."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shortcut: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        seen: Tensor,
        momentum: float,
        eps: float,
        relu: bool,
    ) -> Tensor:
        rows, channels = x.numel() // x.shape[1], x.shape[1]
        width, most, chunks, each = _tiles(rows, channels)
        parts, kept = torch.empty(2, chunks, channels, device=x.device), torch.empty(2, channels, device=x.device)
        _moments[(chunks, channels // width)](x, parts, rows, each, channels, chunks, tall=TALL, width=width)
        _statistics[(channels // FEW,)](
            parts,
            kept,
            running_mean,
            running_var,
            seen,
            rows,
            each,
            channels,
            chunks,
            momentum,
            eps,
            most=most,
            few=FEW,
        )
        y = torch.empty_like(x)
        _apply[(triton.cdiv(rows, TALL), channels // width)](
            x,
            y if shortcut is None else shortcut,
            y,
            kept,
            weight,
            bias,
            rows,
            channels,
            tall=TALL,
            width=width,
            added=shortcut is not None,
            relu=relu,
        )
        ctx.relu, ctx.added = relu, shortcut is not None
        # What ReLU let pass can be told from the input, unless a shortcut was added.
        ctx.save_for_backward(x, y if relu and ctx.added else x, weight, bias, kept)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weight, bias, kept = ctx.saved_tensors
        dy = gradient.contiguous(memory_format=torch.channels_last)
        rows, channels = x.numel() // x.shape[1], x.shape[1]
        width, most, chunks, each = _tiles(rows, channels)
        parts, totals = torch.empty(2, chunks, channels, device=x.device), torch.empty(2, channels, device=x.device)
        _sums[(chunks, channels // width)](
            dy,
            x,
            y,
            kept,
            weight,
            bias,
            parts,
            rows,
            each,
            channels,
            chunks,
            tall=TALL,
            width=width,
            relu=ctx.relu,
            added=ctx.added,
        )
        _totals[(channels // FEW,)](parts, totals, channels, chunks, most=most, few=FEW)
        dx = torch.empty_like(x)
        passed = (
            torch.empty_like(x) if ctx.added and ctx.relu else dy
        )  # without ReLU the shortcut's gradient is dy itself
        _pull[(triton.cdiv(rows, TALL), channels // width)](
            dy,
            x,
            y,
            kept,
            totals,
            weight,
            bias,
            dx,
            passed,
            rows,
            channels,
            tall=TALL,
            width=width,
            relu=ctx.relu,
            added=ctx.added,
        )
        dbias, dweight = totals
        return dx, passed if ctx.added else None, dweight, dbias, None, None, None, None, None, None


def _tiles(rows: int, channels: int) -> tuple[int, int, int, int]:
    """How many channels a program takes, into how many chunks the rows go at most and here, and how long each chunk is.

    The most depends on the channels alone, so that other batch sizes need no other kernels.
    """
    width = next(width for width in (64, 32, 16) if channels % width == 0)
    most = max(1, 2 ** int(math.log2(PROGRAMS * width / channels)))
    chunks = min(most, max(1, rows // TALL))
    return width, most, chunks, -(-rows // chunks)


@triton.jit(do_not_specialize=["rows", "each", "chunks"])  # type: ignore[untyped-decorator, unused-ignore]
def _moments(x, parts, rows, each, channels, chunks, tall: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """A chunk's mean and sum of squared deviations, by way of differences from its first row."""
    p, c = tl.program_id(0), tl.program_id(1) * width + tl.arange(0, width)
    first, last = tl.minimum(p * each, rows), tl.minimum((p + 1) * each, rows)  # a last chunk may be empty
    origin = tl.load(x + tl.minimum(first, rows - 1).to(tl.int64) * channels + c).to(tl.float32)
    total = tl.zeros((tall, width), dtype=tl.float32)
    square = tl.zeros((tall, width), dtype=tl.float32)
    for start in range(first, last, tall):
        r = start + tl.arange(0, tall)
        inside = (r < last)[:, None]
        v = tl.load(x + r.to(tl.int64)[:, None] * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
        d = tl.where(inside, v - origin[None, :], 0.0)
        total += d
        square += d * d
    number = tl.maximum(last - first, 1).to(tl.float32)
    shift, deviations = tl.sum(total, axis=0), tl.sum(square, axis=0)
    tl.store(parts + p * channels + c, origin + shift / number)
    tl.store(parts + (chunks + p) * channels + c, deviations - shift * shift / number)


@triton.jit(do_not_specialize=["rows", "each", "chunks"])  # type: ignore[untyped-decorator, unused-ignore]
def _statistics(  # type: ignore[no-untyped-def]
    parts,
    kept,
    running_mean,
    running_var,
    seen,
    rows,
    each,
    channels,
    chunks,
    momentum,
    eps,
    most: tl.constexpr,
    few: tl.constexpr,
):
    """Mean and inverse deviation of a channel from its chunks'; the running statistics move along."""
    c, p = tl.program_id(0) * few + tl.arange(0, few), tl.arange(0, most)
    there = (p < chunks)[:, None]
    number = (tl.minimum((p + 1) * each, rows) - tl.minimum(p * each, rows)).to(tl.float32)[:, None]
    means = tl.load(parts + p[:, None] * channels + c[None, :], mask=there, other=0.0)
    squares = tl.load(parts + (chunks + p)[:, None] * channels + c[None, :], mask=there, other=0.0)
    mean = tl.sum(number * means, axis=0) / rows
    gap = means - mean[None, :]
    deviations = tl.sum(squares + number * gap * gap, axis=0)
    tl.store(kept + c, mean)
    tl.store(kept + channels + c, 1.0 / tl.sqrt(deviations / rows + eps))
    old = tl.load(running_mean + c)
    tl.store(running_mean + c, old + momentum * (mean - old))
    old = tl.load(running_var + c)
    tl.store(running_var + c, old + momentum * (deviations / (rows - 1) - old))
    if tl.program_id(0) == 0:
        tl.store(seen, tl.load(seen) + 1)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator, unused-ignore]
def _apply(  # type: ignore[no-untyped-def]
    x,
    shortcut,
    y,
    kept,
    weight,
    bias,
    rows,
    channels,
    tall: tl.constexpr,
    width: tl.constexpr,
    added: tl.constexpr,
    relu: tl.constexpr,
):
    c = tl.program_id(1) * width + tl.arange(0, width)
    scale = tl.load(kept + channels + c) * tl.load(weight + c)
    offset = tl.load(bias + c) - tl.load(kept + c) * scale
    r = tl.program_id(0) * tall + tl.arange(0, tall)
    inside = (r < rows)[:, None]
    at = r.to(tl.int64)[:, None] * channels + c[None, :]
    made = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + offset[None, :]
    if added:
        made += tl.load(shortcut + at, mask=inside, other=0.0).to(tl.float32)
    if relu:
        made = tl.maximum(made, 0.0)
    tl.store(y + at, made.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "each", "chunks"])  # type: ignore[untyped-decorator, unused-ignore]
def _sums(  # type: ignore[no-untyped-def]
    dy,
    x,
    y,
    kept,
    weight,
    bias,
    parts,
    rows,
    each,
    channels,
    chunks,
    tall: tl.constexpr,
    width: tl.constexpr,
    relu: tl.constexpr,
    added: tl.constexpr,
):
    """A chunk's sums of the gradient and of its product with the normalised input."""
    p, c = tl.program_id(0), tl.program_id(1) * width + tl.arange(0, width)
    first, last = tl.minimum(p * each, rows), tl.minimum((p + 1) * each, rows)
    mean, inverse = tl.load(kept + c), tl.load(kept + channels + c)
    scale = inverse * tl.load(weight + c)
    offset = tl.load(bias + c) - mean * scale
    plain = tl.zeros((tall, width), dtype=tl.float32)
    product = tl.zeros((tall, width), dtype=tl.float32)
    for start in range(first, last, tall):
        r = start + tl.arange(0, tall)
        inside = (r < last)[:, None]
        at = r.to(tl.int64)[:, None] * channels + c[None, :]
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if relu and added:
            g = tl.where(tl.load(y + at, mask=inside, other=0.0).to(tl.float32) > 0, g, 0.0)
        elif relu:
            g = tl.where(v * scale[None, :] + offset[None, :] > 0, g, 0.0)
        plain += g
        product += g * (v - mean[None, :])
    tl.store(parts + p * channels + c, tl.sum(plain, axis=0))
    tl.store(parts + (chunks + p) * channels + c, tl.sum(product, axis=0) * inverse)


@triton.jit(do_not_specialize=["chunks"])  # type: ignore[untyped-decorator, unused-ignore]
def _totals(parts, totals, channels, chunks, most: tl.constexpr, few: tl.constexpr):  # type: ignore[no-untyped-def]
    c, p = tl.program_id(0) * few + tl.arange(0, few), tl.arange(0, most)
    at, there = p[:, None] * channels + c[None, :], (p < chunks)[:, None]
    tl.store(totals + c, tl.sum(tl.load(parts + at, mask=there, other=0.0), axis=0))
    tl.store(totals + channels + c, tl.sum(tl.load(parts + chunks * channels + at, mask=there, other=0.0), axis=0))


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator, unused-ignore]
def _pull(  # type: ignore[no-untyped-def]
    dy,
    x,
    y,
    kept,
    totals,
    weight,
    bias,
    dx,
    passed,
    rows,
    channels,
    tall: tl.constexpr,
    width: tl.constexpr,
    relu: tl.constexpr,
    added: tl.constexpr,
):
    c = tl.program_id(1) * width + tl.arange(0, width)
    mean, inverse = tl.load(kept + c), tl.load(kept + channels + c)
    scale = inverse * tl.load(weight + c)
    plain, product = tl.load(totals + c) / rows, tl.load(totals + channels + c) / rows
    r = tl.program_id(0) * tall + tl.arange(0, tall)
    inside = (r < rows)[:, None]
    at = r.to(tl.int64)[:, None] * channels + c[None, :]
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if relu and added:
        g = tl.where(tl.load(y + at, mask=inside, other=0.0).to(tl.float32) > 0, g, 0.0)
        tl.store(passed + at, g.to(passed.dtype.element_ty), mask=inside)
    elif relu:
        offset = tl.load(bias + c) - mean * scale
        g = tl.where(v * scale[None, :] + offset[None, :] > 0, g, 0.0)
    normal = (v - mean[None, :]) * inverse[None, :]
    made = scale[None, :] * (g - plain[None, :] - normal * product[None, :])
    tl.store(dx + at, made.to(dx.dtype.element_ty), mask=inside)
