"""What a client remembers between rounds: in Flower's `context.state`, or in a folder that outlives the run.

`context.state` is empty again in a new run, so a federation that is resumed, or a client whose node restarts without its
key, needs a folder to go on with the same results. Either keeps what the client remembered after the last round that counted
on the server, and after the one it trained last, which may not have counted. A folder keeps that of the round that counted
before, too: a resumed server whose newest state is damaged goes on from the one before. What another federation left
behind, or what is damaged, is forgotten: a client that knows nothing can still train.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ConfigRecord, Context
from torch import Tensor

from fedheal.flower import messages as wire
from fedheal.runs import folder as records

log = logging.getLogger("flwr.fedheal")

Kept = tuple[dict[str, Tensor], dict[str, Any]]


class Memory(Protocol):
    """Arrays and JSON by round; `load` raises `records.CheckpointError` where it is of no use."""

    counted: int  # rounds that counted are kept so many

    def rounds(self) -> list[int]: ...

    def load(self, number: int) -> Kept: ...

    def save(self, number: int, arrays: Mapping[str, Tensor], described: Mapping[str, Any]) -> None: ...

    def drop(self, number: int) -> None: ...


def recalled(memory: Memory, number: int, accepted: int | None) -> Kept:
    """What the client remembered before round `number`, all later rounds and those that did not count forgotten.

    `accepted`: the last round that counted for this client, where the server knows; else any earlier round may have.
    """
    last = number - 1 if accepted is None else min(accepted, number - 1)
    kept = [r for r in memory.rounds() if r <= last][-memory.counted :]
    for other in memory.rounds():
        if other not in kept:
            memory.drop(other)
    return newest(memory, last)


def lost(memory: Memory, client: str, accepted: int | None) -> str | None:
    """What to say where the client should remember its last round that counted, and does not."""
    if not accepted or accepted in memory.rounds():
        return None
    earlier = [r for r in memory.rounds() if r < accepted][-1:]
    rest = f"what it remembers of round {earlier[0]}" if earlier else "nothing; a folder= of its own outlives a run"
    return f"'{client}' finds nothing of round {accepted}, its last that counted: it goes on with {rest}"


def newest(memory: Memory, last: int) -> Kept:
    """What the client remembers up to round `last`; nothing where that is of no use."""
    for number in [r for r in memory.rounds() if r <= last][-1:]:
        try:
            return memory.load(number)
        except records.CheckpointError as trouble:
            log.warning("%s: this client goes on without what it remembered", trouble)
            memory.drop(number)
    return {}, {}


class InContext:
    """In `context.state`, as records called `fedheal.memory.<round>`."""

    counted = 1  # in a run the server never goes back

    def __init__(self, context: Context, owner: str) -> None:
        self.state, self.owner = context.state, owner

    def rounds(self) -> list[int]:
        return sorted(int(key.rpartition(".")[2]) for key in self.state if key.startswith("fedheal.memory."))

    def load(self, number: int) -> Kept:
        about = self.state.config_records[f"fedheal.about.{number}"]
        if about["owner"] != self.owner:
            raise records.CheckpointError(f"what this node remembers of round {number} belongs to another federation")
        return wire.tensors(self.state.array_records[f"fedheal.memory.{number}"]), json.loads(str(about["json"]))

    def save(self, number: int, arrays: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
        self.state[f"fedheal.memory.{number}"] = wire.record(arrays)
        self.state[f"fedheal.about.{number}"] = ConfigRecord({"json": json.dumps(described), "owner": self.owner})

    def drop(self, number: int) -> None:
        for name in ("memory", "about"):
            self.state.pop(f"fedheal.{name}.{number}", None)


class InFolder:
    """In a folder: a checked, atomically written file a round."""

    counted = records.CHECKPOINTS_KEPT  # as many as the server has states to go on from

    def __init__(self, folder: Path, owner: str) -> None:
        self.folder, self.owner = folder, owner

    def rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in records.list_checkpoints(self.folder) if path.stem.isdigit())

    def load(self, number: int) -> Kept:
        return records.load_checkpoint(self._path(number), self.owner)

    def save(self, number: int, arrays: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        records.save_checkpoint(self.folder, number, arrays, described, self.owner, self.counted + 1)

    def drop(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / "state" / f"{number:08d}.safetensors"


def memory_of(context: Context, client: str, folder: str | Path | None, federation: str = "") -> Memory:
    """What `client` keeps for this federation."""
    owner = f"{federation}/{client}"
    if folder is None:
        return InContext(context, owner)
    safe = "".join(c if c.isalnum() or c in "-_." else f"%{ord(c):x}" for c in client)
    return InFolder(Path(folder) / f"client-{safe}", owner)
