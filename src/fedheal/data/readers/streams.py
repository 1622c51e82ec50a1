"""Bounded reading of files that may be truncated or state a wrong size: memory follows the bytes that are really there."""

from __future__ import annotations

import bz2
import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

CHUNK = 1 << 20


@contextmanager
def open_stream(path: Path) -> Iterator[IO[bytes]]:
    """Open a plain, gzip or bzip2 file, chosen by its suffix. Raise ValueError if it is damaged."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open}
    try:
        with openers.get(path.suffix, open)(path, "rb") as stream:
            yield stream
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        raise ValueError(
            f"{path} is damaged or truncated ({error}): get the file again"
        ) from error  # gzip and bz2 raise OSError, too


def read_exactly(stream: IO[bytes], size: int, path: Path) -> bytearray:
    """Return the next `size` bytes, read in chunks. Raise ValueError if there are fewer."""
    data = bytearray()
    while len(data) < size:
        chunk = stream.read(min(CHUNK, size - len(data)))
        if not chunk:
            raise ValueError(f"{path} ends after {len(data):,} of {size:,} expected bytes: get the file again")
        data += chunk
    return data
