"""States that turn into (arrays, JSON) and back, so that a checkpoint needs no pickle.

A state class registers under a kind; `to_arrays` returns tensors by name and a JSON-ready dictionary that holds the
kind, and `from_arrays`, called on any state class or instance, rebuilds whatever kind the dictionary names.
The tensors may share memory with the state: a state that is donated takes them with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from fedheal.core.layout import Packed

Arrays = Mapping[str, Tensor]
Json = Mapping[str, Any]


class State:
    """What a stage or an aggregator remembers. Subclasses are frozen dataclasses with `_write` and `_read`."""

    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type[State]]] = {}

    def to_arrays(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        arrays, json = self._write()
        return arrays, {"kind": self.kind, **json}

    @staticmethod
    def from_arrays(arrays: Arrays, json: Json) -> Any:
        kind = json.get("kind")
        if kind not in State.kinds:
            raise ValueError(f"state of kind {kind!r} is unknown; this version knows {sorted(State.kinds)}")
        try:
            return State.kinds[kind]._read(arrays, json)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"state of kind '{kind}' is damaged: {error!r}") from error

    def _write(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {}

    @classmethod
    def _read(cls, arrays: Arrays, json: Json) -> Self:
        return cls()


S = TypeVar("S", bound=State)


def kind(name: str) -> Callable[[type[S]], type[S]]:
    """Register a state class under a kind."""

    def register(cls: type[S]) -> type[S]:
        cls.kind = name
        State.kinds[name] = cls
        return cls

    return register


def expect(state: State, wanted: type[S]) -> S:
    """The state as the type a stage works with; a sentence where it is another's."""
    if not isinstance(state, wanted):
        found = getattr(state, "kind", type(state).__name__)
        raise ValueError(
            f"this state is of kind '{found}', the aggregator needs '{wanted.kind}': it was made by another one"
        )
    return state


@kind("nothing")
@dataclass(frozen=True)
class Nothing(State):
    """The state of a stage that remembers nothing."""


def nested(states: Mapping[str, State]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Several states as one: arrays under `name.`, JSON under `name`."""
    arrays: dict[str, Tensor] = {}
    json: dict[str, Any] = {}
    for name, state in states.items():
        inner, json[name] = state.to_arrays()
        arrays |= {f"{name}.{key}": value for key, value in inner.items()}
    return arrays, json


def unnested(name: str, arrays: Arrays, json: Json) -> Any:
    prefix = f"{name}."
    inner = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
    return State.from_arrays(inner, json[name])


def write_columns(state: State, *names: str) -> dict[str, Tensor]:
    """These numpy columns of a state, one number a client, as arrays."""
    return {name: torch.from_numpy(getattr(state, name)) for name in names}


def read_columns(arrays: Arrays, length: int, *names: str) -> list[Any]:
    """These arrays as numpy columns, one number a client."""
    columns = [arrays[name].numpy() for name in names]
    for name, column in zip(names, columns, strict=True):
        if column.shape != (length,):
            raise ValueError(f"'{name}' has shape {column.shape} for {length} clients")
    return columns


@dataclass(frozen=True)
class TermState:
    """What a term of local training keeps: with the server (`shared`) and with each client that has taken part (`slots`)."""

    shared: Mapping[str, Tensor]
    slots: Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class RunState:
    """Everything that survives a round; a checkpoint is this and nothing else."""

    round: int  # rounds done
    seed: int
    model: Packed
    aggregator: Any
    server: Any
    terms: tuple[TermState, ...] = ()
    sent: int = 0  # bytes, server to clients
    received: int = 0

    def to_arrays(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        arrays = {f"model.{name}": getattr(self.model, name) for name in ("params", "buffers", "counters")}
        json: dict[str, Any] = {"round": self.round, "seed": self.seed, "sent": self.sent, "received": self.received}
        for name in ("aggregator", "server"):
            inner, json[name] = getattr(self, name).to_arrays()
            arrays |= {f"{name}.{key}": value for key, value in inner.items()}
        json["terms"] = [list(term.slots) for term in self.terms]  # the clients, since an id may hold any character
        for i, term in enumerate(self.terms):
            arrays |= {f"terms.{i}.shared.{key}": value for key, value in term.shared.items()}
            for j, slot in enumerate(term.slots.values()):
                arrays |= {f"terms.{i}.slots.{j}.{key}": value for key, value in slot.items()}
        return arrays, json


def restored_state(arrays: Mapping[str, Tensor], described: Mapping[str, Any], device: torch.device) -> RunState:
    """A state from what `RunState.to_arrays` gave, on a device."""

    def inner(name: str, where: torch.device) -> State:
        own = {k.removeprefix(f"{name}."): v.to(where) for k, v in arrays.items() if k.startswith(f"{name}.")}
        restored: State = State.from_arrays(own, described[name])
        return restored

    # An aggregator's columns are numpy's; what it needs beside the updates it moves there itself.
    aggregator, server = inner("aggregator", torch.device("cpu")), inner("server", device)
    model = Packed(*(arrays[f"model.{name}"].to(device) for name in ("params", "buffers", "counters")))
    numbers = {name: int(described[name]) for name in ("round", "seed", "sent", "received")}

    def under(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v.to(device) for k, v in arrays.items() if k.startswith(prefix)}

    terms = tuple(
        TermState(under(f"terms.{i}.shared."), {c: under(f"terms.{i}.slots.{j}.") for j, c in enumerate(clients)})
        for i, clients in enumerate(described["terms"])
    )
    return RunState(**numbers, model=model, aggregator=aggregator, server=server, terms=terms)
