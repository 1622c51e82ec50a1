"""Batch normalisation of stacked clients, with a shortcut and ReLU, in a few passes. Feature maps are as in `_stacked_cuda`.

Sums over a channel have a fixed order, so results repeat bit for bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from fedheal.models.client_rows import ClientRows
from fedheal.models.kernel_launches import PROGRAMS, choose_tile, find_narrow, get_precision, launch
from fedheal.models.kernel_notes import Moments, get_note, set_note
from fedheal.models.stacked_layers import StackedBatchNorm

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

SUM_PROGRAMS = 4096  # that sum gradients
MAX_CHUNKS = 512
TILE = 2048  # entries, with two warps: measured on an H200, as are the deviations from it
WARPS = 2
FLOATS = (torch.float32, torch.bfloat16)


def _allocate_largest(x: Tensor, clients: int) -> Tensor | None:
    """Return memory for the largest number of each client in a tensor like this, if a weight gradient will need it."""
    needs_scale = x.dtype == torch.float32 and get_precision() == "tf32"
    return torch.zeros(clients, device=x.device) if needs_scale else None


def supports_norm(x: Tensor, shortcut: Tensor | None) -> bool:
    """Return whether the kernels normalise these tensors."""
    is_same = shortcut is None or (shortcut.shape == x.shape and shortcut.dtype == x.dtype)
    return is_same and x.dtype in FLOATS and x.numel() > 0


def normalise_and_scale(layer: StackedBatchNorm, x: Tensor, shortcut: Tensor | None, relu: bool) -> Tensor:
    """Return `relu(norm(x) + shortcut)`."""
    x = x.contiguous(memory_format=torch.channels_last)
    if shortcut is not None:
        shortcut = shortcut.contiguous(memory_format=torch.channels_last)
    if layer.training:
        normalised: Tensor = StackedNorm.apply(x, shortcut, layer.get("weight"), layer, relu)
        return normalised
    mean, var = (layer.rows.get_buffer(f"{layer.name}.running_{key}") for key in ("mean", "var"))
    return _scale(layer, x, shortcut, torch.stack([mean, torch.rsqrt(var + layer.eps)], dim=1), relu)


class StackedNorm(torch.autograd.Function):
    """Normalise by the statistics of each client's batch, add the shortcut, apply ReLU; track the running statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shortcut: Tensor | None, weight: Tensor, layer: StackedBatchNorm, relu: bool
    ) -> Tensor:
        rows, clients = layer.rows, layer.rows.active
        sizes = _NormSizes(x, rows)
        moments = get_note(x, "moments") or _find_moments(x, rows, sizes)
        statistics = sizes.allocate_statistics(x)
        running = [rows.buffers[:, rows.places[f"{layer.name}.running_{key}"].start :] for key in ("mean", "var")]
        tracked = rows.counters[:, rows.places[f"{layer.name}.num_batches_tracked"].start :]
        launch(
        statistics_of_moments, (triton.cdiv(sizes.channels, 16), clients),
            moments.values, statistics, *running, tracked, rows.valid, sizes.positions, moments.rows, sizes.channels,
            moments.chunks, rows.buffers.shape[1], rows.counters.shape[1], layer.momentum, layer.eps,
            block=_choose_block(moments.chunks), width=16, num_warps=_choose_block(moments.chunks) // 64,
        )  # fmt: skip
        y = _scale(layer, x, shortcut, statistics, relu)
        ctx.layer, ctx.relu, ctx.has_shortcut = layer, relu, shortcut is not None
        # Where ReLU was active follows from the input, unless a shortcut was added.
        ctx.save_for_backward(x, y if relu and ctx.has_shortcut else x, statistics)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, y, statistics = ctx.saved_tensors
        layer, rows = ctx.layer, ctx.layer.rows
        sizes = _NormSizes(x, rows, SUM_PROGRAMS)
        dy = gradient.contiguous(memory_format=torch.channels_last)
        partials = torch.empty(rows.active, 2, sizes.chunks, sizes.channels, device=x.device)
        weight, bias = _get_affine(layer, rows.params)
        dweight, dbias = _get_affine(layer, rows.gradients)
        flags = {"relu": ctx.relu, "has_shortcut": ctx.has_shortcut, **sizes.constants}
        params = rows.params.shape[1]
        launch(
        gradient_sums, (sizes.chunks, sizes.channel_tiles, rows.active),
            dy, x, y, statistics, weight, bias, partials, rows.valid, sizes.rows, sizes.positions, sizes.chunk_rows,
            sizes.channels, sizes.chunks, params, tile_rows=sizes.tile_rows, num_warps=WARPS, **flags,
        )  # fmt: skip
        launch(
            reduce_sums,
            (triton.cdiv(sizes.channels, 16), rows.active),
            partials,
            dweight,
            dbias,
            sizes.channels,
            sizes.chunks,
            params,
            block=_choose_block(sizes.chunks),
            width=16,
        )
        dx, largest = torch.empty_like(x), _allocate_largest(x, rows.active)
        # Without ReLU the shortcut's gradient is dy itself.
        shortcut_gradient = torch.empty_like(x) if ctx.has_shortcut and ctx.relu else dy
        tile_rows = sizes.tile_rows // 2 if ctx.has_shortcut else sizes.tile_rows
        launch(
        norm_input_gradient, (triton.cdiv(sizes.rows, tile_rows), sizes.channel_tiles, rows.active),
            dy, x, y, statistics, weight, bias, dweight, dbias, dx, shortcut_gradient, rows.valid,
            rows.valid if largest is None else largest.view(torch.int32), sizes.rows, sizes.positions, sizes.channels,
            params, has_largest=largest is not None, tile_rows=tile_rows, num_warps=WARPS, **flags,
        )  # fmt: skip
        set_note(dx, "largest", largest)
        return dx, shortcut_gradient if ctx.has_shortcut else None, None, None, None


