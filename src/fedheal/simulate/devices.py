"""Devices by name."""

import os
import platform

import torch


def resolve_device(name: str) -> torch.device:
    """Return the device of that name (`auto` is a GPU where there is one); raise ValueError if it cannot be used here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # For a GPU torch says why: no driver, no such index, in use. For any other name it lists devices no run can use.
        reason = f" ({str(error).splitlines()[0].rstrip('.')})" if name.startswith("cuda") else ""
        raise ValueError(f"device = {name!r} cannot be used here{reason}: use {_list_devices()}") from error
    return device


def _list_devices() -> str:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return "auto or cpu (cuda and cuda:N need a GPU that torch can use, and here is none)"
    return f"auto, cpu, cuda or {'cuda:0' if gpus == 1 else f'cuda:0 to cuda:{gpus - 1}'}"


def describe_hardware(device: torch.device) -> str:
    """Return the name of the GPU, or the processor and its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
