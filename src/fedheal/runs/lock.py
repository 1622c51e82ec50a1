"""One process at a time in a run folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

LOCK = "lock.tmp"
# The system releases the lock of a killed process only when the last of its threads has ended.
WAIT_SECONDS = 2.0


def acquire_lock(folder: Path) -> BaseFileLock:
    """Keep other processes out of a folder until `release()` or the end of the process, where the file system has locks."""
    path = folder / LOCK
    path.touch()  # a full disk or a missing permission is an error; a missing lock is not
    lock = FileLock(path, timeout=WAIT_SECONDS, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{folder} is in use by another run: wait until it ends, or stop it") from None
    except OSError:
        return lock
    for leftover in (*folder.glob("*.tmp"), *folder.glob("state/*.tmp")):  # of killed processes
        if leftover != path:
            leftover.unlink(missing_ok=True)
    return lock


@contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder within a `with` block: two runs would mix their rounds."""
    lock = acquire_lock(folder)
    try:
        yield
    finally:
        lock.release()
