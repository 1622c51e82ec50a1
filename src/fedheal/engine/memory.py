"""Release GPU memory that is no longer used."""

import gc

import torch


def release_gpu_memory() -> None:
    """Return cached memory to the device, with the cuBLAS workspaces, of which each stream has one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
