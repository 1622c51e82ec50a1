"""The loss of each client in a stacked batch."""

from torch import Tensor
from torch.nn import functional

from fedheal.core.import_path import import_triton_kernels
from fedheal.models.client_rows import ClientRows

KERNELS = "fedheal.engine._cohort_loss_cuda"


def compute_client_losses(
    logits: Tensor, labels: Tensor, rows: ClientRows, totals: Tensor, cursor: Tensor, is_whole: bool,
    uses_kernels: bool = True,
) -> Tensor:  # fmt: skip
    """Return the mean cross-entropy of each active client's examples without padding, `[active]`; 0 without examples.

    Args:
        logits: Of all examples, client after client.
        labels: Their classes.
        rows: The clients.
        totals: `[clients]`, to which the losses are added.
        cursor: `[1]`, the number of the step, which becomes that of the next.
        is_whole: Whether gradients are taken of the sum of these losses and of nothing else.
        uses_kernels: Whether a kernel may be used.
    """
    kernels = import_triton_kernels(KERNELS, logits.device.type) if uses_kernels else None
    if kernels is not None and kernels.supports_losses(logits, rows):
        fused: Tensor = kernels.ClientLosses.apply(logits, labels, rows, totals, cursor, is_whole)
        return fused
    losses = functional.cross_entropy(logits.to(rows.params.dtype), labels, reduction="none")
    losses = losses.view(rows.active, rows.batch_size).where(rows.find_padding(rows.batch_size), 0.0)
    means = losses.sum(dim=1) / rows.valid[: rows.active].clamp(min=1)
    totals[: rows.active].add_(means.detach())
    cursor.add_(1)
    return means
