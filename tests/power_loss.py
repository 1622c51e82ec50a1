"""What a power failure may leave of the files under a folder, given the operations on them so far.

Only what was synced is sure: `fsync` of a file keeps its bytes, `fsync` of a folder the names in it. Everything since then may
be there or not, independently: names appear, change or vanish one without the other, and bytes are cut or come as zeros.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from disk_hooks import Operation

MANNERS = ("lost", "names", "torn")  # nothing unsynced is left; names without bytes; any part of it
SECTOR = 512  # bytes that a disk writes whole or not at all


@dataclass
class File:
    """A file's bytes, and those that a sync has made safe."""

    content: bytes = b""
    synced: bytes = b""

    def survive(self, manner: str, chance: random.Random) -> bytes:
        """Return what is left of the bytes."""
        if self.content == self.synced or manner != "torn":
            return self.synced
        first = len(self.synced) if self.content.startswith(self.synced) else 0  # an append keeps what was there
        cut = bytearray(self.content[: chance.randint(first, len(self.content))])
        for start in range(0, len(cut), SECTOR):
            if chance.random() < 0.3:  # a sector that was not written is as before
                before = self.synced[start : start + SECTOR] if first else b""
                cut[start : start + SECTOR] = before.ljust(len(cut[start : start + SECTOR]), b"\0")
        return bytes(cut)


@dataclass
class Folder:
    """Names, and the changes of them since the last sync. None stands for a name that was removed."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def change(self, names: dict[str, File | Folder | None]) -> None:
        """Do one change, which a crash keeps or loses as a whole."""
        _apply(self.names, names)
        self.pending.append(names)

    def sync(self) -> None:
        self.synced, self.pending = dict(self.names), []

    def survive(self, manner: str, chance: random.Random) -> dict[str, File | Folder]:
        """Return the names that are left."""
        surviving = dict(self.synced)
        for change in self.pending:
            if manner == "names" or (manner == "torn" and chance.random() < 0.5):
                _apply(surviving, change)
        return surviving


def _apply(names: dict[str, File | Folder], change: dict[str, File | Folder | None]) -> None:
    for name, value in change.items():
        if value is None:
            names.pop(name, None)
        else:
            names[name] = value


class Disk:
    """The files under a folder after these operations."""

    def __init__(self, root: Path, operations: Sequence[Operation]) -> None:
        self.root, self.top = root.resolve(), Folder()
        for operation in operations:
            self._do(operation)

    def _find(self, path: str) -> tuple[Folder, str]:
        """Return the folder of a path, and its name there."""
        *above, name = Path(path).relative_to(self.root).parts
        folder = self.top
        for part in above:
            inner = folder.names[part]
            assert isinstance(inner, Folder)
            folder = inner
        return folder, name

    def _do(self, operation: Operation) -> None:
        if operation.path == str(self.root):
            assert operation.kind == "fsync", operation
            return self.top.sync()
        folder, name = self._find(operation.path)
        if operation.kind in ("create", "mkdir"):
            return folder.change({name: File() if operation.kind == "create" else Folder()})
        if operation.kind == "unlink":
            return folder.change({name: None})
        entry = folder.names[name]
        if operation.kind == "rename":
            other, new = self._find(operation.target)
            assert other is folder, "a rename within one folder is atomic; between two there are two changes"
            return folder.change({name: None, new: entry})
        if isinstance(entry, Folder):
            return entry.sync()
        if operation.kind == "fsync":
            entry.synced = entry.content
        else:
            entry.content = b"" if operation.kind == "truncate" else entry.content + operation.data
        return None

    def crash(self, into: Path, manner: str, seed: int | str) -> None:
        """Write what a power failure leaves into an empty folder."""
        _write(into, self.top, manner, random.Random(f"{manner} {seed}"))


def _write(path: Path, folder: Folder, manner: str, chance: random.Random) -> None:
    path.mkdir(exist_ok=True)
    for name, value in folder.survive(manner, chance).items():
        if isinstance(value, Folder):
            _write(path / name, value, manner, chance)
        else:
            (path / name).write_bytes(value.survive(manner, chance))
