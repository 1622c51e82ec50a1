"""SVHN's and SYN's cropped digits as MATLAB files: `X` is 32 x 32 x 3 x N unsigned bytes, `y` one label an image.

This reads just `X` and `y` of MATLAB's version 5 format, because `scipy.io.loadmat` is not safe on damaged files: a few
flipped bits in a header end the process with a bus error (SciPy 1.17), and a child process would cost a second a file.

An element states its type and its length. A variable is a sequence of elements (class, sizes, name, values), plain or
compressed as a whole. Every length is checked before it is used.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedheal.data.readers.streams import CHUNK, open_stream, read_exactly
from fedheal.data.splits import Pixels

MAX_IMAGES = 1_000_000  # Ganin's SYN, the largest, has 479,400
MAX_BYTES = 1 << 31
MAX_SIDE = 64  # pixels, height and width
MAX_VARIABLES = 100
MATRIX, COMPRESSED, INT8, INT32, UINT32 = 14, 15, 1, 5, 6  # types of elements
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
CLASSES = {
    1: "cell", 2: "struct", 3: "object", 4: "char", 5: "sparse", 6: "double", 7: "single", 8: "int8", 9: "uint8",
    10: "int16", 11: "uint16", 12: "int32", 13: "uint32", 14: "int64", 15: "uint64", 16: "function", 17: "opaque",
}  # fmt: skip
NUMERIC = [CLASSES[number] for number in range(6, 16)]


@dataclass(frozen=True)
class Variable:
    """The shape and class of a variable, and its values if they can be images `X` or labels `y`."""

    shape: tuple[int, ...]
    kind: str
    values: np.ndarray[Any, Any] | None = None

    def __str__(self) -> str:
        return f"{' x '.join(map(str, self.shape))} in {self.kind}"


def read_mat_images(path: Path, classes: int, zero_is_ten: bool) -> Pixels:
    """Return RGB images and their labels. With `zero_is_ten` the label 10 is the digit zero, as in SVHN."""
    with open_stream(path) as stream:
        try:
            variables = _read_variables(stream, path)
        except (struct.error, UnicodeDecodeError, zlib.error, OverflowError) as error:
            raise ValueError(f"{path} is not a readable MATLAB file ({error})") from error
    for name in ("X", "y"):
        if name not in variables:
            raise ValueError(f"{path} has no variable {name}; X (the images) and y (their labels) are required")
    images, labels = variables["X"], variables["y"]
    if images.values is None:
        raise ValueError(
            f"{path} has X of {images}; it must be height x width x 3 x N in uint8, of at most {MAX_SIDE} x {MAX_SIDE}"
        )
    count = images.shape[3]
    if labels.values is None or labels.shape not in ((count, 1), (1, count)):
        raise ValueError(f"{path} has y of {labels}; it must be {count} x 1 numbers")
    first, values = int(zero_is_ten), labels.values
    last = first + classes - 1
    if not ((values >= first) & (values <= last) & (values == np.floor(values))).all():
        raise ValueError(f"{path} has labels from {values.min()} to {values.max()}; labels must be {first} to {last}")
    cube = images.values.reshape(images.shape, order="F")
    return Pixels(cube.transpose(3, 0, 1, 2), values.astype(np.int64) % classes)


def _read_variables(stream: IO[bytes], path: Path) -> dict[str, Variable]:
    header = bytes(read_exactly(stream, 128, path))
    order = {b"IM": "<", b"MI": ">"}.get(header[126:])
    if header[:10] == b"MATLAB 7.3" or header[124:126] in (b"\x00\x02", b"\x02\x00"):
        raise ValueError(f"{path} is a MATLAB 7.3 file; save it in the version 5 format (-v7)")
    if order is None:
        raise ValueError(f"{path} is not a MATLAB file of version 5")
    variables: dict[str, Variable] = {}
    while tag := stream.read(8):
        if len(variables) == MAX_VARIABLES:
            raise ValueError(f"{path} has more than {MAX_VARIABLES} variables")
        kind, length = struct.unpack(f"{order}II", tag)
        begin = stream.tell()
        source: Any = stream
        if kind == COMPRESSED:
            source = _InflatedStream(stream, length)
            kind = struct.unpack(f"{order}II", read_exactly(source, 8, path))[0]
        if kind != MATRIX:
            raise ValueError(f"{path} has an element of type {kind} instead of a variable")
        name, variable = _read_matrix(source, order, path)
        variables[name] = variable
        if stream.seek(begin + length) > path.stat().st_size:
            raise ValueError(f"{path} is truncated: its variable {name!r} extends beyond the end")
    return variables


class _InflatedStream:
    """A file-like view of one compressed element."""

    def __init__(self, stream: IO[bytes], length: int) -> None:
        self._stream, self._left, self._inflate = stream, length, zlib.decompressobj()

    def read(self, size: int) -> bytes:
        packed = self._inflate.unconsumed_tail
        while not (data := self._inflate.decompress(packed, size)) and not self._inflate.eof:
            more = self._stream.read(min(CHUNK, self._left))
            if not more:
                break
            self._left -= len(more)
            packed = self._inflate.unconsumed_tail + more
        return data


def _read_element(source: Any, order: str, path: Path, max_bytes: int) -> tuple[int, bytearray]:
    """Return type and bytes of the next element; up to four bytes are stored in the tag itself."""
    tag = bytes(read_exactly(source, 8, path))
    kind, length = struct.unpack(f"{order}II", tag)
    if kind >> 16:
        kind, length = kind & 0xFFFF, kind >> 16
        if length > 4:
            raise ValueError(f"{path} has a small element of {length} bytes; at most 4 are possible")
        return kind, bytearray(tag[4 : 4 + length])
    if length > max_bytes:
        raise ValueError(f"{path} has an element of {length:,} bytes; at most {max_bytes:,} are expected")
    data = read_exactly(source, length, path)
    read_exactly(source, -length % 8, path)
    return kind, data


def _read_matrix(source: Any, order: str, path: Path) -> tuple[str, Variable]:
    """Return a variable and its name. Values are read only if they can be images or labels."""
    kinds, data = zip(*(_read_element(source, order, path, 1024) for _ in range(3)), strict=True)  # flags, sizes, name
    if kinds != (UINT32, INT32, INT8) or len(data[0]) != 8 or len(data[1]) % 4 or len(data[1]) < 8:
        raise ValueError(f"{path} has a variable that does not begin with its class, sizes and name")
    flags = struct.unpack(f"{order}II", data[0])[0]
    shape = struct.unpack(f"{order}{len(data[1]) // 4}i", data[1])
    name, matlab_class = data[2].decode("ascii"), CLASSES.get(flags & 0xFF, "unknown")
    if flags & 0x800:
        return name, Variable(shape, "complex numbers")
    if not _is_wanted(name, shape, matlab_class):
        return name, Variable(shape, matlab_class)
    count = math.prod(shape)
    kind, values = _read_element(source, order, path, 8 * count)
    stored = NUMBERS.get(kind)
    if stored is None or len(values) != count * np.dtype(stored).itemsize or (name == "X" and stored != "u1"):
        raise ValueError(f"{path} has {len(values):,} bytes of type {kind} for the {count:,} numbers of {name}")
    return name, Variable(shape, matlab_class, np.frombuffer(values, np.dtype(order + stored)))


def _is_wanted(name: str, shape: tuple[int, ...], matlab_class: str) -> bool:
    if name == "X":
        is_cube = len(shape) == 4 and shape[2] == 3 and matlab_class == "uint8"
        is_small = is_cube and all(0 < side <= MAX_SIDE for side in shape[:2]) and 0 < shape[3] <= MAX_IMAGES
        return is_small and math.prod(shape) <= MAX_BYTES
    is_vector = len(shape) == 2 and min(shape) == 1 and max(shape) <= MAX_IMAGES
    return name == "y" and is_vector and matlab_class in NUMERIC
