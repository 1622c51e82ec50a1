"""Watch, delay or fail what a process does to the files under a folder, one operation at a time.

`watch(root, on_operation)` replaces the functions of `os` and `open` that change files, for code in this process. Each `write`
is one that the system gets, not one into a buffer.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock


@dataclass(frozen=True)
class Operation:
    """One change of a file or folder: mkdir, create, truncate, write, fsync, rename or unlink."""

    kind: str
    path: str
    data: bytes = b""  # of a write
    target: str = ""  # of a rename


OnOperation = Callable[[Operation], None]  # called before the operation; what it raises happens instead


def raise_disk_full(*_: object) -> NoReturn:
    """Fail like a write to a full disk, in place of any function."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def watch(root: Path, on_operation: OnOperation) -> Iterator[None]:
    """Call `on_operation` before every change under `root`, within the block."""
    inside = os.path.realpath(root) + os.sep
    real_open, real = (
        builtins.open,
        {name: getattr(os, name) for name in ("open", "fsync", "mkdir", "unlink", "rename")},
    )

    def report(kind: str, path: Any, **more: Any) -> None:
        real_path = os.path.realpath(os.fspath(path))
        if f"{real_path}{os.sep}".startswith(inside) and os.path.isdir(
            os.path.dirname(real_path)
        ):  # else it fails anyway
            on_operation(Operation(kind, real_path, **more))

    class WatchedFile(io.FileIO):
        def write(self, data: Any) -> int:
            report("write", os.readlink(f"/proc/self/fd/{self.fileno()}"), data=bytes(data))
            return super().write(data)

    def open_file(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
                  newline: Any = None, closefd: bool = True, opener: Any = None) -> Any:  # fmt: skip
        if not set("wax") & set(mode) or isinstance(file, int):
            return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if opener is None:
            opener = os.open
        raw = WatchedFile(os.fspath(file), mode.replace("b", "").replace("t", ""), opener=opener)
        buffer = io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline)

    def open_descriptor(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT and not os.path.lexists(path):
            report("create", path)
        elif flags & os.O_TRUNC:
            report("truncate", path)
        return int(real["open"](path, flags, mode, dir_fd=dir_fd))

    def fsync(descriptor: int) -> None:
        report("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        real["fsync"](descriptor)

    def rename(source: Any, target: Any, **keys: Any) -> None:
        report("rename", source, target=os.path.realpath(target))
        real["rename"](source, target, **keys)

    def mkdir(path: Any, mode: int = 0o777, **keys: Any) -> None:
        if not os.path.lexists(path):
            report("mkdir", path)
        real["mkdir"](path, mode, **keys)

    def unlink(path: Any, **keys: Any) -> None:
        if os.path.lexists(path):
            report("unlink", path)
        real["unlink"](path, **keys)

    functions = {"open": open_descriptor, "fsync": fsync, "rename": rename, "replace": rename, "mkdir": mkdir,
                 "unlink": unlink, "remove": unlink}  # fmt: skip
    patched = mock.patch.multiple(os, **functions), mock.patch.object(io, "open", open_file)
    with patched[0], patched[1], mock.patch.object(builtins, "open", open_file):
        yield
