"""Capture a step in a CUDA graph, and keep what the terms prepared for a client at fixed addresses for it."""

from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from fedheal.local.term import Arrays, Context, NotCapturableError


class FixedContext(Context):
    """The context of a captured step. Reading what differs between clients or rounds raises `NotCapturableError`."""

    VARYING = frozenset(
        {"client", "round", "steps", "effective_step", "received", "slot", "shared", "fit", "gradient", "validate"}
    )

    def __getattribute__(self, name: str) -> Any:
        if name in object.__getattribute__(self, "VARYING"):
            advice = "let `prepare` put it into ctx.scratch"
            raise NotCapturableError(f"a step reads ctx.{name}, which differs between clients; {advice}")
        return super().__getattribute__(name)


def make_fixed_context(ctx: Context) -> FixedContext:
    """Return a fixed context with a copy of the context's scratch."""
    values = {f.name: getattr(ctx, f.name) for f in fields(Context)}
    return FixedContext(**values | {"scratch": _clone(ctx.scratch)})


def make_shape_key(value: Any) -> Hashable:
    """Return what must be equal for a graph to be reused: shapes of tensors, identities of modules, plain values."""
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if isinstance(value, nn.Module):
        return "module", id(value)
    if isinstance(value, Mapping):
        return "mapping", tuple((name, make_shape_key(value[name])) for name in sorted(value))
    if isinstance(value, list | tuple):
        return "sequence", tuple(make_shape_key(part) for part in value)
    if value is None or isinstance(value, bool | int | float | str):
        return type(value).__name__, value
    kind = type(value).__name__
    raise NotCapturableError(f"ctx.scratch holds a value of type {kind}, which cannot be refilled for another client")


def _clone(value: Any) -> Any:
    """Copy the tensors. Tensors shaped like a convolution's weights get the module's memory format."""
    if isinstance(value, Tensor):
        return value.clone(memory_format=torch.channels_last if value.ndim == 4 else torch.contiguous_format)
    if isinstance(value, Mapping):
        return {name: _clone(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_clone(part) for part in value]
    return value


def refill(fixed: dict[str, Any], scratch: Mapping[str, Any]) -> None:
    """Copy a client's scratch into the fixed one; tensors that only steps have put there start from zero."""
    from_steps = [tensor for name, value in fixed.items() if name not in scratch for tensor in list_tensors(value)]
    if from_steps:
        torch._foreach_zero_(from_steps)
    pairs = [
        (target, source)
        for name, value in scratch.items()
        for target, source in zip(list_tensors(fixed[name]), list_tensors(value), strict=True)
        if target is not source
    ]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested mappings and sequences, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for name in sorted(value) for tensor in list_tensors(value[name])]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in list_tensors(part)]
    return []


def clone_fixed(arrays: Arrays, addresses: set[int]) -> Arrays:
    """Copy the tensors at these addresses, which the next client overwrites."""
    return {name: t.clone() if t.data_ptr() in addresses else t for name, t in arrays.items()}


def capture_graph(pool: Any, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of a step that is not taken; `pool` is the memory that it shares with other graphs.

    Raises:
        NotCapturableError: The step does something that a graph cannot repeat.
        torch.OutOfMemoryError: The step's tensors do not fit.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        step()
        graph.capture_end()
    except (RuntimeError, NotCapturableError) as error:
        with suppress(RuntimeError):
            graph.capture_end()
        if isinstance(error, torch.OutOfMemoryError | NotCapturableError):
            raise
        reason = str(error).splitlines()[0]
        raise NotCapturableError(f"a step cannot be captured in a CUDA graph ({reason})") from error
    return graph
