"""Convolutions of stacked clients whose tiles are boxes that the GPU copies by itself (tensor descriptors).

A program's positions are a box of images, rows and columns. A tap shifts the box, and what lies outside the image is read as
0, so there are no addresses and masks to compute. The weights are the first factor of the matrix products and the positions
the second: both are then read from shared memory as they were copied. Feature maps and weights are as in `_stacked_cuda`, whose
kernels compute everything else: other precisions, channels and sizes. Sums have a fixed order here, too.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fedheal.models._stacked_cuda import store_moments
from fedheal.models.client_rows import ClientRows
from fedheal.models.kernel_launches import launch
from fedheal.models.kernel_notes import Moments, set_note
from fedheal.models.stacked_layers import StackedConv2d

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

CAPABILITIES = (9, 10)  # of GPUs that copy boxes and have the shared memory for the tiles
CHANNELS = 64  # that a box holds
SMALLEST_PART = 16  # positions of an image in a box; smaller ones are copied too slowly
# From these sizes on a weight gradient has larger tiles: positions of a client's batch, and programs of that size.
LARGE_MAP, MANY_POSITIONS, MANY_PROGRAMS = 1 << 15, 1 << 14, 512


@dataclass(frozen=True)
class Box:
    """The positions of a tile."""

    images: int
    height: int
    width: int

    def count_tiles(self, images: int, height: int, width: int) -> int:
        """Return how many such boxes the feature maps of a client have."""
        return images // self.images * (height // self.height) * (width // self.width)

    def is_contiguous(self, height: int, width: int) -> bool:
        """Return whether the positions follow one another in maps of this size."""
        is_whole_row, is_whole_image = self.width == width, self.height == height
        return (self.images == 1 or (is_whole_row and is_whole_image)) and (self.height == 1 or is_whole_row)

    def count_positions(self) -> int:
        """Return how many positions a box has."""
        return self.images * self.height * self.width

    @property
    def constants(self) -> dict[str, int]:
        """The box as constants of a kernel."""
        return {"images": self.images, "box_height": self.height, "box_width": self.width}


def choose_box(positions: int, images: int, height: int, width: int) -> Box | None:
    """Return a box of so many positions into which a client's maps can be cut, or None."""
    across = _find_power_of_two(width, positions)
    down = _find_power_of_two(height, positions // across)
    box = Box(_find_power_of_two(images, positions // (across * down)), down, across)
    is_usable = down * across >= SMALLEST_PART and box.images * down * across == positions
    return box if is_usable else None


def _find_power_of_two(number: int, largest: int) -> int:
    """Return the largest power of two that divides a number and is at most `largest`."""
    return min(number & -number, 1 << (largest.bit_length() - 1))


def supports_boxes(layer: StackedConv2d, x: Tensor) -> bool:
    """Return whether these kernels convolve the batch: in bf16, with full boxes, on a GPU that copies boxes."""
    stride, (number, _, height, width) = layer.stride[0], x.shape
    fits = layer.in_channels % CHANNELS == layer.out_channels % CHANNELS == height % stride == width % stride == 0
    if x.dtype != torch.bfloat16 or not fits or torch.cuda.get_device_capability(x.device)[0] not in CAPABILITIES:
        return False
    return choose_box(256, number // layer.rows.active, height // stride, width // stride) is not None


def _describe_maps(maps: Tensor, box: Box, channels: int) -> TensorDescriptor:
    """Return a descriptor of `[images, channels, height, width]`, whose channels are last in memory."""
    last = maps.permute(0, 2, 3, 1)
    return TensorDescriptor.from_tensor(last, [box.images, box.height, box.width, channels])


def _describe_halves(maps: Tensor, box: Box, channels: int) -> TensorDescriptor:
    """Return a descriptor in which even and odd rows and columns are apart: `[images, height, 2, width, 2 * channels]`."""
    halves = maps.permute(0, 2, 3, 1).unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).flatten(4)
    return TensorDescriptor.from_tensor(halves, [box.images, box.height, 1, box.width, channels])


def _describe_weights(layer: StackedConv2d, outputs: int, inputs: int) -> TensorDescriptor:
    """Return a descriptor of the clients' weights, `[clients, outputs, taps * inputs]`."""
    rows, place = layer.rows, layer.rows.places[f"{layer.name}.weight"]
    assert rows.low is not None
    flat = rows.low[: rows.active, place.row_start : place.row_start + place.stop - place.start]
    weights = flat.unflatten(1, (layer.out_channels, -1))
    return TensorDescriptor.from_tensor(weights, [1, outputs, inputs])


def _count_images(x: Tensor, rows: ClientRows) -> tuple[int, int]:
    """Return how many images a client and an example have: a module may have cut every example into several."""
    client_images = x.shape[0] // rows.active
    return client_images, client_images // rows.batch_size


def convolve_boxes(layer: StackedConv2d, x: Tensor) -> Tensor:
    """Return the convolution of `[clients * examples, inputs, height, width]`; in training note the output's moments."""
    stride, (number, _, height, width) = layer.stride[0], x.shape
    shape = (number, layer.out_channels, height // stride, width // stride)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    tiles = choose_box_tiles(layer.out_channels, flip=False)
    set_note(y, "moments", _launch_convolution(layer, x, y, None, tiles, flip=False))
    return y


@dataclass(frozen=True)
class ConvolutionTiles:
    """How a convolution is cut into programs."""

    positions: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def choose_box_tiles(outputs: int, flip: bool) -> ConvolutionTiles:
    """Return the tiles of a convolution, or with `flip` of an input gradient, by measurement on an H200."""
    if outputs % 128:
        return ConvolutionTiles(256, 64, 32, 4, 3)
    return ConvolutionTiles(128, 128, 64, 8 if flip and outputs > 128 else 4, 3)


def choose_half_tiles(inputs: int) -> ConvolutionTiles:
    """Return the tiles of an input gradient with stride 2, whose products have the inputs as outputs."""
    if inputs % 128:
        return ConvolutionTiles(256, 64, 32, 4, 3)
    return ConvolutionTiles(256, 128, 64, 8, 4) if inputs > 128 else ConvolutionTiles(128, 128, 64, 4, 3)


def _launch_convolution(
    layer: StackedConv2d, x: Tensor, y: Tensor, added: Tensor | None, tiles: ConvolutionTiles, flip: bool
) -> Moments | None:
    """Launch the kernel; return the moments of the output if a normalisation may need them and tiles can be its chunks."""
    rows, (client_images, per_example) = layer.rows, _count_images(y, layer.rows)
    (inputs, outputs), (height, width) = (x.shape[1], y.shape[1]), y.shape[2:]
    box = choose_box(tiles.positions, client_images, height, width)
    assert box is not None
    stride = x.shape[2] // height
    x_boxes = _describe_maps(x, box, tiles.inputs) if stride == 1 else _describe_halves(x, box, tiles.inputs)
    weights = _describe_weights(layer, *((tiles.inputs, tiles.outputs) if flip else (tiles.outputs, tiles.inputs)))
    y_boxes = _describe_maps(y, box, tiles.outputs)
    added_boxes = y_boxes if added is None else _describe_maps(added, box, tiles.outputs)
    chunks, moments = box.count_tiles(client_images, height, width), None
    has_whole_images = box.images == 1 or (box.height, box.width) == (height, width)
    if layer.training and not flip and has_whole_images:
        moments = Moments.allocate(rows.active, chunks, box.count_positions(), outputs, x.device)
    launch(
        multiply_boxes, (outputs // tiles.outputs * chunks, rows.active),
        x_boxes, weights, y_boxes, added_boxes, rows.valid if moments is None else moments.values, rows.valid, height,
        width, inputs, outputs, client_images, per_example, chunks, stride=stride, size=layer.kernel_size[0], flip=flip,
        has_added=added is not None, has_moments=moments is not None, **box.constants,
        tile_outputs=tiles.outputs, tile_inputs=tiles.inputs, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return moments


def input_gradient_of_boxes(
    layer: StackedConv2d, x: Tensor, dy: Tensor, shortcut: StackedConv2d | None = None, added: Tensor | None = None
) -> Tensor:
    """Return the gradient of the input `x`, given that of the output.

    Args:
        layer: The convolution.
        x: Its input.
        dy: The gradient of its output.
        shortcut: A 1 x 1 convolution of the same input with stride 2, whose input gradient is added.
        added: A gradient that is added: that of the shortcut's output, or, without a shortcut, of the input itself.
    """
    dx, inputs = torch.empty_like(x), layer.in_channels
    if layer.stride[0] == 1:  # a convolution whose inputs are the outputs
        tiles = choose_box_tiles(inputs, flip=True)
        _launch_convolution(layer, dy, dx, added, tiles, flip=True)
        return dx
    halves = choose_half_tiles(inputs)
    rows, (client_images, per_example) = layer.rows, _count_images(x, layer.rows)
    height, width = dy.shape[2:]
    box = choose_box(halves.positions, client_images, height, width)
    assert box is not None
    dy_boxes, weights = _describe_maps(dy, box, halves.inputs), _describe_weights(layer, halves.inputs, halves.outputs)
    second_boxes, second_weights = dy_boxes, weights
    if shortcut is not None and added is not None:
        second_boxes = _describe_maps(added, box, halves.inputs)
        second_weights = _describe_weights(shortcut, halves.inputs, halves.outputs)
    grid = (inputs // halves.outputs * box.count_tiles(client_images, height, width), 4 * rows.active)
    launch(
        input_gradient_of_halves, grid,
        dy_boxes, weights, second_boxes, second_weights, _describe_halves(dx, box, halves.outputs), rows.valid, height,
        width, inputs, layer.out_channels, client_images, per_example, size=layer.kernel_size[0],
        has_second=shortcut is not None, **box.constants, tile_inputs=halves.outputs, tile_outputs=halves.inputs,
        num_warps=halves.num_warps, num_stages=halves.num_stages,
    )  # fmt: skip
    return dx


@dataclass(frozen=True)
class GradientTiles:
    """How a weight gradient is cut into programs."""

    box: Box
    outputs: int
    inputs: int


def choose_box_gradient_tiles(layer: StackedConv2d, x: Tensor) -> GradientTiles | None:
    """Return the tiles of a weight gradient, by measurement on an H200; None if the other kernel is faster."""
    client_images, stride = x.shape[0] // layer.rows.active, layer.stride[0]
    height, width = x.shape[2] // stride, x.shape[3] // stride
    positions, tile_inputs = client_images * height * width, 64
    if layer.out_channels % 128 or (layer.in_channels % 128 and positions < LARGE_MAP):
        return None
    if layer.in_channels % 128 == 0:
        programs = (
            layer.kernel_size[0] ** 2 * (layer.in_channels // 128) * (layer.out_channels // 128) * layer.rows.active
        )
        tile_inputs = 128 if positions >= MANY_POSITIONS or programs >= MANY_PROGRAMS else 64
    box = choose_box(64 if layer.in_channels % 128 == 0 else 128, client_images, height, width)
    return None if box is None else GradientTiles(box, 128, tile_inputs)


def launch_weight_gradient_of_boxes(
    layer: StackedConv2d, x: Tensor, dy: Tensor, tiles: GradientTiles, chunk_tiles: int, chunks: int, out: Tensor,
    out_client: int, out_chunk: int,
) -> None:  # fmt: skip
    """Write the sums of each chunk of positions, `[clients, chunks, outputs, taps, inputs]`, to `out`."""
    rows, (client_images, per_example) = layer.rows, _count_images(dy, layer.rows)
    box, (height, width), stride = tiles.box, dy.shape[2:], layer.stride[0]
    is_contiguous = box.is_contiguous(height, width)
    x_boxes = _describe_maps(x, box, tiles.inputs) if stride == 1 else _describe_halves(x, box, tiles.inputs)
    if is_contiguous:
        flat = dy.permute(0, 2, 3, 1).flatten(0, 2)
        dy_boxes = TensorDescriptor.from_tensor(flat, [box.count_positions(), tiles.outputs])
    else:
        dy_boxes = _describe_maps(dy, box, tiles.outputs)
    launch(
        weight_gradient_of_boxes, (count_gradient_programs(layer, tiles), chunks, rows.active),
        x_boxes, dy_boxes, out, rows.valid, height, width, layer.in_channels, layer.out_channels, client_images,
        per_example, out_client, out_chunk, chunk_tiles, stride=stride, size=layer.kernel_size[0],
        is_contiguous=is_contiguous, **box.constants, tile_outputs=tiles.outputs, tile_inputs=tiles.inputs,
        num_warps=4, num_stages=3,
    )  # fmt: skip


def count_gradient_programs(layer: StackedConv2d, tiles: GradientTiles) -> int:
    """Return how many tiles the weights of a client have, over all taps."""
    return layer.kernel_size[0] ** 2 * (layer.in_channels // tiles.inputs) * (layer.out_channels // tiles.outputs)


@triton.jit
def find_tile(tile, height, width, images: tl.constexpr, box_height: tl.constexpr, box_width: tl.constexpr):
    """Return the first image, row and column of a tile."""
    across, down = width // box_width, height // box_height
    return tile // (across * down) * images, tile // across % down * box_height, tile % across * box_width


@triton.jit
def load_box(
    x, image, row, column, channel, down, right, inputs, stride: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr
):
    """Return the positions `[rows, tile]` of the input that belong to a box of the output, shifted down and right by a tap.

    With stride 2 row `2 * i + down` is row `i - 1` of the odd ones if `down` is -1, and row `i` of the even or odd ones else.
    """
    if stride == 1:
        box = x.load([image, row + down, column + right, channel])
    else:
        odd_row, odd_column = (down + 2) % 2, (right + 2) % 2
        above, left = row + (down + 2) // 2 - 1, column + (right + 2) // 2 - 1
        box = x.load([image, above, odd_row, left, odd_column * inputs + channel])
    return box.reshape(rows, tile)


@triton.jit(do_not_specialize=["height", "width", "client_images", "per_example", "chunks"])
def multiply_boxes(
    x, w, y, added, moments, valid, height, width, inputs, outputs, client_images, per_example, chunks,
    stride: tl.constexpr, size: tl.constexpr, flip: tl.constexpr, has_added: tl.constexpr, has_moments: tl.constexpr,
    images: tl.constexpr, box_height: tl.constexpr, box_width: tl.constexpr,
    tile_outputs: tl.constexpr, tile_inputs: tl.constexpr,
):  # fmt: skip
    """Compute `y = x * w + added`; `flip`: the gradient of the input of a convolution with stride 1, `x` being the output's.

    The products are 0 in tiles that are all padding. `moments` receives the tile's, without padding.
    """
    rows: tl.constexpr = images * box_height * box_width
    output_tiles, client = outputs // tile_outputs, tl.program_id(1)
    output = tl.program_id(0) % output_tiles * tile_outputs
    tile = tl.program_id(0) // output_tiles
    image, row, column = find_tile(tile, height, width, images, box_height, box_width)
    first = client * client_images + image
    total = tl.zeros((tile_outputs, rows), dtype=tl.float32)
    used_images = tl.minimum(tl.maximum(tl.load(valid + client) * per_example - image, 0), images)
    steps = tl.where(used_images > 0, size * size * (inputs // tile_inputs), 0)
    for step in range(0, steps):
        tap, channel = step % (size * size), step // (size * size) * tile_inputs
        down, right = tap // size - size // 2, tap % size - size // 2
        positions = load_box(x, first, row, column, channel, down, right, inputs, stride, rows, tile_inputs)
        if flip:
            weights = w.load([client, channel, (size * size - 1 - tap) * outputs + output])
            total = tl.dot(weights.reshape(tile_inputs, tile_outputs).T, positions.T, total)
        else:
            weights = w.load([client, output, tap * inputs + channel])
            total = tl.dot(weights.reshape(tile_outputs, tile_inputs), positions.T, total)
    if has_moments:
        at = moments + (client.to(tl.int64) * 2 * chunks + tile) * outputs + output + tl.arange(0, tile_outputs)
        used_rows = used_images * box_height * box_width
        store_moments(at, total.T, used_rows, chunks * outputs, tl.arange(0, tile_outputs) >= 0, rows)
    result = total.T
    if has_added:
        result += added.load([first, row, column, output]).reshape(rows, tile_outputs).to(tl.float32)
    y.store([first, row, column, output], result.to(y.dtype).reshape(images, box_height, box_width, tile_outputs))


@triton.jit(do_not_specialize=["height", "width", "client_images", "per_example"])
def input_gradient_of_halves(
    dy, w, second_dy, second_w, dx, valid, height, width, inputs, outputs, client_images, per_example,
    size: tl.constexpr, has_second: tl.constexpr,
    images: tl.constexpr, box_height: tl.constexpr, box_width: tl.constexpr,
    tile_inputs: tl.constexpr, tile_outputs: tl.constexpr,
):  # fmt: skip
    """Compute the input's gradient of a convolution with stride 2, plus that of a second one, which is 1 x 1.

    Pixels of one parity have the same taps: 1, 2, 2 or 4 of the 9 of a 3 x 3 kernel; the second one has even pixels only.
    """
    rows: tl.constexpr = images * box_height * box_width
    input_tiles, client, parity = inputs // tile_inputs, tl.program_id(1) // 4, tl.program_id(1) % 4
    down, right, blocks = parity // 2, parity % 2, outputs // tile_outputs
    input = tl.program_id(0) % input_tiles * tile_inputs
    image, row, column = find_tile(tl.program_id(0) // input_tiles, height, width, images, box_height, box_width)
    first = client * client_images + image
    total = tl.zeros((tile_inputs, rows), dtype=tl.float32)
    taps_down = 1 + down if size == 3 else 1 - down
    taps_right = 1 + right if size == 3 else 1 - right
    is_used = image < tl.load(valid + client) * per_example
    steps = tl.where(is_used, taps_down * taps_right * blocks, 0)
    for step in range(0, steps):
        number, channel = step // blocks, step % blocks * tile_outputs
        tap, above, left = 0, row, column
        if size == 3:
            tap = (1 - down + 2 * (number // taps_right)) * 3 + 1 - right + 2 * (number % taps_right)
            above, left = row + down - number // taps_right, column + right - number % taps_right
        gradient = dy.load([first, above, left, channel]).reshape(rows, tile_outputs)
        weights = w.load([client, channel, tap * inputs + input]).reshape(tile_outputs, tile_inputs)
        total = tl.dot(weights.T, gradient.T, total)
    if has_second:
        steps = tl.where(is_used and parity == 0, blocks, 0)
        for step in range(0, steps):
            gradient = second_dy.load([first, row, column, step * tile_outputs]).reshape(rows, tile_outputs)
            weights = second_w.load([client, step * tile_outputs, input]).reshape(tile_outputs, tile_inputs)
            total = tl.dot(weights.T, gradient.T, total)
    result = total.to(dx.dtype).T.reshape(images, box_height, 1, box_width, tile_inputs)
    dx.store([first, row, down, column, right * inputs + input], result)


@triton.jit(do_not_specialize=["height", "width", "client_images", "per_example", "out_chunk", "chunk_tiles"])
def weight_gradient_of_boxes(
    x, dy, out, valid, height, width, inputs, outputs, client_images, per_example, out_client, out_chunk, chunk_tiles,
    stride: tl.constexpr, size: tl.constexpr, is_contiguous: tl.constexpr,
    images: tl.constexpr, box_height: tl.constexpr, box_width: tl.constexpr,
    tile_outputs: tl.constexpr, tile_inputs: tl.constexpr,
):  # fmt: skip
    """Compute one tap's gradient of the weights over a chunk of tiles. In padding the output's gradient is 0.

    `is_contiguous`: a tile's positions follow one another, so `dy` is `[positions, outputs]`, which is faster.
    """
    rows: tl.constexpr = images * box_height * box_width
    chunk, client = tl.program_id(1), tl.program_id(2)
    input_tiles, output_tiles = inputs // tile_inputs, outputs // tile_outputs
    input, tap = tl.program_id(0) % input_tiles * tile_inputs, tl.program_id(0) // (input_tiles * output_tiles)
    output = tl.program_id(0) // input_tiles % output_tiles * tile_outputs
    down, right = tap // size - size // 2, tap % size - size // 2
    used_images = tl.load(valid + client) * per_example
    tiles_of_image = (height // box_height) * (width // box_width)
    last = tl.minimum((chunk + 1) * chunk_tiles, tl.cdiv(used_images, images) * tiles_of_image)
    total = tl.zeros((tile_outputs, tile_inputs), dtype=tl.float32)
    for tile in range(chunk * chunk_tiles, last):
        image, row, column = find_tile(tile, height, width, images, box_height, box_width)
        first = client * client_images + image
        if is_contiguous:
            gradient = dy.load([client * client_images * height * width + tile * rows, output])
        else:
            gradient = dy.load([first, row, column, output]).reshape(rows, tile_outputs)
        positions = load_box(x, first, row, column, input, down, right, inputs, stride, rows, tile_inputs)
        total = tl.dot(gradient.T, positions, total)
    o, i = output + tl.arange(0, tile_outputs), input + tl.arange(0, tile_inputs)
    at = client.to(tl.int64) * out_client + chunk * out_chunk + tap * inputs
    tl.store(out + at + o[:, None] * (size * size * inputs) + i[None, :], total)