class _NormSizes:
    """The sizes of a feature map: a client's rows are positions of its examples, one after the other."""

    def __init__(self, x: Tensor, rows: ClientRows, most_programs: int = PROGRAMS) -> None:
        self.channels = x.shape[1]
        self.rows = x.numel() // (self.channels * rows.active)
        self.positions = self.rows // rows.batch_size
        self.clients = rows.active
        width = _choose_width(self.channels)
        self.constants = {"width": width, "narrow": find_narrow(self.channels)}
        self.channel_tiles, self.tile_rows = triton.cdiv(self.channels, width), TILE // width
        programs = self.channel_tiles * self.clients
        self.chunks = max(1, min(MAX_CHUNKS, most_programs // programs, self.rows // self.tile_rows))
        self.chunk_rows = -(-self.rows // self.chunks)

    def allocate_statistics(self, x: Tensor) -> Tensor:
        """Return memory for the mean and the inverse deviation of every channel."""
        return torch.empty(self.clients, 2, self.channels, device=x.device)


def _find_moments(x: Tensor, rows: ClientRows, sizes: _NormSizes) -> Moments:
    """Compute the moments of feature maps."""
    moments = Moments.allocate(sizes.clients, sizes.chunks, sizes.chunk_rows, sizes.channels, x.device)
    launch(
        find_moments, (sizes.chunks, sizes.channel_tiles, sizes.clients),
        x, moments.values, rows.valid, sizes.rows, sizes.positions, sizes.chunk_rows, sizes.channels, sizes.chunks,
        tile_rows=sizes.tile_rows, num_warps=2 * WARPS, **sizes.constants,
    )  # fmt: skip
    return moments


def _choose_block(chunks: int) -> int:
    """Return how many chunks a program reads at a time."""
    return 128 if chunks <= 128 else 512


def _get_affine(layer: StackedBatchNorm, rows: Tensor) -> list[Tensor]:
    places = layer.rows.places
    return [rows[:, places[f"{layer.name}.{key}"].row_start :] for key in ("weight", "bias")]


def _scale(layer: StackedBatchNorm, x: Tensor, shortcut: Tensor | None, statistics: Tensor, relu: bool) -> Tensor:
    weight, bias = _get_affine(layer, layer.rows.params)
    return _launch_scale(x, shortcut, statistics, weight, bias, layer.rows, relu)


def _launch_scale(
    x: Tensor, shortcut: Tensor | None, statistics: Tensor, weight: Tensor, bias: Tensor, clients: ClientRows | None,
    relu: bool,
) -> Tensor:  # fmt: skip
    """Normalise by these statistics, of several clients or of one model without padding."""
    y, channels = torch.empty_like(x), x.shape[1]
    number, row_length = (1, 0) if clients is None else (clients.active, clients.params.shape[1])
    rows, width = x.numel() // (channels * number), _choose_width(channels)
    positions = 0 if clients is None else rows // clients.batch_size
    largest = None if clients is None else _allocate_largest(x, number)
    launch(
        apply_norm, (triton.cdiv(rows, TILE // width), triton.cdiv(channels, width), number),
        x, y if shortcut is None else shortcut, y, statistics, weight, bias,
        statistics if clients is None else clients.valid,
        statistics if largest is None else largest.view(torch.int32), rows, positions, channels, row_length,
        tile_rows=TILE // width, width=width, narrow=find_narrow(channels), has_shortcut=shortcut is not None, relu=relu,
        has_padding=clients is not None, has_largest=largest is not None, num_warps=WARPS,
    )  # fmt: skip
    set_note(y, "largest", largest)
    return y


def _choose_width(channels: int) -> int:
    return next((width for width in (64, 32, 16, 8) if channels % width == 0), choose_tile(channels, 64))


def supports_evaluation(norm: nn.Module, x: Tensor, shortcut: Tensor | None) -> bool:
    """Return whether `evaluate_norm` can replace this layer in evaluation, where no gradient is needed."""
    is_plain = isinstance(norm, nn.BatchNorm2d) and norm.affine and norm.running_mean is not None
    is_float = is_plain and not norm.training and norm.weight.dtype == torch.float32
    return is_float and not torch.is_grad_enabled() and x.ndim == 4 and supports_norm(x, shortcut)


def evaluate_norm(norm: nn.BatchNorm2d, x: Tensor, shortcut: Tensor | None, relu: bool) -> Tensor:
    """Return `relu(norm(x) + shortcut)` by the running statistics of one layer."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    x = x.contiguous(memory_format=torch.channels_last)
    if shortcut is not None:
        shortcut = shortcut.contiguous(memory_format=torch.channels_last)
    statistics = torch.stack([norm.running_mean, torch.rsqrt(norm.running_var + norm.eps)])
    return _launch_scale(x, shortcut, statistics, norm.weight, norm.bias, None, relu)


@triton.jit(do_not_specialize=["rows", "chunk_rows", "chunks", "positions"])
def find_moments(
    x, partials, valid, rows, positions, chunk_rows, channels, chunks, tile_rows: tl.constexpr, width: tl.constexpr,
    narrow: tl.constexpr,
):  # fmt: skip
    """Compute a chunk's mean and sum of squared deviations from differences to its first row."""
    channels = narrow if narrow > 0 else channels
    p, c, client = tl.program_id(0), tl.program_id(1) * width + tl.arange(0, width), tl.program_id(2)
    known = c < channels
    x += client.to(tl.int64) * rows * channels
    partials += client * 2 * chunks * channels
    valid_rows = tl.load(valid + client) * positions
    first, last = tl.minimum(p * chunk_rows, valid_rows), tl.minimum((p + 1) * chunk_rows, valid_rows)
    origin = tl.load(x + tl.minimum(first, rows - 1) * channels + c, mask=known, other=0.0).to(tl.float32)
    total = tl.zeros((tile_rows, width), dtype=tl.float32)
    square = tl.zeros((tile_rows, width), dtype=tl.float32)
    for start in range(first, last, tile_rows):
        r = start + tl.arange(0, tile_rows)
        inside = (r < last)[:, None] & known[None, :]
        v = tl.load(x + r[:, None] * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
        d = tl.where(inside, v - origin[None, :], 0.0)
        total += d
        square += d * d
    number = tl.maximum(last - first, 1).to(tl.float32)
    shift, deviations = tl.sum(total, axis=0), tl.sum(square, axis=0)
    tl.store(partials + p * channels + c, origin + shift / number, mask=known)
    tl.store(partials + (chunks + p) * channels + c, deviations - shift * shift / number, mask=known)


@triton.jit
def find_chunks(start, chunks, chunk_rows, valid_rows, channels, c, known, block: tl.constexpr):
    """Return how many rows a block of chunks has each, which of its entries exist, and where they are."""
    p = start + tl.arange(0, block)
    number = tl.minimum((p + 1) * chunk_rows, valid_rows) - tl.minimum(p * chunk_rows, valid_rows)
    is_chunk = (p < chunks)[:, None] & known[None, :]
    return number.to(tl.float32)[:, None], is_chunk, p[:, None] * channels + c[None, :]


@triton.jit(do_not_specialize=["chunk_rows", "chunks", "positions"])
def statistics_of_moments(
    partials, statistics, running_mean, running_var, batches_tracked, valid, positions, chunk_rows, channels, chunks,
    buffers, counters, momentum, eps, block: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Compute a channel's mean and inverse deviation from its chunks', and update the running statistics."""
    c, client = tl.program_id(0) * width + tl.arange(0, width), tl.program_id(1)
    known = c < channels
    partials += client.to(tl.int64) * 2 * chunks * channels
    statistics += client * 2 * channels
    running_mean += client * buffers
    running_var += client * buffers
    batches_tracked += client * counters
    valid_rows = tl.load(valid + client) * positions
    rows = tl.maximum(valid_rows, 1).to(tl.float32)
    mean = tl.zeros((width,), dtype=tl.float32)
    for start in range(0, chunks, block):
        number, is_chunk, at = find_chunks(start, chunks, chunk_rows, valid_rows, channels, c, known, block)
        mean += tl.sum(number * tl.load(partials + at, mask=is_chunk, other=0.0), axis=0)
    mean /= rows
    deviations = tl.zeros((width,), dtype=tl.float32)
    for start in range(0, chunks, block):
        number, is_chunk, at = find_chunks(start, chunks, chunk_rows, valid_rows, channels, c, known, block)
        shift = tl.load(partials + at, mask=is_chunk, other=0.0) - mean[None, :]
        squares = tl.load(partials + chunks * channels + at, mask=is_chunk, other=0.0)
        deviations += tl.sum(squares + number * shift * shift, axis=0)
    tl.store(statistics + c, mean, mask=known)
    tl.store(statistics + channels + c, 1.0 / tl.sqrt(deviations / rows + eps), mask=known)
    is_active = known & ((valid_rows + 0 * c) > 0)
    old = tl.load(running_mean + c, mask=known, other=0.0)
    tl.store(running_mean + c, old + momentum * (mean - old), mask=is_active)
    old = tl.load(running_var + c, mask=known, other=0.0)
    tl.store(running_var + c, old + momentum * (deviations / tl.maximum(rows - 1, 1) - old), mask=is_active)
    if tl.program_id(0) == 0:
        tl.store(batches_tracked, tl.load(batches_tracked) + (valid_rows > 0).to(tl.int64))


@triton.jit
def load_scales(statistics, weight, bias, at_row, c, channels):
    """Return each channel's mean and inverse deviation, and the factor and the offset that normalise and scale it."""
    known = c < channels
    mean = tl.load(statistics + c, mask=known, other=0.0)
    inverse = tl.load(statistics + channels + c, mask=known, other=0.0)
    scale = inverse * tl.load(weight + at_row, mask=known, other=0.0)
    return mean, inverse, scale, tl.load(bias + at_row, mask=known, other=0.0) - mean * scale


@triton.jit(do_not_specialize=["rows", "positions"])
def apply_norm(
    x, shortcut, y, statistics, weight, bias, valid, largest, rows, positions, channels, row_length,
    tile_rows: tl.constexpr, width: tl.constexpr, narrow: tl.constexpr, has_shortcut: tl.constexpr, relu: tl.constexpr,
    has_padding: tl.constexpr, has_largest: tl.constexpr,
):  # fmt: skip
    """Normalise, add the shortcut, apply ReLU; padding is 0, and is not read. `largest` receives the largest number."""
    channels = narrow if narrow > 0 else channels
    c, client = tl.program_id(1) * width + tl.arange(0, width), tl.program_id(2).to(tl.int64)
    known = c < channels
    at_row = client * row_length + c
    _, _, scale, offset = load_scales(statistics + client * 2 * channels, weight, bias, at_row, c, channels)
    r = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    inside = (r < rows)[:, None] & known[None, :]
    counts = inside
    if has_padding:
        counts = inside & (r < tl.load(valid + client) * positions)[:, None]
    at = client * rows * channels + r[:, None] * channels + c[None, :]
    result = tl.load(x + at, mask=counts, other=0.0).to(tl.float32) * scale[None, :] + offset[None, :]
    if has_shortcut:
        result += tl.load(shortcut + at, mask=counts, other=0.0).to(tl.float32)
    if relu:
        result = tl.maximum(result, 0.0)
    if has_padding:
        result = tl.where(counts, result, 0.0)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)
    if has_largest:
        tl.atomic_max(largest + client, tl.max(tl.abs(result)).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["rows", "chunk_rows", "chunks", "positions"])
def gradient_sums(
    dy, x, y, statistics, weight, bias, partials, valid, rows, positions, chunk_rows, channels, chunks, row_length,
    tile_rows: tl.constexpr, width: tl.constexpr, narrow: tl.constexpr, relu: tl.constexpr, has_shortcut: tl.constexpr,
):  # fmt: skip
    """Sum a chunk's gradient, and its product with the normalised input."""
    channels = narrow if narrow > 0 else channels
    p, c, client = tl.program_id(0), tl.program_id(1) * width + tl.arange(0, width), tl.program_id(2).to(tl.int64)
    known = c < channels
    valid_rows = tl.load(valid + client) * positions
    first, last = tl.minimum(p * chunk_rows, valid_rows), tl.minimum((p + 1) * chunk_rows, valid_rows)
    at_row = client * row_length + c
    partials += client * 2 * chunks * channels
    mean, inverse, scale, offset = load_scales(statistics + client * 2 * channels, weight, bias, at_row, c, channels)
    plain = tl.zeros((tile_rows, width), dtype=tl.float32)
    product = tl.zeros((tile_rows, width), dtype=tl.float32)
    for start in range(first, last, tile_rows):
        r = start + tl.arange(0, tile_rows)
        inside = (r < last)[:, None] & known[None, :]
        at = client * rows * channels + r[:, None] * channels + c[None, :]
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if relu and has_shortcut:
            g = tl.where(tl.load(y + at, mask=inside, other=0.0).to(tl.float32) > 0, g, 0.0)
        elif relu:
            g = tl.where(v * scale[None, :] + offset[None, :] > 0, g, 0.0)
        plain += g
        product += g * (v - mean[None, :])
    tl.store(partials + p * channels + c, tl.sum(plain, axis=0), mask=known)
    tl.store(partials + (chunks + p) * channels + c, tl.sum(product, axis=0) * inverse, mask=known)


@triton.jit(do_not_specialize=["chunks"])
def reduce_sums(partials, dweight, dbias, channels, chunks, row_length, block: tl.constexpr, width: tl.constexpr):
    """Sum the chunks to the gradients of the layer's weight and bias."""
    c, client = tl.program_id(0) * width + tl.arange(0, width), tl.program_id(1)
    known, row_start = c < channels, client.to(tl.int64) * row_length
    partials += client * 2 * chunks * channels
    plain = tl.zeros((width,), dtype=tl.float32)
    product = tl.zeros((width,), dtype=tl.float32)
    for start in range(0, chunks, block):
        p = start + tl.arange(0, block)
        at, is_chunk = p[:, None] * channels + c[None, :], (p < chunks)[:, None] & known[None, :]
        plain += tl.sum(tl.load(partials + at, mask=is_chunk, other=0.0), axis=0)
        product += tl.sum(tl.load(partials + chunks * channels + at, mask=is_chunk, other=0.0), axis=0)
    tl.store(dbias + row_start + c, plain, mask=known)
    tl.store(dweight + row_start + c, product, mask=known)


@triton.jit(do_not_specialize=["rows", "positions"])
def norm_input_gradient(
    dy, x, y, statistics, weight, bias, dweight, dbias, dx, shortcut_gradient, valid, largest, rows, positions, channels,
    row_length, tile_rows: tl.constexpr, width: tl.constexpr, narrow: tl.constexpr, relu: tl.constexpr,
    has_shortcut: tl.constexpr, has_largest: tl.constexpr,
):  # fmt: skip
    """Compute the input's gradient, which is 0 in rows that do not count. `largest` receives its largest number."""
    channels = narrow if narrow > 0 else channels
    c, client = tl.program_id(1) * width + tl.arange(0, width), tl.program_id(2).to(tl.int64)
    known = c < channels
    at_row = client * row_length + c
    mean, inverse, scale, offset = load_scales(statistics + client * 2 * channels, weight, bias, at_row, c, channels)
    valid_rows = tl.load(valid + client) * positions
    number = tl.maximum(valid_rows, 1).to(tl.float32)
    plain = tl.load(dbias + at_row, mask=known, other=0.0) / number
    product = tl.load(dweight + at_row, mask=known, other=0.0) / number
    r = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    inside = (r < rows)[:, None] & known[None, :]
    counts = inside & (r < valid_rows)[:, None]
    at = client * rows * channels + r[:, None] * channels + c[None, :]
    g = tl.load(dy + at, mask=counts, other=0.0).to(tl.float32)
    v = tl.load(x + at, mask=counts, other=0.0).to(tl.float32)
    if relu and has_shortcut:
        g = tl.where(tl.load(y + at, mask=counts, other=0.0).to(tl.float32) > 0, g, 0.0)
        tl.store(shortcut_gradient + at, g.to(shortcut_gradient.dtype.element_ty), mask=inside)
    elif relu:
        g = tl.where(v * scale[None, :] + offset[None, :] > 0, g, 0.0)
    normal = (v - mean[None, :]) * inverse[None, :]
    result = scale[None, :] * (g - plain[None, :] - normal * product[None, :])
    result = tl.where(counts, result, 0.0)
    tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)
    if has_largest:
        tl.atomic_max(largest + client, tl.max(tl.abs(result)).to(tl.int32, bitcast=True))
