"""The precision of arithmetic on a GPU: `fp32`, `tf32` (matrix units, 10 bits of mantissa) or `bf16` (autocast).

Parameters, the accumulation of gradients and the optimiser are float32 throughout. In `bf16` the forward pass and what
it saves are bfloat16. torch keeps these settings for the whole process, so a run sets them and restores them at its
end.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

PRECISIONS = ("fp32", "tf32", "bf16")


def resolve_precision(precision: str, device: torch.device) -> str:
    """Return the precision to use; `auto` is tf32 on a GPU and fp32 elsewhere, where the others have no effect."""
    if precision == "auto":
        return "tf32" if device.type == "cuda" else "fp32"
    if precision not in PRECISIONS:
        raise ValueError(f"precision = {precision!r}: use 'auto' or one of {list(PRECISIONS)}")
    if precision != "fp32" and device.type != "cuda":
        raise ValueError(f"precision = '{precision}' needs a GPU, but this run uses '{device}'; use 'auto' or 'fp32'")
    return precision


@contextmanager
def use_precision(precision: str, deterministic: bool, device: torch.device) -> Iterator[None]:
    """Set torch's precision for the context; `deterministic` makes runs repeat bit for bit, at some cost in speed."""
    if device.type != "cuda":
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.deterministic
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    allow_tf32 = precision != "fp32"
    if deterministic:
        # cuBLAS reads this on its first call, and repeats its bits on several streams only with it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        cudnn.allow_tf32, matmul.allow_tf32 = allow_tf32, allow_tf32
        cudnn.benchmark, cudnn.deterministic = not deterministic, deterministic
        torch.use_deterministic_algorithms(deterministic or was_deterministic)
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.deterministic = before
        torch.use_deterministic_algorithms(was_deterministic)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a network is applied."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
