"""Launch the Triton kernels of stacked layers: convolution, batch normalisation, SGD. See `_stacked_cuda`."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor, nn

from fedheal.models import _box_convolution_cuda as boxes
from fedheal.models import _stacked_cuda as kernels
from fedheal.models.client_rows import ClientRows
from fedheal.models.kernel_launches import launch
from fedheal.models.stacked_layers import StackedBatchNorm, StackedConv2d

PROGRAMS = 1024  # about as many as fill a GPU with matrix products
SUM_PROGRAMS = 4096  # that sum gradients of a normalisation
MAX_CHUNKS = 512
PACKED = 128  # inputs of all taps up to which they make one product
TILE = 2048  # entries of batch normalisation, with two warps: measured on an H200, as are the deviations from it
NORM_WARPS = 2
LARGE_MAP = 1 << 15  # positions of a client's batch, which are cut into enough chunks to fill a GPU
FLOATS = (torch.float32, torch.bfloat16)


class StackedConvolution(torch.autograd.Function):
    """Convolve each client's examples with its own weights; write the weights' gradient to the client's row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: StackedConv2d) -> Tensor:
        x = _prepare(x)
        ctx.layer, ctx.largest = layer, _get_largest(x)
        ctx.save_for_backward(x)
        return launch_convolution(layer, x)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        dy = gradient.contiguous(memory_format=torch.channels_last)
        # What follows is bound by memory, and the products of wide layers are not.
        is_wide = boxes.supports_boxes(ctx.layer, x)
        with ctx.layer.rows.run_beside(x, dy) if is_wide else nullcontext():
            write_weight_gradient(ctx.layer, x, dy, ctx.largest, _get_largest(dy))
        return input_gradient(ctx.layer, x, dy) if ctx.needs_input_grad[0] else None, None, None


class StackedFork(torch.autograd.Function):
    """Convolve with each client's own weights, and apply a shortcut; add both gradients of the input in one kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, layer: StackedConv2d, shortcut: StackedConv2d | None
    ) -> tuple[Tensor, Tensor]:
        x = _prepare(x)
        ctx.layer, ctx.shortcut = layer, shortcut
        ctx.save_for_backward(x)
        return launch_convolution(layer, x), x.view_as(x) if shortcut is None else launch_convolution(shortcut, x)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor, shortcut_gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        dy = gradient.contiguous(memory_format=torch.channels_last)
        added = shortcut_gradient.contiguous(memory_format=torch.channels_last)
        with ctx.layer.rows.run_beside(x, dy, added):
            write_weight_gradient(ctx.layer, x, dy)
            if ctx.shortcut is not None:
                write_weight_gradient(ctx.shortcut, x, added)
        needs_input_gradient = ctx.needs_input_grad[0]
        dx = boxes.input_gradient_of_boxes(ctx.layer, x, dy, ctx.shortcut, added) if needs_input_gradient else None
        return dx, None, None, None


def supports_fork(layer: StackedConv2d, shortcut: nn.Module | None, x: Tensor) -> bool:
    """Return whether `launch_fork` can add the gradients of these layers.

    A shortcut must be 1 x 1 with as many outputs as the layer, and both must have stride 2.
    """
    if not (layer.has_kernel and layer.get("bias") is None and boxes.supports_boxes(layer, x)):
        return False
    if not isinstance(shortcut, StackedConv2d):
        return shortcut is None and layer.stride[0] == 1
    is_plain = shortcut.has_kernel and shortcut.kernel_size[0] == 1 and shortcut.get("bias") is None
    return is_plain and layer.stride[0] == shortcut.stride[0] == 2 and layer.out_channels == shortcut.out_channels


def launch_fork(layer: StackedConv2d, shortcut: StackedConv2d | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a layer and of its shortcut, or the input itself if there is none."""
    for part in (layer, shortcut):
        if part is not None:
            part.count_call(x)
    forked: tuple[Tensor, Tensor] = StackedFork.apply(x, layer.get("weight"), layer, shortcut)  # type: ignore[no-untyped-call]
    return forked


