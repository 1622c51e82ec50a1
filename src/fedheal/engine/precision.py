"""How exact the arithmetic on a GPU is: `fp32`, `tf32` (matrix units, 10 bits of mantissa) or `bf16` (autocast).

Parameters, gradients' accumulation and the optimiser are float32 throughout; in `bf16` the forward pass and what it saves are
bfloat16. torch keeps these switches for the whole process, so they are set for the length of a run and put back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

PRECISIONS = ("fp32", "tf32", "bf16")


def precision_of(asked: str, device: torch.device) -> str:
    """`auto` is tf32 on a GPU and fp32 elsewhere, where the others mean nothing."""
    if asked == "auto":
        return "tf32" if device.type == "cuda" else "fp32"
    if asked not in PRECISIONS:
        raise ValueError(f"precision = {asked!r}: use 'auto' or one of {list(PRECISIONS)}")
    if asked != "fp32" and device.type != "cuda":
        raise ValueError(f"precision = '{asked}' needs a GPU, and this run is on '{device}'; 'auto' or 'fp32' will do")
    return asked


@contextmanager
def numerics(precision: str, deterministic: bool, device: torch.device) -> Iterator[None]:
    """Arithmetic of that precision; `deterministic` gives the same bits again, and costs speed."""
    if device.type != "cuda":
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.deterministic
    strict = torch.are_deterministic_algorithms_enabled()
    fast = precision != "fp32"
    if deterministic:
        # cuBLAS asks for it on its first call, and gives the same bits on several streams only with it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        cudnn.allow_tf32, matmul.allow_tf32 = fast, fast
        cudnn.benchmark, cudnn.deterministic = not deterministic, deterministic
        torch.use_deterministic_algorithms(deterministic or strict)
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.deterministic = before
        torch.use_deterministic_algorithms(strict)


def lowered(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Where a network is applied."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
