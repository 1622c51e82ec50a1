"""Reading files that may be cut off or lie about their size: no more is held in memory than was really there."""

from __future__ import annotations

import bz2
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

CHUNK = 1 << 20


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A plain, gzip or bzip2 file, by its suffix; damage becomes a sentence."""
    try:
        with _open(path) as stream:
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged or cut off ({error})") from error
    except OSError as error:
        if error.errno is not None:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        raise ValueError(f"{path} is damaged or cut off ({error})") from error  # what bz2 raises


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    return cast(IO[bytes], bz2.open(path, "rb")) if path.suffix == ".bz2" else path.open("rb")


def exactly(stream: IO[bytes], number: int, path: Path) -> bytearray:
    """The next `number` bytes, taken as they come."""
    found = bytearray()
    while len(found) < number:
        part = stream.read(min(CHUNK, number - len(found)))
        if not part:
            raise ValueError(f"{path} ends after {len(found):,} of the {number:,} bytes that it promises")
        found += part
    return found