def _prepare(x: Tensor) -> Tensor:
    """Return a batch channels last, in the dtype in which the kernels compute."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def _get_precision() -> str:
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def _allocate_largest(x: Tensor, clients: int) -> Tensor | None:
    """Return memory for the largest number of each client in a tensor like this, if a weight gradient will need it."""
    needs_scale = x.dtype == torch.float32 and _get_precision() == "tf32"
    return torch.zeros(clients, device=x.device) if needs_scale else None


def _set_largest(x: Tensor, largest: Tensor | None) -> None:
    """Note the largest numbers at the tensor, for as long as nobody changes it."""
    x.largest = largest, x._version  # type: ignore[attr-defined]


def _get_largest(x: Tensor) -> Tensor | None:
    """Return the largest numbers that were noted, or None if there are none or the tensor was changed since."""
    largest, version = getattr(x, "largest", (None, 0))
    return largest if version == x._version else None


@dataclass(frozen=True)
class _Weights:
    """A layer's weights of all clients, from the first on, and how far apart entries are."""

    values: Tensor
    client: int
    input: int
    tap: int
    output: int


def _get_weights(layer: StackedConv2d, dtype: torch.dtype, turned: bool = False) -> _Weights:
    """Return the weights, which are `[clients, outputs, taps, inputs]`; `turned`: for products over the outputs.

    A tensor core takes tf32 numbers only if those of a sum are next to each other, so these are copied for turned products.
    """
    rows, inputs, outputs = layer.rows, layer.in_channels, layer.out_channels
    taps, place = layer.kernel_size[0] ** 2, rows.places[f"{layer.name}.weight"]
    values = rows.params if dtype == torch.float32 else rows.low
    assert values is not None
    first, columns = values[:, place.row_start :], taps * inputs
    if turned and dtype == torch.float32 and _get_precision() == "tf32":
        copied = torch.empty(rows.active, columns, outputs, device=values.device)
        grid = (triton.cdiv(outputs, 64), triton.cdiv(columns, 64), rows.active)
        launch(kernels.turn, grid, first, copied, values.shape[1], outputs, columns, tile=64)
        return _Weights(copied, outputs * columns, outputs, inputs * outputs, 1)
    return _Weights(first, values.shape[1], 1, inputs, columns)


def _tile_for(channels: int, widest: int) -> int:
    return min(widest, max(16, 1 << (channels - 1).bit_length()))


def _find_narrow(channels: int) -> int:
    """Return a number of channels that kernels must know as a constant, or 0."""
    return channels if channels % 16 else 0


def _count_client_entries(x: Tensor, clients: int) -> int:
    return x.numel() // clients


def launch_convolution(layer: StackedConv2d, x: Tensor) -> Tensor:
    """Return the convolution of `[clients * examples, inputs, height, width]`."""
    if boxes.supports_boxes(layer, x):
        return boxes.convolve_boxes(layer, x)
    stride = layer.stride[0]
    number, inputs, height, width = x.shape
    out_height, out_width = (height - 1) // stride + 1, (width - 1) // stride + 1
    shape = (number, layer.out_channels, out_height, out_width)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    weights = _get_weights(layer, x.dtype)
    strides = {"w_input": weights.input, "w_tap": weights.tap, "w_output": weights.output}
    moments = _run_convolution(layer, x, y, inputs, layer.out_channels, weights, strides, stride=stride, flip=False)
    boxes.set_moments(y, moments)
    return y


def _run_convolution(
    layer: StackedConv2d, x: Tensor, y: Tensor, inputs: int, outputs: int, weights: _Weights, strides: dict[str, int],
    stride: int, flip: bool,
) -> boxes.Moments | None:  # fmt: skip
    """Launch the kernel; return the moments of the output in training."""
    clients, size = layer.rows.active, layer.kernel_size[0]
    rows = y.shape[0] // clients * y.shape[2] * y.shape[3]
    tiles, packed = choose_convolution_tiles(inputs, outputs, x.dtype), size * size * inputs <= PACKED and not flip
    if packed:
        tiles["tile_inputs"] = _tile_for(size * size * inputs, PACKED)
    chunks, moments = triton.cdiv(rows, tiles["tile_rows"]), None
    if layer.training and not flip:
        moments = boxes.Moments.allocate(clients, chunks, tiles["tile_rows"], outputs, x.device)
    launch(
        kernels.convolve, (chunks, triton.cdiv(outputs, tiles["tile_outputs"]), clients),
        x, weights.values, y, layer.rows.valid if moments is None else moments.values, layer.rows.valid, rows,
        rows // layer.rows.batch_size, *x.shape[2:],
        *y.shape[2:], stride, inputs, outputs, _count_client_entries(x, clients), weights.client,
        _count_client_entries(y, clients), **strides, size=size, flip=flip, packed=packed, precision=_get_precision(),
        has_moments=moments is not None,
        even_inputs=inputs % tiles["tile_inputs"] == 0, even_outputs=outputs % tiles["tile_outputs"] == 0,
        narrow_inputs=_find_narrow(inputs), narrow_outputs=_find_narrow(outputs), **tiles,
    )  # fmt: skip
    return moments


