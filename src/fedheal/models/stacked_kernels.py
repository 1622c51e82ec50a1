"""Launch the Triton kernels of stacked convolutions, of their shortcuts, and of SGD. See `_stacked_cuda`."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor, nn

from fedheal.models import _box_convolution_cuda as boxes
from fedheal.models import _stacked_cuda as kernels
from fedheal.models.client_rows import ClientRows
from fedheal.models.kernel_launches import PROGRAMS, choose_tile, find_narrow, get_precision, launch
from fedheal.models.kernel_notes import Moments, get_note, set_note
from fedheal.models.stacked_layers import StackedConv2d

PACKED = 128  # inputs of all taps up to which they make one product
SUMMED_TILE = 4096  # numbers that a program adds at a time
LARGE_MAP = 1 << 15  # positions of a client's batch, which are cut into enough chunks to fill a GPU


class StackedConvolution(torch.autograd.Function):
    """Convolve each client's examples with its own weights; write the weights' gradient to the client's row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: StackedConv2d) -> Tensor:
        x = _prepare(x)
        ctx.layer, ctx.largest = layer, get_note(x, "largest")
        ctx.save_for_backward(x)
        return launch_convolution(layer, x)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        dy = gradient.contiguous(memory_format=torch.channels_last)
        # What follows is bound by memory, and the products of wide layers are not.
        is_wide = boxes.supports_boxes(ctx.layer, x)
        with ctx.layer.rows.use_side_stream(x, dy) if is_wide else nullcontext():
            write_weight_gradient(ctx.layer, x, dy, ctx.largest, get_note(dy, "largest"))
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
        with ctx.layer.rows.use_side_stream(x, dy, added):
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
    if turned and dtype == torch.float32 and get_precision() == "tf32":
        copied = torch.empty(rows.active, columns, outputs, device=values.device)
        grid = (triton.cdiv(outputs, 64), triton.cdiv(columns, 64), rows.active)
        launch(kernels.turn, grid, first, copied, values.shape[1], outputs, columns, tile=64)
        return _Weights(copied, outputs * columns, outputs, inputs * outputs, 1)
    return _Weights(first, values.shape[1], 1, inputs, columns)


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
    set_note(y, "moments", moments)
    return y


def _run_convolution(
    layer: StackedConv2d, x: Tensor, y: Tensor, inputs: int, outputs: int, weights: _Weights, strides: dict[str, int],
    stride: int, flip: bool,
) -> Moments | None:  # fmt: skip
    """Launch the kernel; return the moments of the output in training."""
    clients, size = layer.rows.active, layer.kernel_size[0]
    rows = y.shape[0] // clients * y.shape[2] * y.shape[3]
    tiles, packed = choose_convolution_tiles(inputs, outputs, x.dtype), size * size * inputs <= PACKED and not flip
    if packed:
        tiles["tile_inputs"] = choose_tile(size * size * inputs, PACKED)
    chunks, moments = triton.cdiv(rows, tiles["tile_rows"]), None
    if layer.training and not flip:
        moments = Moments.allocate(clients, chunks, tiles["tile_rows"], outputs, x.device)
    launch(
        kernels.convolve, (chunks, triton.cdiv(outputs, tiles["tile_outputs"]), clients),
        x, weights.values, y, layer.rows.valid if moments is None else moments.values, layer.rows.valid, rows,
        rows // layer.rows.batch_size, stride, inputs, outputs, _count_client_entries(x, clients), weights.client,
        _count_client_entries(y, clients), **strides, height=x.shape[2], width=x.shape[3], out_height=y.shape[2],
        out_width=y.shape[3], size=size, flip=flip, packed=packed, precision=get_precision(),
        has_moments=moments is not None,
        even_inputs=inputs % tiles["tile_inputs"] == 0, even_outputs=outputs % tiles["tile_outputs"] == 0,
        narrow_inputs=find_narrow(inputs), narrow_outputs=find_narrow(outputs), **tiles,
    )  # fmt: skip
    return moments


def choose_convolution_tiles(inputs: int, outputs: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the tile sizes, warps and stages for a convolution, chosen by measurement on an H200."""
    if dtype == torch.float32:
        is_tf32 = get_precision() == "tf32"
        tile_outputs = choose_tile(outputs, 256 if is_tf32 else 128)
        tile_inputs, warps, stages = choose_tile(inputs, 32), 4 if is_tf32 and tile_outputs < 256 else 8, 3
    else:
        tile_outputs = choose_tile(outputs, 128)
        is_wide = tile_outputs == 128
        tile_inputs, warps, stages = choose_tile(inputs, 32 if is_wide else 64), 4, 4 if is_wide else 3
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
        size=size, precision=get_precision(),
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
    scaled = x.dtype == torch.float32 and get_precision() == "tf32" and not packed
    if scaled:
        x, x_largest = _scale_to_half(x, clients, x_largest)
        dy, dy_largest = _scale_to_half(dy, clients, dy_largest)
    tiles = choose_gradient_tiles(inputs, outputs, clients, size, x.dtype, rows)
    if packed:
        tiles |= {"tile_inputs": choose_tile(size * size * inputs, PACKED), "columns": 1}
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
        *dy.shape[2:], size=size, packed=packed, scaled=scaled, precision=get_precision(),
        even_inputs=inputs % tiles["tile_inputs"] == 0, even_outputs=outputs % tiles["tile_outputs"] == 0,
        narrow_inputs=find_narrow(inputs), narrow_outputs=find_narrow(outputs), **tiles,
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
        if self.chunks == 1:
            return
        (clients, length), tile_chunks = self.gradient.shape, min(64, triton.next_power_of_2(self.chunks))
        block = min(1024, SUMMED_TILE // tile_chunks)
        launch(
            kernels.add_chunks, (triton.cdiv(length, block), clients), self.out, self.gradient, self.chunks, length,
            self.gradient.stride(0), tile_chunks=tile_chunks, block=block,
        )  # fmt: skip


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
    tile_outputs, tile_inputs = choose_tile(outputs, 128), choose_tile(inputs, 64)
    tile_rows, columns, warps = 32 if dtype == torch.float32 else 64, 1, 4
    programs = size * size * clients * triton.cdiv(outputs, 128) * triton.cdiv(inputs, 128)
    is_large = programs >= 512 or (rows >= LARGE_MAP and inputs >= 128)
    if dtype != torch.float32 and is_large:
        tile_inputs, warps = choose_tile(inputs, 128), 8
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


def launch_sgd_step(rows: ClientRows, momentum: float, weight_decay: float) -> None:
    """Take a step of SGD for the active clients."""
    length, block = rows.params.shape[1], 1024
    launch(
        kernels.take_sgd_step, (triton.cdiv(length, block), rows.active),
        rows.params, rows.gradients, rows.velocity, rows.params if rows.low is None else rows.low, rows.valid,
        rows.lr, length, momentum, weight_decay, has_low=rows.low is not None, block=block,
    )  # fmt: skip
