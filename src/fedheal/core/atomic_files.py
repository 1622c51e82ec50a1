"""Write files that neither a killed process nor a power failure can spoil.

A file appears whole, by one rename. Its bytes are on the disk before the rename, and the rename is on the disk when a
function here returns. So a power failure cannot lose this file and keep a file that the caller writes later.
"""

from __future__ import annotations

import errno
import glob
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from secrets import token_hex

LEFTOVER_SECONDS = 600  # age of a temporary file whose process must be dead
# File systems that cannot do it, and folders that we may not read.
NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM}


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    write_bytes(path, text.encode())


def write_if_changed(path: Path, text: str) -> None:
    """Write a text file unless it holds this text already: what is finished may be on a read-only disk."""
    if not path.is_file() or path.read_bytes() != text.encode():
        write_text(path, text)


def write_bytes(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file, whole or not at all. `mode`: its permissions, less the umask, which other threads may not change."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file")
    temporary = path.with_name(f"{path.name}.{token_hex(4)}.tmp")  # its own: others may write the same file now
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_path(path.parent)
    except BaseException as error:
        with suppress(OSError):  # the folder may be missing
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    _remove_leftovers(path)


def sync_path(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk. Some systems cannot sync folders."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":
        return
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not is_folder or error.errno not in NO_FOLDER_SYNC:
            raise


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files of `path` that killed processes left."""
    for other in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        with suppress(FileNotFoundError):  # another process may do the same
            # Both times are the file system's: this process's clock does not matter.
            if path.stat().st_mtime - other.stat().st_mtime > LEFTOVER_SECONDS:
                other.unlink()
