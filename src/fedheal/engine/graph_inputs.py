"""What a term prepared for a client, at fixed addresses, so that the graph of a step can read it for every client."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from fedheal.local.term import Arrays, Context


class Unable(Exception):
    """Why this module or term cannot be trained in lanes."""


class Static(Context):
    """A context as a step may see it: what differs between clients and rounds is out of reach, and so cannot be frozen."""

    VARYING = frozenset(
        {"client", "round", "steps", "effective_step", "received", "slot", "shared", "fit", "gradient", "validate"}
    )

    def __getattribute__(self, name: str) -> Any:
        if name in Static.VARYING:
            raise Unable(
                f"a step reads ctx.{name}, which differs from client to client; `prepare` may put it in ctx.scratch"
            )
        return super().__getattribute__(name)


def shape_of(value: Any) -> Hashable:
    """What must be equal for a graph to be used again: the shapes of tensors, the very modules, plain values."""
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if isinstance(value, nn.Module):
        return "module", id(value)
    if isinstance(value, Mapping):
        return "mapping", tuple((name, shape_of(value[name])) for name in sorted(value))
    if isinstance(value, list | tuple):
        return "sequence", tuple(shape_of(part) for part in value)
    if value is None or isinstance(value, bool | int | float | str):
        return type(value).__name__, value
    raise Unable(f"ctx.scratch holds a {type(value).__name__}, which cannot be refilled from client to client")


def static(ctx: Context) -> Static:
    known = {f.name: getattr(ctx, f.name) for f in fields(Context)}
    return Static(**known | {"scratch": _clone(ctx.scratch)})


def _clone(value: Any) -> Any:
    """The same at addresses of its own; tensors shaped like a convolution's are laid out as the module's are."""
    if isinstance(value, Tensor):
        return value.clone(memory_format=torch.channels_last if value.ndim == 4 else torch.contiguous_format)
    if isinstance(value, Mapping):
        return {name: _clone(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_clone(part) for part in value]
    return value


def refill(fixed: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Copy what was prepared for a client; what steps themselves have put there starts from zero."""
    own = [part for name, value in fixed.items() if name not in given for part in tensors_in(value)]
    if own:
        torch._foreach_zero_(own)
    pairs = [
        (a, b) for name, value in given.items() for a, b in zip(tensors_in(fixed[name]), tensors_in(value), strict=True)
    ]
    pairs = [(a, b) for a, b in pairs if a is not b]
    if pairs:
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for name in sorted(value) for tensor in tensors_in(value[name])]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []


def apart(arrays: Arrays, fixed: set[int]) -> Arrays:
    """A term may hand out what lies in its scratch, which the next client overwrites."""
    return {name: t.clone() if t.data_ptr() in fixed else t for name, t in arrays.items()}
