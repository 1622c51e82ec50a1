"""The batches of all clients in a step of a cohort, stacked.

The device holds which step it is and which examples it has.
"""

import torch
from torch import Tensor

from fedheal.core.import_path import import_triton_kernels
from fedheal.engine.device_data import DeviceData
from fedheal.models.client_rows import ClientRows

KERNELS = "fedheal.engine._cohort_batch_cuda"


def make_stacked_batch(
    data: DeviceData, plan: Tensor, counts: Tensor, cursor: Tensor, rows: ClientRows, dtype: torch.dtype,
    uses_kernels: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Make a step's batch of the active clients, one after the other, and set how many examples count in `rows.valid`.

    Args:
        data: The examples.
        plan: The plans of all steps, `[steps, clients, 4, batch_size]`, see `DeviceData.make_batch`.
        counts: How many examples of each batch count, `[steps, clients]`; the rest is padding.
        cursor: The number of the step, `[1]`.
        rows: The clients.
        dtype: What the images are converted to after they are normalised in float32.
        uses_kernels: Whether a kernel may be used, which makes the same numbers.

    Returns:
        Images `[active * batch_size, channels, height, width]` and labels.
    """
    kernels = import_triton_kernels(KERNELS, rows.params.device.type) if uses_kernels else None
    if kernels is not None and kernels.supports_batch(data, dtype):
        gathered: tuple[Tensor, Tensor] = kernels.gather_stacked_batch(data, plan, counts, cursor, rows, dtype)
        return gathered
    rows.valid.copy_(counts.index_select(0, cursor)[0])
    planned = plan.index_select(0, cursor)[0, : rows.active]
    x, y = data.make_batch(planned.transpose(0, 1).reshape(4, -1))
    return x.to(dtype), y
