"""The Triton kernels of `stacked_kernels`: one launch per layer for all clients, each with its own weights.

Feature maps are `[clients, images, height, width, channels]`. A convolution's weights are `[clients, outputs, taps, inputs]`,
where a tap is a position of the kernel; rows of different clients may lie apart. Sums have a fixed order, so results repeat bit
for bit. Matrix products accumulate in float32. Of a number the compiler knows only whether 16 divides it, so those of channels
that 16 does not divide are constants (`narrow`): it then sees which ones are next to each other, and loads them together. The
sizes of maps are constants, too, where kernels divide by them.
"""

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

SHAPES = ["rows", "positions", "height", "width", "out_height", "out_width"]


@triton.jit
def find_packed_inputs(i, image, top, left, is_row, height, width, inputs, size: tl.constexpr):
    """Return where the inputs of all taps lie that output positions need, and which of them are inside the image."""
    row, column = top[:, None] + (i // inputs // size)[None, :], left[:, None] + (i // inputs % size)[None, :]
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width) & is_row[:, None]
    at = (((image * height)[:, None] + row) * width + column) * inputs + (i % inputs)[None, :]
    return at, inside & (i < size * size * inputs)[None, :]


@triton.jit
def store_moments(at, total, used_rows, apart, known, rows: tl.constexpr):
    """Store the mean and, `apart` from it, the sum of squared deviations of a tile's first rows, those that are no padding."""
    used_rows = tl.minimum(tl.maximum(used_rows, 0), rows)
    is_used = (tl.arange(0, rows) < used_rows)[:, None]
    mean = tl.sum(tl.where(is_used, total, 0.0), axis=0) / tl.maximum(used_rows, 1)
    difference = tl.where(is_used, total - mean[None, :], 0.0)
    tl.store(at, mean, mask=known)
    tl.store(at + apart, tl.sum(difference * difference, axis=0), mask=known)


