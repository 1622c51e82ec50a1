"""States that turn into (arrays, JSON) and back, so that a checkpoint needs no pickle.

A state is a frozen dataclass that registers under a kind: `class AflState(State, kind="afl")`. Both directions follow
from its fields. A field may be a tensor, a numpy column, a string, a number, a boolean, a state or a dataclass. It may
also be a tuple of these or a mapping from strings to these, or None where the type allows it. With a field `clients`,
every column, tensor and tuple has one entry per client. A tensor may have spare rows behind its entries, which are not
saved. Tensors may share memory with the state: a donated state takes them with it.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import repeat
from json import dumps
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedheal.core.atomic_files import write_bytes
from fedheal.core.checks import check_type
from fedheal.core.errors import add_article
from fedheal.core.layout import Packed
from fedheal.core.nested_text import parse_json

METADATA = "fedheal-state"  # where a state's file holds its JSON
CHECKSUM = "fedheal-checksum"  # and the checksum of it and the arrays
PATH_REMEDY = "give the path of a file, such as 'state.safetensors'"
ARRAY = "array"  # stands in the JSON for a value that is among the arrays


class State:
    """What a stage, an aggregator, a term or a run remembers between rounds."""

    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type[State]]] = {}

    def __init_subclass__(cls, kind: str = "") -> None:
        super().__init_subclass__()
        cls.kind = kind
        if kind:
            State.kinds[kind] = cls
        # In the class itself, so that `dataclass` does not make its own, which cannot compare tensors.
        cls.__eq__, cls.__hash__ = State.__eq__, State.__hash__  # type: ignore[method-assign]

    def __eq__(self, other: object) -> bool:
        """Return whether the other state is of the same type and holds the same values, on whatever devices."""
        if not isinstance(other, State):
            return NotImplemented
        (mine, described), (theirs, other_described) = self.to_arrays(), other.to_arrays()
        return (
            described == other_described  # the kinds are in it
            and mine.keys() == theirs.keys()
            and all(a.dtype == theirs[k].dtype and torch.equal(a.cpu(), theirs[k].cpu()) for k, a in mine.items())
        )

    def __hash__(self) -> int:
        """Raise TypeError: equal states may hold different tensors, whose hashes differ."""
        raise TypeError(f"unhashable type: {type(self).__name__!r}")

    def save(self, path: str | Path) -> None:
        """Write the state to a safetensors file, whole or not at all.

        Raises:
            TypeError: `path` is no path.
            OSError: The file cannot be written.
        """
        check_type("path", path, str | PathLike, PATH_REMEDY)
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        arrays, described = self.to_arrays()
        # safetensors refuses tensors that share memory: each gets its own.
        copies = {name: array.detach().cpu().contiguous().clone() for name, array in arrays.items()}
        checksum = str(compute_checksum(copies, described))
        write_bytes(Path(path), save(copies, {METADATA: dumps(described), CHECKSUM: checksum}))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the state in a file that `save` wrote, on the CPU.

        Raises:
            ValueError: The file is damaged, or does not hold a state of this type.
            FileNotFoundError: There is no such file.
            TypeError: `path` is no path.
        """
        check_type("path", path, str | PathLike, PATH_REMEDY)
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                described = parse_json(metadata.get(METADATA, "null"))
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dictionary)
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{path} is damaged ({error}): use an earlier copy") from error
        # Files of earlier versions have no checksum.
        if CHECKSUM in metadata and metadata[CHECKSUM] != str(compute_checksum(arrays, described)):
            raise ValueError(f"{path} is damaged (its checksum does not fit its contents): use an earlier copy")
        if described is None:
            raise ValueError(f"{path} holds no state of fedheal: give a file that a state's `save` wrote")
        try:
            return _restore_state(cls, "", arrays, described)  # type: ignore[no-any-return]
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_arrays(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state's tensors by name, and the rest of it, with its kind, as a JSON-ready dictionary."""
        arrays: dict[str, Tensor] = {}
        return arrays, _flatten(self, "", arrays)

    @staticmethod
    def from_arrays(arrays: Mapping[str, Tensor], json: Mapping[str, Any]) -> Any:
        """Rebuild a state from what `to_arrays` gave, on the CPU. Raise ValueError if it is damaged or of an unknown kind."""
        return _restore_state(State, "", arrays, json)


def compute_checksum(arrays: Mapping[str, Tensor], metadata: Any) -> int:
    """Return a checksum over the JSON, and the tensors' names, shapes, dtypes and bytes."""
    value = zlib.crc32(dumps(metadata, sort_keys=True).encode())
    for name in sorted(arrays):
        tensor = arrays[name].contiguous()
        value = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), value)
        value = zlib.crc32(tensor.view(-1).view(torch.uint8).numpy().data, value) if tensor.numel() else value
    return value


S = TypeVar("S", bound=State)


def expect(state: State, wanted: type[S]) -> S:
    """Return the state as the type that a stage works with. Raise ValueError if another aggregator made it."""
    if not isinstance(state, wanted):
        kind = getattr(state, "kind", type(state).__name__)
        raise ValueError(
            f"this state is of kind '{kind}', but the aggregator needs '{wanted.kind}': give a state that it made itself"
        )
    return state


