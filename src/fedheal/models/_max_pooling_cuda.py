"""The Triton kernels of `max_pooling`, for feature maps `[images, height, width, channels]`.

Windows do not overlap, so the gradient of every input is known from one window: it is written once, without zeros before.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedheal.models.kernel_launches import launch

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

FLOATS = (torch.float32, torch.bfloat16)
TILE = 1024  # outputs of a program
TILE_CHANNELS = 64  # at most


def supports_pooling(x: Tensor) -> bool:
    """Return whether the kernels pool this tensor."""
    return x.ndim == 4 and x.dtype in FLOATS and x.numel() > 0 and min(x.shape[2:]) >= 2


class MaxPooling(torch.autograd.Function):
    """Take the largest of each window of 2 x 2 inputs, or 0 if ReLU makes it that, and note which it was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, relu: bool) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        number, channels, height, width = ctx.shape = x.shape
        shape = (number, channels, height // 2, width // 2)
        y, places = (
            torch.empty(shape, dtype=dtype, device=x.device, memory_format=torch.channels_last)
            for dtype in (x.dtype, torch.uint8)
        )
        windows = number * (height // 2) * (width // 2)
        _launch_over_windows(pool_windows, windows, ctx.shape, x, y, places, relu=relu)
        ctx.save_for_backward(places)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        dy = gradient.contiguous(memory_format=torch.channels_last)
        dx = torch.empty(ctx.shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
        number, _, height, width = ctx.shape
        windows = number * triton.cdiv(height, 2) * triton.cdiv(width, 2)
        _launch_over_windows(spread_gradient, windows, ctx.shape, dy, places, dx)
        return dx, None


def _launch_over_windows(kernel: Any, windows: int, shape: torch.Size, *tensors: Tensor, **flags: bool) -> None:
    """Launch a kernel with one program for every so many windows and channels of feature maps of this shape."""
    _, channels, height, width = shape
    tile_channels = min(TILE_CHANNELS, triton.next_power_of_2(channels))
    tile_windows = TILE // tile_channels
    launch(
        kernel, (triton.cdiv(windows, tile_windows), triton.cdiv(channels, tile_channels)), *tensors, windows,
        height=height, width=width, channels=channels, tile_windows=tile_windows, tile_channels=tile_channels,
        **flags,
    )  # fmt: skip


@triton.jit(do_not_specialize=["windows"])
def pool_windows(
    x, y, places, windows, height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
    tile_windows: tl.constexpr, tile_channels: tl.constexpr, relu: tl.constexpr,
):  # fmt: skip
    """Write the largest of four inputs and its place in the window, 0 to 3: the first of equal ones, as torch does.

    With `relu` an output that is not positive is 0 and has place 4, so that no input gets its gradient. Sizes are
    constants here, so that the compiler knows which inputs are next to each other.
    """
    m = tl.program_id(0) * tile_windows + tl.arange(0, tile_windows)
    c = tl.program_id(1) * tile_channels + tl.arange(0, tile_channels)
    known = (m < windows)[:, None] & (c < channels)[None, :]
    image, window = m // (height // 2 * (width // 2)), m % (height // 2 * (width // 2))
    corner = (image * height + window // (width // 2) * 2) * width + window % (width // 2) * 2
    at = corner.to(tl.int64)[:, None] * channels + c[None, :]
    largest = tl.load(x + at, mask=known, other=0.0).to(tl.float32)
    place = tl.zeros((tile_windows, tile_channels), dtype=tl.int32)
    for k in tl.static_range(1, 4):
        v = tl.load(x + at + (k // 2 * width + k % 2) * channels, mask=known, other=0.0).to(tl.float32)
        is_larger = (v > largest) | (v != v)  # the last NaN wins
        largest, place = tl.where(is_larger, v, largest), tl.where(is_larger, k, place)
    if relu:
        place, largest = tl.where(largest <= 0, 4, place), tl.where(largest <= 0, 0.0, largest)
    at = m.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(y + at, largest.to(y.dtype.element_ty), mask=known)
    tl.store(places + at, place.to(tl.uint8), mask=known)


@triton.jit(do_not_specialize=["windows"])
def spread_gradient(
    dy, places, dx, windows, height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
    tile_windows: tl.constexpr, tile_channels: tl.constexpr,
):  # fmt: skip
    """Write a window's gradient to the input that was its largest and 0 to the others; also to inputs of no whole window."""
    m = tl.program_id(0) * tile_windows + tl.arange(0, tile_windows)
    c = tl.program_id(1) * tile_channels + tl.arange(0, tile_channels)
    columns: tl.constexpr = (width + 1) // 2
    per_image: tl.constexpr = (height + 1) // 2 * columns
    image, row, column = m // per_image, m % per_image // columns, m % columns
    known = (m < windows)[:, None] & (c < channels)[None, :]
    is_whole = known & ((row < height // 2) & (column < width // 2))[:, None]
    window = (image * (height // 2) + row) * (width // 2) + column
    at = window.to(tl.int64)[:, None] * channels + c[None, :]
    g = tl.load(dy + at, mask=is_whole, other=0.0)
    place = tl.load(places + at, mask=is_whole, other=0).to(tl.int32)
    corner = (image * height + 2 * row) * width + 2 * column
    at = corner.to(tl.int64)[:, None] * channels + c[None, :]
    for k in tl.static_range(0, 4):
        inside = known & ((2 * row + k // 2 < height) & (2 * column + k % 2 < width))[:, None]
        tl.store(dx + at + (k // 2 * width + k % 2) * channels, tl.where(place == k, g, 0.0), mask=inside)
