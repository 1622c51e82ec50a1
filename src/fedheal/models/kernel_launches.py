"""Launch Triton kernels, or only compile those that a function would launch, several at a time."""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

COMPILERS = 12  # threads
PROGRAMS = 1024  # about as many as fill a GPU with matrix products

Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]
_recorded: list[Launch] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Launch a kernel, or record it for `compile_in_parallel`."""
    if _recorded is None:
        kernel[grid](*args, **settings)
    else:
        _recorded.append((kernel, grid, args, settings))


def allocate_output(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory that a kernel fills: zeros where it is only compiled, since what follows may use them as indices."""
    allocate = torch.empty if _recorded is None else torch.zeros
    return allocate(*shape, dtype=dtype, device=device)


def compile_in_parallel(
    run: Callable[[], object], device: torch.device, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Compile the kernels that `run` launches, several at a time; none is launched, so what it computes is arbitrary.

    Args:
        run: Launches the kernels.
        device: Where they will run.
        meanwhile: Called while they are compiled.
    """
    global _recorded  # noqa: PLW0603 -- launches happen deep inside a network's backward pass
    launches: list[Launch] = []
    _recorded = launches
    try:
        run()
    finally:
        _recorded = None
    with ThreadPoolExecutor(COMPILERS) as pool:
        made = [pool.submit(_compile, recorded, device) for recorded in _select_distinct(launches)]
        meanwhile()
        for compiled in made:
            compiled.result()


def _compile(recorded: Launch, device: torch.device) -> None:
    """Compile a kernel and load it; Triton also compiles a host function that launches it, which takes as long."""
    kernel, grid, args, settings = recorded
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _ = kernel.warmup(*args, grid=grid, **settings).run


def _select_distinct(launches: Sequence[Launch]) -> list[Launch]:
    """Leave out launches that need no kernel of their own: those that differ in addresses and numbers alone."""
    distinct: dict[Hashable, Launch] = {}
    for recorded in launches:
        kernel, _, args, settings = recorded
        distinct.setdefault((kernel.fn.__name__, *map(_describe, args), *sorted(settings.items())), recorded)
    return list(distinct.values())


def _describe(argument: Any) -> Hashable:
    """Return what of an argument a kernel is compiled for."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if hasattr(argument, "block_shape"):  # a tensor descriptor
        return argument.base.dtype, tuple(argument.block_shape)
    return argument == 1, argument % 16 == 0


def get_precision() -> str:
    """Return how matrix products of float32 are computed."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def choose_tile(channels: int, widest: int) -> int:
    """Return the power of two that holds so many channels, from 16 on and at most `widest`."""
    return min(widest, max(16, 1 << (channels - 1).bit_length()))


def find_narrow(channels: int) -> int:
    """Return a number of channels that kernels must know as a constant, or 0."""
    return channels if channels % 16 else 0
