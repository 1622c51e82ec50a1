"""What a client remembers between rounds: in Flower's `context.state`, or in a folder that outlives the run.

`context.state` is empty again in a new run, so a federation that is resumed, or a client whose node restarts without its
key, needs a folder to go on with the same results. Either keeps what the client remembered after each of two rounds: the last
that counted on the server, and the one it trained last, which may not have counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ConfigRecord, Context
from torch import Tensor

from fedheal import records
from fedheal.flower import wire

Kept = tuple[dict[str, Tensor], dict[str, Any]]


class Memory(Protocol):
    """Arrays and JSON by round."""

    def rounds(self) -> list[int]: ...

    def load(self, number: int) -> Kept: ...

    def save(self, number: int, arrays: Mapping[str, Tensor], described: Mapping[str, Any]) -> None: ...

    def drop(self, number: int) -> None: ...


def recalled(memory: Memory, number: int, accepted: int | None) -> Kept:
    """What the client remembered before round `number`, all later rounds and those that did not count forgotten.

    `accepted`: the last round that counted for this client, where the server knows; else any earlier round may have.
    """
    last = number - 1 if accepted is None else min(accepted, number - 1)
    for later in [r for r in memory.rounds() if r > last]:
        memory.drop(later)
    left = memory.rounds()
    for older in left[:-1]:
        memory.drop(older)
    return memory.load(left[-1]) if left else ({}, {})


class InContext:
    """In `context.state`, as records called `fedheal.memory.<round>`."""

    def __init__(self, context: Context) -> None:
        self.state = context.state

    def rounds(self) -> list[int]:
        return sorted(int(key.rpartition(".")[2]) for key in self.state if key.startswith("fedheal.memory."))

    def load(self, number: int) -> Kept:
        described = json.loads(str(self.state.config_records[f"fedheal.about.{number}"]["json"]))
        return wire.tensors(self.state.array_records[f"fedheal.memory.{number}"]), described

    def save(self, number: int, arrays: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
        self.state[f"fedheal.memory.{number}"] = wire.record(arrays)
        self.state[f"fedheal.about.{number}"] = ConfigRecord({"json": json.dumps(described)})

    def drop(self, number: int) -> None:
        for name in ("memory", "about"):
            self.state.pop(f"fedheal.{name}.{number}", None)


class InFolder:
    """In a folder: a checked, atomically written file a round."""

    def __init__(self, folder: Path, client: str) -> None:
        self.folder, self.client = folder, client

    def rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in records.states(self.folder))

    def load(self, number: int) -> Kept:
        return records.load_state(self._path(number), self.client)

    def save(self, number: int, arrays: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        records.save_state(self.folder, number, arrays, described, self.client)

    def drop(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / "state" / f"{number:08d}.safetensors"


def memory_of(context: Context, client: str, folder: str | Path | None) -> Memory:
    if folder is None:
        return InContext(context)
    safe = "".join(c if c.isalnum() or c in "-_." else f"%{ord(c):x}" for c in client)
    return InFolder(Path(folder) / f"client-{safe}", client)