@triton.jit(do_not_specialize=["rows", "positions", "stride"])
def convolve(
    x, w, y, moments, valid, rows, positions, stride, inputs, outputs,
    x_client, w_client, y_client, w_input, w_tap, w_output,
    height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    size: tl.constexpr, flip: tl.constexpr, packed: tl.constexpr, precision: tl.constexpr, has_moments: tl.constexpr,
    even_inputs: tl.constexpr, even_outputs: tl.constexpr, narrow_inputs: tl.constexpr, narrow_outputs: tl.constexpr,
    tile_rows: tl.constexpr, tile_outputs: tl.constexpr, tile_inputs: tl.constexpr,
):  # fmt: skip
    """Compute `y = x * w`; with `flip` the gradient of the input of a convolution with stride 1, `x` being that of the output.

    The result is 0 in tiles that are all padding. `packed`: the inputs of all taps, if they are few, make one product.
    `moments` receives the tile's, without padding.
    """
    inputs = narrow_inputs if narrow_inputs > 0 else inputs
    outputs = narrow_outputs if narrow_outputs > 0 else outputs
    client = tl.program_id(2).to(tl.int64)
    x += client * x_client
    w += client * w_client
    y += client * y_client
    m = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    n = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    k = tl.arange(0, tile_inputs)
    image, position = m // (out_height * out_width), m % (out_height * out_width)
    top, left = position // out_width * stride - size // 2, position % out_width * stride - size // 2
    first = image * height * width
    total = tl.zeros((tile_rows, tile_outputs), dtype=tl.float32)
    is_used = tl.program_id(0) * tile_rows < tl.load(valid + client) * positions
    if packed:
        if is_used:
            at, inside = find_packed_inputs(k, image, top, left, m < rows, height, width, inputs, size)
            known = (k < size * size * inputs)[:, None] & (n < outputs)[None, :]
            b = tl.load(w + k[:, None] + n[None, :] * w_output, mask=known, other=0.0)
            total = tl.dot(tl.load(x + at, mask=inside, other=0.0), b, total, input_precision=precision)
    else:
        blocks = tl.cdiv(inputs, tile_inputs)
        steps = tl.where(is_used, size * size * blocks, 0)
        for step in range(0, steps):
            tap, channel = step % (size * size), step // (size * size) * tile_inputs + k
            row, column = top + tap // size, left + tap % size
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width) & (m < rows)
            at = ((first + row * width + column) * inputs)[:, None] + channel[None, :]
            weight_tap = size * size - 1 - tap if flip else tap
            weight_at = channel[:, None] * w_input + weight_tap * w_tap + n[None, :] * w_output
            if even_inputs:
                a = tl.load(x + at, mask=inside[:, None], other=0.0)
            else:
                a = tl.load(x + at, mask=inside[:, None] & (channel < inputs)[None, :], other=0.0)
            if even_inputs and even_outputs:
                b = tl.load(w + weight_at)
            else:
                b = tl.load(w + weight_at, mask=(channel < inputs)[:, None] & (n < outputs)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=precision)
    if has_moments:
        used_rows = tl.minimum(tl.load(valid + client) * positions, rows) - tl.program_id(0) * tile_rows
        at = moments + (client * 2 * tl.num_programs(0) + tl.program_id(0)) * outputs + n
        store_moments(at, total, used_rows, tl.num_programs(0) * outputs, n < outputs, tile_rows)
    mask = (m < rows)[:, None]
    if not even_outputs:
        mask = mask & (n < outputs)[None, :]
    tl.store(y + m.to(tl.int64)[:, None] * outputs + n[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SHAPES)
def input_gradient_of_stride_2(
    dy, w, dx, valid, rows, positions, height, width, out_height, out_width, inputs, outputs,
    x_client, w_client, y_client, w_input, w_tap, w_output,
    size: tl.constexpr, precision: tl.constexpr, even_inputs: tl.constexpr, even_outputs: tl.constexpr,
    tile_rows: tl.constexpr, tile_inputs: tl.constexpr, tile_outputs: tl.constexpr,
):  # fmt: skip
    """Compute the input's gradient. Pixels of one parity have the same taps: 1, 2, 2 or 4 of the 9 of a 3 x 3 kernel."""
    client, parity = (tl.program_id(2) // 4).to(tl.int64), tl.program_id(2) % 4
    down, right = parity // 2, parity % 2
    dy += client * y_client
    w += client * w_client
    dx += client * x_client
    half_height, half_width = (height + 1) // 2, (width + 1) // 2
    m = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    n = tl.program_id(1) * tile_inputs + tl.arange(0, tile_inputs)
    k = tl.arange(0, tile_outputs)
    image, position = m // (half_height * half_width), m % (half_height * half_width)
    i, j = position // half_width, position % half_width
    first = image * out_height * out_width
    total = tl.zeros((tile_rows, tile_inputs), dtype=tl.float32)
    blocks = tl.cdiv(outputs, tile_outputs)
    taps_down = 1 + down if size == 3 else 1 - down
    taps_right = 1 + right if size == 3 else 1 - right
    is_used = tl.program_id(0) * tile_rows < tl.load(valid + client) * positions
    steps = tl.where(is_used, taps_down * taps_right * blocks, 0)
    for step in range(0, steps):
        number, channel = step // blocks, (step % blocks) * tile_outputs + k
        a_down, a_right = number // taps_right, number % taps_right
        tap, row, column = 0, i, j
        if size == 3:
            tap = (1 - down + 2 * a_down) * 3 + (1 - right + 2 * a_right)
            row, column = i + down - a_down, j + right - a_right
        inside = (row < out_height) & (column < out_width) & (m < rows)
        at = ((first + row * out_width + column) * outputs)[:, None] + channel[None, :]
        weight_at = channel[:, None] * w_output + tap * w_tap + n[None, :] * w_input
        if even_outputs:
            a = tl.load(dy + at, mask=inside[:, None], other=0.0)
        else:
            a = tl.load(dy + at, mask=inside[:, None] & (channel < outputs)[None, :], other=0.0)
        if even_inputs and even_outputs:
            b = tl.load(w + weight_at)
        else:
            b = tl.load(w + weight_at, mask=(channel < outputs)[:, None] & (n < inputs)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=precision)
    h, v = 2 * i + down, 2 * j + right
    pixel = (image * height + h) * width + v
    mask = ((m < rows) & (h < height) & (v < width))[:, None]
    if not even_inputs:
        mask = mask & (n < inputs)[None, :]
    tl.store(dx + pixel.to(tl.int64)[:, None] * inputs + n[None, :], total.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def choose_scale(largest):
    """Return the power of two that brings numbers of at most this size to below 2^15, near the top of float16."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    return (tl.minimum(254 + 14 - exponent, 253) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_to_half(x, largest, half, length, block: tl.constexpr):
    """Write `x` as float16, which has the digits of tf32 but fewer powers: scaled by each client's largest number."""
    client = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * block + tl.arange(0, block)
    v = tl.load(x + client * length + i, mask=i < length, other=0.0) * choose_scale(tl.load(largest + client))
    tl.store(half + client * length + i, v.to(tl.float16), mask=i < length)


@triton.jit
def turn(w, turned, w_client, outputs, columns, tile: tl.constexpr):
    """Transpose each client's matrix `[outputs, columns]`."""
    client = tl.program_id(2).to(tl.int64)
    o, c = tl.program_id(0) * tile + tl.arange(0, tile), tl.program_id(1) * tile + tl.arange(0, tile)
    known = (o < outputs)[:, None] & (c < columns)[None, :]
    v = tl.load(w + client * w_client + o[:, None] * columns + c[None, :], mask=known, other=0.0)
    turned += client * outputs * columns
    tl.store(turned + c[:, None] * outputs + o[None, :], tl.trans(v), mask=tl.trans(known))


@triton.jit
def store_gradient(dw, total, o, i, columns, is_known, x_scale, dy_scale):
    """Write a tile of a weight gradient, without the scales of the inputs."""
    tl.store(dw + o[:, None] * columns + i[None, :], total / x_scale / dy_scale, mask=is_known)


@triton.jit(do_not_specialize=["rows", "positions", "chunk_rows", "stride", "dw_chunk"])
def weight_gradient(
    x, dy, x_largest, dy_largest, dw, valid, rows, positions, chunk_rows, stride, inputs, outputs, x_client, y_client,
    dw_client, dw_chunk, height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    size: tl.constexpr, columns: tl.constexpr, packed: tl.constexpr, scaled: tl.constexpr, precision: tl.constexpr,
    even_inputs: tl.constexpr, even_outputs: tl.constexpr, narrow_inputs: tl.constexpr, narrow_outputs: tl.constexpr,
    tile_outputs: tl.constexpr, tile_inputs: tl.constexpr, tile_rows: tl.constexpr,
):  # fmt: skip
    """Compute the weights' gradient over one chunk of the output's positions, without padding.

    A program has one tap, or the three `columns` of a row of taps, which share the output's gradient; `packed`: all taps.
    `scaled`: the inputs were scaled by their largest numbers (`scale_to_half`). Every step divides by the output's size, which
    is a constant here: that is a third faster.
    """
    inputs = narrow_inputs if narrow_inputs > 0 else inputs
    outputs = narrow_outputs if narrow_outputs > 0 else outputs
    chunk, client = tl.program_id(1), tl.program_id(2).to(tl.int64)
    input_tiles = 1 if packed else tl.cdiv(inputs, tile_inputs)
    tiles = input_tiles * tl.cdiv(outputs, tile_outputs)
    tap, tile = tl.program_id(0) // tiles * columns, tl.program_id(0) % tiles
    x += client * x_client
    dy += client * y_client
    dw += client * dw_client + chunk * dw_chunk
    o = (tile // input_tiles) * tile_outputs + tl.arange(0, tile_outputs)
    i = (tile % input_tiles) * tile_inputs + tl.arange(0, tile_inputs)
    total = tl.zeros((tile_outputs, tile_inputs), dtype=tl.float32)
    if columns == 3:
        second, third = total, total
    last = tl.minimum((chunk + 1) * chunk_rows, tl.minimum(rows, tl.load(valid + client) * positions))
    for start in range(chunk * chunk_rows, last, tile_rows):
        m = start + tl.arange(0, tile_rows)
        image, position = m // (out_height * out_width), m % (out_height * out_width)
        top, left = position // out_width * stride - size // 2, position % out_width * stride - size // 2
        a_mask = (m < last)[:, None] if even_outputs else (m < last)[:, None] & (o < outputs)[None, :]
        a = tl.trans(tl.load(dy + m[:, None] * outputs + o[None, :], mask=a_mask, other=0.0))
        if packed:
            b_at, b_mask = find_packed_inputs(i, image, top, left, m < last, height, width, inputs, size)
        else:
            row, column = top + tap // size, left + tap % size
            in_row = (row >= 0) & (row < height) & (m < last)
            b_mask = (in_row & (column >= 0) & (column < width))[:, None]
            b_mask = b_mask if even_inputs else b_mask & (i < inputs)[None, :]
            b_at = (((image * height + row) * width + column) * inputs)[:, None] + i[None, :]
        total = tl.dot(a, tl.load(x + b_at, mask=b_mask, other=0.0), total, input_precision=precision)
        if columns == 3:  # the first column is the tap's; the second is always inside, the third if it is not the last
            b = tl.load(x + b_at + inputs, mask=in_row[:, None], other=0.0)
            second = tl.dot(a, b, second, input_precision=precision)
            b = tl.load(x + b_at + 2 * inputs, mask=(in_row & (column + 2 < width))[:, None], other=0.0)
            third = tl.dot(a, b, third, input_precision=precision)
    x_scale, dy_scale = 1.0, 1.0
    if scaled:
        x_scale, dy_scale = choose_scale(tl.load(x_largest + client)), choose_scale(tl.load(dy_largest + client))
    all_inputs = size * size * inputs
    is_known = (o < outputs)[:, None] & (i < (all_inputs if packed else inputs))[None, :]
    store_gradient(dw + tap * inputs, total, o, i, all_inputs, is_known, x_scale, dy_scale)
    if columns == 3:
        store_gradient(dw + (tap + 1) * inputs, second, o, i, all_inputs, is_known, x_scale, dy_scale)
        store_gradient(dw + (tap + 2) * inputs, third, o, i, all_inputs, is_known, x_scale, dy_scale)


@triton.jit(do_not_specialize=["chunks"])
def add_chunks(sums, out, chunks, length, out_client, tile_chunks: tl.constexpr, block: tl.constexpr):
    """Add the sums `[clients, chunks, length]` of each client's chunks."""
    client = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros((block,), dtype=tl.float32)
    for start in range(0, chunks, tile_chunks):
        c = start + tl.arange(0, tile_chunks)
        known = (c < chunks)[:, None] & (i < length)[None, :]
        at = (client * chunks + c)[:, None] * length + i[None, :]
        total += tl.sum(tl.load(sums + at, mask=known, other=0.0), axis=0)
    tl.store(out + client * out_client + i, total, mask=i < length)


@triton.jit
def take_sgd_step(
    weights, gradients, velocity, low, valid, lr, length, momentum, weight_decay, has_low: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Take a step of SGD with momentum for the clients that have examples in it; keep a copy in lower precision."""
    client = tl.program_id(1)
    if tl.load(valid + client) > 0:
        i = tl.program_id(0) * block + tl.arange(0, block)
        at, known = client.to(tl.int64) * length + i, i < length
        p = tl.load(weights + at, mask=known)
        v = momentum * tl.load(velocity + at, mask=known)
        v += tl.load(gradients + at, mask=known) + weight_decay * p
        p -= tl.load(lr) * v
        tl.store(velocity + at, v, mask=known)
        tl.store(weights + at, p, mask=known)
        if has_low:
            tl.store(low + at, p.to(low.dtype.element_ty), mask=known)
