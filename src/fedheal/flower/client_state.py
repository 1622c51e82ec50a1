"""What a client saves between rounds: in Flower's `context.state`, or in a folder that outlives the run.

`context.state` is empty again in a new run. So a resumed federation, or a client whose node restarts without its key,
needs a folder to continue with the same results. A client keeps two states: the one after its last round that the
server accepted, and the one after the round it trained last, which may not have been accepted. A folder also keeps the
state of the accepted round before. A resumed server whose newest checkpoint is damaged continues from there. A damaged
state, or one of another federation, is ignored: a client without state can still train.

Beside its states is a token, which only the client and the server know. With it a client whose node has no name yet
finds its own last accepted round among those of all clients. Nobody else can.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Context
from torch import Tensor

from fedheal.federation.file_modes import keep_private
from fedheal.flower.messages import record_to_tensors, tensors_to_record
from fedheal.runs import folder as files

log = logging.getLogger("flwr.fedheal")


class SavedState(NamedTuple):
    """What a client saved after a round; round 0: nothing."""

    arrays: dict[str, Tensor]
    described: dict[str, Any]
    round: int = 0


class ContextStore:
    """In `context.state`, as records called `fedheal.memory.<round>`."""

    accepted_rounds_kept = 1  # within a run the server never goes back

    def __init__(self, context: Context, owner: str) -> None:
        self.state, self.owner = context.state, owner

    def rounds(self) -> list[int]:
        return sorted(int(key.rpartition(".")[2]) for key in self.state if key.startswith("fedheal.memory."))

    def load(self, number: int) -> SavedState:
        about = self.state.config_records[f"fedheal.about.{number}"]
        if about["owner"] != self.owner:
            raise files.CheckpointError(f"this node's state of round {number} belongs to another federation")
        arrays = record_to_tensors(self.state.array_records[f"fedheal.memory.{number}"])
        return SavedState(arrays, json.loads(str(about["json"])), number)

    def save(self, number: int, arrays: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
        self.state[f"fedheal.memory.{number}"] = tensors_to_record(arrays)
        self.state[f"fedheal.about.{number}"] = ConfigRecord({"json": json.dumps(described), "owner": self.owner})

    def drop(self, number: int) -> None:
        for name in ("memory", "about"):
            self.state.pop(f"fedheal.{name}.{number}", None)

    def read_token(self) -> str:
        records = self.state.config_records
        return str(records["fedheal.token"]["token"]) if "fedheal.token" in records else ""

    def write_token(self, token: str) -> None:
        self.state["fedheal.token"] = ConfigRecord({"token": token})


class FolderStore:
    """In a folder: a checked, atomically written file a round. `load` raises `files.CheckpointError`, as above."""

    accepted_rounds_kept = files.CHECKPOINTS_KEPT  # as many as the server keeps checkpoints

    def __init__(self, folder: Path, owner: str) -> None:
        self.folder, self.owner = folder, owner

    def rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in files.list_checkpoints(self.folder) if path.stem.isdecimal())

    def load(self, number: int) -> SavedState:
        return SavedState(*files.load_checkpoint(self._path(number), self.owner), number)

    @keep_private()
    def save(self, number: int, arrays: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        files.save_checkpoint(self.folder, number, arrays, described, self.owner, self.accepted_rounds_kept + 1)

    def drop(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)

    def read_token(self) -> str:
        path = self.folder / "token"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    @keep_private()
    def write_token(self, token: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write_text(self.folder / "token", token)

    def _path(self, number: int) -> Path:
        return self.folder / "state" / f"{number:08d}.safetensors"


ClientStore = ContextStore | FolderStore


def open_store(context: Context, client: str, folder: str | Path | None, federation: str = "") -> ClientStore:
    """Return where `client` saves its state for this federation."""
    owner = f"{federation}/{client}"
    if folder is None:
        return ContextStore(context, owner)
    safe = "".join(c if c.isalnum() or c in "-_." else f"%{ord(c):x}" for c in client)
    return FolderStore(Path(folder) / f"client-{safe}", owner)


def load_before_round(store: ClientStore, number: int, accepted: int | None) -> SavedState:
    """Load the client's state before round `number`; drop those of later rounds and of rounds that were not accepted.

    `accepted`: this client's last accepted round, or None if the server does not say: then any earlier round may be.
    """
    last = number - 1 if accepted is None else min(accepted, number - 1)
    kept = [r for r in store.rounds() if r <= last][-store.accepted_rounds_kept :]
    for other in set(store.rounds()) - set(kept):
        store.drop(other)
    return load_newest(store, last)


def load_newest(store: ClientStore, last: int) -> SavedState:
    """Load the newest state up to round `last`; return an empty one if it is missing or cannot be used."""
    for number in [r for r in store.rounds() if r <= last][-1:]:
        try:
            return store.load(number)
        except files.CheckpointError as error:
            log.warning("%s: this client continues without its saved state", error)
            store.drop(number)
    return SavedState({}, {})


def describe_missing_state(store: ClientStore, client: str, accepted: int | None) -> str | None:
    """Return a warning if the state of the client's last accepted round is missing, else None."""
    if not accepted or accepted in store.rounds():
        return None
    earlier = [r for r in store.rounds() if r < accepted][-1:]
    rest = f"with that of round {earlier[0]}" if earlier else "without; a folder= of its own outlives a run"
    return f"'{client}' has no saved state of round {accepted}, its last accepted one: it continues {rest}"
