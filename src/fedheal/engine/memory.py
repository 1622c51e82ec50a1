"""A GPU's memory that is no longer used, given back to whoever else wants it."""

from __future__ import annotations

import gc

import torch


def give_back() -> None:
    """What torch has cached goes back to the device, cuBLAS's workspaces included, of which each stream had one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
