"""The Triton kernel of `cohort_batch`: one launch reads the plan, gathers the examples and normalises them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedheal.engine.device_data import DeviceData
from fedheal.models.client_rows import ClientRows
from fedheal.models.kernel_launches import allocate_output, launch

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

FLOATS = (torch.float32, torch.bfloat16)
BLOCK = 1024  # bytes of an image


def supports_batch(data: DeviceData, dtype: torch.dtype) -> bool:
    """Return whether the kernel makes batches of these examples in this dtype."""
    return dtype in FLOATS and data.images.shape[3] == data.pixel_values.shape[1]


def gather_stacked_batch(
    data: DeviceData, plan: Tensor, counts: Tensor, cursor: Tensor, rows: ClientRows, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return images and labels of the active clients, and set `rows.valid` for them."""
    _, clients, _, batch_size = plan.shape
    _, padded_height, padded_width, channels = data.images.shape
    number, height, width = rows.active * batch_size, data.height, data.width
    x = allocate_output((number, height, width, channels), dtype, plan.device)
    y = allocate_output((number,), data.labels.dtype, plan.device)
    launch(
        gather_examples, (batch_size, triton.cdiv(height * width * channels, BLOCK), rows.active),
        data.images, data.labels, data.pixel_values, plan, counts, cursor, x, y, rows.valid, clients, batch_size,
        padded_height, padded_width, height=height, width=width, channels=channels, block=BLOCK,
    )  # fmt: skip
    return x.permute(0, 3, 1, 2), y


@triton.jit
def gather_examples(
    images, labels, pixel_values, plan, counts, cursor, x, y, valid, clients, batch_size, padded_height, padded_width,
    height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write a part of one example's image, shifted, mirrored and normalised; its label; and how many examples count."""
    example, part, client = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    of_client = tl.load(cursor) * clients + client
    planned = plan + of_client * 4 * batch_size + example
    index, top = tl.load(planned), tl.load(planned + batch_size)
    left, mirrored = tl.load(planned + 2 * batch_size), tl.load(planned + 3 * batch_size)
    i = part * block + tl.arange(0, block)
    inside = i < height * width * channels
    row, column, channel = i // channels // width, i // channels % width, i % channels
    column = tl.where(mirrored > 0, width - 1 - column, column)
    at = ((index * padded_height + top + row) * padded_width + left + column) * channels + channel
    byte = tl.load(images + at, mask=inside, other=0).to(tl.int32)
    value = tl.load(pixel_values + byte * channels + channel, mask=inside, other=0.0)
    number = client * batch_size + example
    tl.store(x + number.to(tl.int64) * (height * width * channels) + i, value.to(x.dtype.element_ty), mask=inside)
    if part == 0:
        tl.store(y + number, tl.load(labels + index))
        if example == 0:
            tl.store(valid + client, tl.load(counts + of_client))