def choose_convolution_tiles(inputs: int, outputs: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the tile sizes, warps and stages for a convolution, chosen by measurement on an H200."""
    if dtype == torch.float32:
        is_tf32 = _get_precision() == "tf32"
        tile_outputs = _tile_for(outputs, 256 if is_tf32 else 128)
        tile_inputs, warps, stages = _tile_for(inputs, 32), 4 if is_tf32 and tile_outputs < 256 else 8, 3
    else:
        tile_outputs = _tile_for(outputs, 128)
        is_wide = tile_outputs == 128
        tile_inputs, warps, stages = _tile_for(inputs, 32 if is_wide else 64), 4, 4 if is_wide else 3
    return {
        "tile_rows": 128, "tile_outputs": tile_outputs, "tile_inputs": tile_inputs, "num_warps": warps,
        "num_stages": stages,
    }  # fmt: skip


def input_gradient(layer: StackedConv2d, x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of the input `x`, given that of the output."""
    if boxes.supports_boxes(layer, x):
        return boxes.input_gradient_of_boxes(layer, x, dy)
    clients, (size, stride) = layer.rows.active, (layer.kernel_size[0], layer.stride[0])
    number, inputs, height, width = x.shape
    outputs, dx = layer.out_channels, torch.empty_like(x)
    weights = _get_weights(layer, dy.dtype, turned=True)
    if stride == 1:  # a convolution whose inputs are the outputs
        turned = {"w_input": weights.output, "w_tap": weights.tap, "w_output": weights.input}
        _run_convolution(layer, dy, dx, outputs, inputs, weights, turned, stride=1, flip=True)
        return dx
    rows = number // clients * ((height + 1) // 2) * ((width + 1) // 2)
    tiles = choose_convolution_tiles(outputs, inputs, x.dtype)
    tiles["tile_inputs"], tiles["tile_outputs"] = tiles["tile_outputs"], tiles["tile_inputs"]
    grid = (triton.cdiv(rows, tiles["tile_rows"]), triton.cdiv(inputs, tiles["tile_inputs"]), 4 * clients)
    launch(
        kernels.input_gradient_of_stride_2, grid,
        dy, weights.values, dx, layer.rows.valid, rows, rows // layer.rows.batch_size, height, width,
        *dy.shape[2:], inputs, outputs, _count_client_entries(x, clients), weights.client,
        _count_client_entries(dy, clients), weights.input, weights.tap, weights.output,
        size=size, precision=_get_precision(),
        even_inputs=inputs % tiles["tile_inputs"] == 0, even_outputs=outputs % tiles["tile_outputs"] == 0, **tiles,
    )  # fmt: skip
    return dx


def write_weight_gradient(
    layer: StackedConv2d, x: Tensor, dy: Tensor, x_largest: Tensor | None = None, dy_largest: Tensor | None = None
) -> None:
    """Write the gradient of the weights to the clients' rows; in tf32 the largest numbers are found if they are not given."""
    clients, (size, stride) = layer.rows.active, (layer.kernel_size[0], layer.stride[0])
    inputs, outputs = layer.in_channels, layer.out_channels
    rows = dy.shape[0] // clients * dy.shape[2] * dy.shape[3]
    box_tiles = boxes.choose_box_gradient_tiles(layer, x) if boxes.supports_boxes(layer, x) else None
    if box_tiles is not None:
        return _write_weight_gradient_of_boxes(layer, x, dy, box_tiles)
    packed = size * size * inputs <= PACKED
    # A tensor core takes float32 only if the numbers of a sum, here over positions, are next to each other.
    scaled = x.dtype == torch.float32 and _get_precision() == "tf32" and not packed
    if scaled:
        x, x_largest = _scale_to_half(x, clients, x_largest)
        dy, dy_largest = _scale_to_half(dy, clients, dy_largest)
    tiles = choose_gradient_tiles(inputs, outputs, clients, size, x.dtype, rows)
    if packed:
        tiles |= {"tile_inputs": _tile_for(size * size * inputs, PACKED), "columns": 1}
        programs = triton.cdiv(outputs, tiles["tile_outputs"])
    else:
        taps = size * size // tiles["columns"]
        programs = taps * triton.cdiv(inputs, tiles["tile_inputs"]) * triton.cdiv(outputs, tiles["tile_outputs"])
    sums = _ChunkSums(layer, choose_chunks(programs * clients, rows, tiles["tile_rows"]))
    chunk_rows = triton.cdiv(triton.cdiv(rows, sums.chunks), tiles["tile_rows"]) * tiles["tile_rows"]
    launch(
        kernels.weight_gradient, (programs, sums.chunks, clients),
        x, dy, x_largest if scaled else x, dy_largest if scaled else dy, sums.out, layer.rows.valid, rows,
        rows // layer.rows.batch_size, chunk_rows, stride, inputs, outputs,
        _count_client_entries(x, clients), _count_client_entries(dy, clients), sums.client, sums.chunk, *x.shape[2:],
        *dy.shape[2:], size=size, packed=packed, scaled=scaled, precision=_get_precision(),
        even_inputs=inputs % tiles["tile_inputs"] == 0, even_outputs=outputs % tiles["tile_outputs"] == 0,
        narrow_inputs=_find_narrow(inputs), narrow_outputs=_find_narrow(outputs), **tiles,
    )  # fmt: skip
    sums.add()


def _write_weight_gradient_of_boxes(layer: StackedConv2d, x: Tensor, dy: Tensor, tiles: boxes.GradientTiles) -> None:
    clients = layer.rows.active
    programs, positions = boxes.count_gradient_programs(layer, tiles), tiles.box.count_positions()
    rows = dy.shape[0] // clients * dy.shape[2] * dy.shape[3]
    sums = _ChunkSums(layer, choose_chunks(programs * clients, rows, positions))
    chunk_tiles = triton.cdiv(rows // positions, sums.chunks)
    boxes.launch_weight_gradient_of_boxes(
        layer, x, dy, tiles, chunk_tiles, sums.chunks, sums.out, sums.client, sums.chunk
    )
    sums.add()


class _ChunkSums:
    """Where a kernel writes a weight gradient: to the clients' rows, or, from several chunks of positions, to their sums."""

    def __init__(self, layer: StackedConv2d, chunks: int) -> None:
        rows, place = layer.rows, layer.rows.places[f"{layer.name}.weight"]
        assert rows.gradients is not None
        length = place.stop - place.start
        self.chunks, self.gradient = chunks, rows.gradients[: rows.active, place.row_start : place.row_start + length]
        self.out, self.client, self.chunk = self.gradient, rows.gradients.shape[1], 0
        if chunks > 1:
            self.out = torch.empty(rows.active, chunks, length, device=rows.gradients.device)
            self.client, self.chunk = self.out.stride(0), self.out.stride(1)

    def add(self) -> None:
        """Add the chunks' sums, in a fixed order."""
        if self.chunks > 1:
            torch.sum(self.out, dim=1, out=self.gradient)


def _scale_to_half(x: Tensor, clients: int, largest: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a tensor as float16, scaled, and the largest number of each client, by which it was scaled."""
    length, half = _count_client_entries(x, clients), torch.empty_like(x, dtype=torch.float16)
    if largest is None:
        largest = torch.linalg.vector_norm(x.permute(0, 2, 3, 1).reshape(clients, length), torch.inf, dim=1)
    launch(kernels.scale_to_half, (triton.cdiv(length, 2048), clients), x, largest, half, length, block=2048)
    return half, largest


def choose_gradient_tiles(
    inputs: int, outputs: int, clients: int, size: int, dtype: torch.dtype, rows: int
) -> dict[str, int]:
    """Return the tile sizes, taps of a program, warps and stages for a weight gradient, chosen by measurement on an H200."""
    tile_outputs, tile_inputs = _tile_for(outputs, 128), _tile_for(inputs, 64)
    tile_rows, columns, warps = 32 if dtype == torch.float32 else 64, 1, 4
    programs = size * size * clients * triton.cdiv(outputs, 128) * triton.cdiv(inputs, 128)
    is_large = programs >= 512 or (rows >= LARGE_MAP and inputs >= 128)
    if dtype != torch.float32 and is_large:
        tile_inputs, warps = _tile_for(inputs, 128), 8
    elif dtype != torch.float32 and size == 3 and tile_outputs == tile_inputs == inputs == 64:
        columns = 3
    return {
        "tile_outputs": tile_outputs, "tile_inputs": tile_inputs, "tile_rows": tile_rows, "columns": columns,
        "num_warps": warps, "num_stages": 3,
    }  # fmt: skip


def choose_chunks(programs: int, rows: int, tile_rows: int) -> int:
    """Return into how many chunks the positions are cut, so that the programs fill a GPU; sums of chunks cost time, too."""
    most = PROGRAMS if rows >= LARGE_MAP else PROGRAMS // 2
    return max(1, min(most // programs, rows // (4 * tile_rows)))


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
        normalised: Tensor = StackedNorm.apply(x, shortcut, layer.get("weight"), layer, relu)  # type: ignore[no-untyped-call]
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
        moments = boxes.get_moments(x) or _find_moments(x, rows, sizes)
        statistics = sizes.allocate_statistics(x)
        running = [rows.buffers[:, rows.places[f"{layer.name}.running_{key}"].start :] for key in ("mean", "var")]
        tracked = rows.counters[:, rows.places[f"{layer.name}.num_batches_tracked"].start :]
        launch(
        kernels.statistics_of_moments, (triton.cdiv(sizes.channels, 16), clients),
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
        kernels.gradient_sums, (sizes.chunks, sizes.channel_tiles, rows.active),
            dy, x, y, statistics, weight, bias, partials, rows.valid, sizes.rows, sizes.positions, sizes.chunk_rows,
            sizes.channels, sizes.chunks, params, tile_rows=sizes.tile_rows, num_warps=NORM_WARPS, **flags,
        )  # fmt: skip
        launch(
            kernels.reduce_sums,
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
        kernels.norm_input_gradient, (triton.cdiv(sizes.rows, tile_rows), sizes.channel_tiles, rows.active),
            dy, x, y, statistics, weight, bias, dweight, dbias, dx, shortcut_gradient, rows.valid,
            rows.valid if largest is None else largest.view(torch.int32), sizes.rows, sizes.positions, sizes.channels,
            params, has_largest=largest is not None, tile_rows=tile_rows, num_warps=NORM_WARPS, **flags,
        )  # fmt: skip
        _set_largest(dx, largest)
        return dx, shortcut_gradient if ctx.has_shortcut else None, None, None, None


class _NormSizes:
    """The sizes of a feature map: a client's rows are positions of its examples, one after the other."""

    def __init__(self, x: Tensor, rows: ClientRows, most_programs: int = PROGRAMS) -> None:
        self.channels = x.shape[1]
        self.rows = x.numel() // (self.channels * rows.active)
        self.positions = self.rows // rows.batch_size
        self.clients = rows.active
        width = _choose_width(self.channels)
        self.constants = {"width": width, "narrow": _find_narrow(self.channels)}
        self.channel_tiles, self.tile_rows = triton.cdiv(self.channels, width), TILE // width
        programs = self.channel_tiles * self.clients
        self.chunks = max(1, min(MAX_CHUNKS, most_programs // programs, self.rows // self.tile_rows))
        self.chunk_rows = -(-self.rows // self.chunks)

    def allocate_statistics(self, x: Tensor) -> Tensor:
        """Return memory for the mean and the inverse deviation of every channel."""
        return torch.empty(self.clients, 2, self.channels, device=x.device)


def _find_moments(x: Tensor, rows: ClientRows, sizes: _NormSizes) -> boxes.Moments:
    """Compute the moments of feature maps."""
    moments = boxes.Moments.allocate(sizes.clients, sizes.chunks, sizes.chunk_rows, sizes.channels, x.device)
    launch(
        kernels.moments, (sizes.chunks, sizes.channel_tiles, sizes.clients),
        x, moments.values, rows.valid, sizes.rows, sizes.positions, sizes.chunk_rows, sizes.channels, sizes.chunks,
        tile_rows=sizes.tile_rows, num_warps=2 * NORM_WARPS, **sizes.constants,
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
        kernels.apply_norm, (triton.cdiv(rows, TILE // width), triton.cdiv(channels, width), number),
        x, y if shortcut is None else shortcut, y, statistics, weight, bias,
        statistics if clients is None else clients.valid,
        statistics if largest is None else largest.view(torch.int32), rows, positions, channels, row_length,
        tile_rows=TILE // width, width=width, narrow=_find_narrow(channels), has_shortcut=shortcut is not None, relu=relu,
        has_padding=clients is not None, has_largest=largest is not None, num_warps=NORM_WARPS,
    )  # fmt: skip
    _set_largest(y, largest)
    return y


def _choose_width(channels: int) -> int:
    return next((width for width in (64, 32, 16, 8) if channels % width == 0), _tile_for(channels, 64))


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


def launch_sgd_step(rows: ClientRows, momentum: float, weight_decay: float) -> None:
    """Take a step of SGD for the active clients."""
    length, block = rows.params.shape[1], 1024
    launch(
        kernels.take_sgd_step, (triton.cdiv(length, block), rows.active),
        rows.params, rows.gradients, rows.velocity, rows.params if rows.low is None else rows.low, rows.valid,
        rows.lr, length, momentum, weight_decay, has_low=rows.low is not None, block=block,
    )  # fmt: skip