@dataclass(frozen=True)
class Nothing(State, kind="nothing"):
    """The state of a stage that remembers nothing."""


@dataclass(frozen=True)
class TermState(State, kind="term"):
    """What a term of local training keeps: with the server (`shared`) and with each client that has taken part (`slots`)."""

    shared: Mapping[str, Tensor]
    slots: Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class RunState(State, kind="run"):
    """Everything that survives a round; a checkpoint is this and nothing else."""

    round: int  # rounds done
    seed: int
    model: Packed
    aggregator: State
    server: State
    terms: tuple[TermState, ...] = ()
    sent: int = 0  # bytes, server to clients
    received: int = 0

    @staticmethod
    def from_arrays(
        arrays: Mapping[str, Tensor], json: Mapping[str, Any], device: torch.device | str = "cpu"
    ) -> RunState:
        """Rebuild the state of a run on a device; the aggregator's stays on the CPU and moves its arrays itself."""
        placed = {name: array.to("cpu" if name.startswith("aggregator.") else device) for name, array in arrays.items()}
        return _restore_state(RunState, "", placed, json)  # type: ignore[no-any-return]


def _flatten(value: Any, path: str, arrays: dict[str, Tensor]) -> Any:
    """Put the arrays of a value into `arrays` under its path, and return the rest of it as JSON."""
    if isinstance(value, (Tensor, np.ndarray)):
        arrays[path] = value if isinstance(value, Tensor) else torch.from_numpy(value)
        return ARRAY
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [_flatten(item, _join(path, i), arrays) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a state holds the key {wrong[0]!r} in '{path}': only strings can be saved")
        # A key may hold any character. Only that of a tensor, which nothing follows, can be part of a path.
        return {
            key: _flatten(item, _join(path, key if isinstance(item, Tensor) else i), arrays)
            for i, (key, item) in enumerate(value.items())
        }
    if not is_dataclass(value):
        raise TypeError(f"a state holds {add_article(type(value).__name__)} in '{path}', which cannot be saved")
    json: dict[str, Any] = {"kind": value.kind} if isinstance(value, State) else {}
    for field in fields(value):
        item = getattr(value, field.name)
        if isinstance(item, Tensor) and hasattr(value, "clients"):
            item = item[: len(value.clients)]
        json[field.name] = _flatten(item, _join(path, field.name), arrays)
    return json


def _restore(hint: Any, path: str, arrays: Mapping[str, Tensor], json: Any) -> Any:
    """Return the value of this type that `_flatten` took apart."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (hint,) = (arg for arg in args if arg is not NoneType)
        return None if json is None else _restore(hint, path, arrays, json)
    if json == ARRAY and hint is not str:  # not by the type of numpy's arrays, which is an alias in newer versions
        return arrays[path] if hint is Tensor else arrays[path].numpy()
    if origin is tuple:
        hints = repeat(args[0], len(json)) if args[-1] is Ellipsis else args
        pairs = enumerate(zip(hints, json, strict=True))
        return tuple(_restore(item_hint, _join(path, i), arrays, item) for i, (item_hint, item) in pairs)
    if origin is Mapping:
        return {
            key: _restore(args[1], _join(path, key if args[1] is Tensor else i), arrays, item)
            for i, (key, item) in enumerate(json.items())
        }
    if issubclass(hint, State):
        return _restore_state(hint, path, arrays, json)
    if is_dataclass(hint):
        return hint(**_restore_fields(hint, path, arrays, json))  # type: ignore[operator]
    if type(json) is not hint and not (hint is float and type(json) is int):
        raise TypeError(f"'{path}' must be {hint.__name__}, got {json!r}")
    return json


def _restore_state(wanted: type[State], path: str, arrays: Mapping[str, Tensor], json: Any) -> Any:
    kind = json.get("kind") if isinstance(json, Mapping) else None
    if kind not in State.kinds:
        raise ValueError(f"state of kind {kind!r} is unknown; this version knows {sorted(State.kinds)}")
    cls = State.kinds[kind]
    if not issubclass(cls, wanted):
        raise ValueError(f"state of kind '{kind}' found where kind '{wanted.kind}' is expected")
    try:
        values = _restore_fields(cls, path, arrays, json)
        if "clients" in values:
            _check_lengths(values)
        return cls(**values)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"state of kind '{kind}' is damaged: {error!r}") from error


def _restore_fields(cls: Any, path: str, arrays: Mapping[str, Tensor], json: Mapping[str, Any]) -> dict[str, Any]:
    hints = _field_types(cls)
    return {f.name: _restore(hints[f.name], _join(path, f.name), arrays, json[f.name]) for f in fields(cls)}


def _check_lengths(values: Mapping[str, Any]) -> None:
    """Raise ValueError unless columns hold one number per client, and tensors and tuples one entry."""
    clients = len(values["clients"])
    for name, value in values.items():
        if isinstance(value, np.ndarray) and value.shape != (clients,):
            raise ValueError(f"'{name}' has shape {value.shape} for {clients} clients")
        if isinstance(value, (Tensor, tuple)) and len(value) != clients:
            raise ValueError(f"'{name}' has {len(value)} entries and does not belong to {clients} clients")


_field_types = cache(get_type_hints)


def _join(path: str, name: str | int) -> str:
    return f"{path}.{name}" if path else str(name)
