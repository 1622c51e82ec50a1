"""What can be seen of a method that somebody made of their own: names, and plain values in fields and closures.

A function says nothing of what it does, and a changed body looks like the old one: two that look alike may differ, and two
that differ in looks may do the same. This is for a warning, not for a refusal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any

DEEPEST = 12  # what is further down, or a closure that holds itself, is not looked at


def outline(value: Any, depth: int = DEEPEST) -> Any:
    """JSON-ready, and the same in every process.

    >>> def times(factor):
    ...     return lambda x: factor * x
    >>> outline(times(2.5))
    ['times.<locals>.<lambda>', {'factor': '2.5'}]
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):  # a NaN would differ from itself
        return repr(value)
    kind = type(value).__qualname__
    if depth == 0:
        return kind
    if isinstance(value, FunctionType):
        return [value.__qualname__, {name: outline(held, depth - 1) for name, held in _held(value)}]
    if is_dataclass(value) and not isinstance(value, type):
        return [kind, {field.name: outline(getattr(value, field.name), depth - 1) for field in fields(value)}]
    if isinstance(value, Mapping):
        return {str(key): outline(held, depth - 1) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [outline(held, depth - 1) for held in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return kind


def _held(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function holds on to from where it was made, by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
