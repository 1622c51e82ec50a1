"""SVHN's and SYN's cropped digits as MATLAB files: `X` is 32 x 32 x 3 x N unsigned bytes, `y` one label an image.

A reader for just this much of MATLAB's version 5 format, because files from elsewhere may be damaged or made to harm, and
scipy's reader can crash the process on them. Everything is checked before it is believed: an element names its type and its
length; a variable is a sequence of such elements (class, sizes, name, values), plain or compressed as a whole.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedheal.data.readers.streams import CHUNK, exactly, opened
from fedheal.data.splits import Labels, Pixels

MOST_IMAGES = 1_000_000  # Ganin's SYN, the largest, has 479,400
MOST_BYTES = 1 << 31
LARGEST = 64  # pixels, height and width
MOST_VARIABLES = 100
MATRIX, COMPRESSED, INT8, INT32, UINT32 = 14, 15, 1, 5, 6  # types of elements
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
CLASSES = {
    1: "cell", 2: "struct", 3: "object", 4: "char", 5: "sparse", 6: "double", 7: "single", 8: "int8", 9: "uint8",
    10: "int16", 11: "uint16", 12: "int32", 13: "uint32", 14: "int64", 15: "uint64", 16: "function", 17: "opaque",
}  # fmt: skip
NUMERIC = ("double", "single", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@dataclass(frozen=True)
class Variable:
    """What a variable is, and its values where they were wanted."""

    shape: tuple[int, ...]
    kind: str
    values: np.ndarray[Any, Any] | None = None

    def __str__(self) -> str:
        return f"{' x '.join(map(str, self.shape))} in {self.kind}"


def images(path: Path, classes: int, zero_is_ten: bool) -> Pixels:
    """RGB images and their labels; SVHN writes 10 for the digit zero."""
    held = read(path)
    pictures, answers = held.get("X"), held.get("y")
    if pictures is None or answers is None:
        missing = "X" if pictures is None else "y"
        raise ValueError(f"{path} has no variable {missing}; X (the images) and y (their labels) are needed")
    if pictures.values is None:
        raise ValueError(
            f"{path} has X of {pictures}; height x width x 3 x N in uint8 is needed, of at most {LARGEST} x {LARGEST}"
        )
    number = pictures.shape[3]
    if answers.values is None or answers.shape not in ((number, 1), (1, number)):
        raise ValueError(f"{path} has y of {answers}; {number} x 1 numbers are needed")
    cube = pictures.values.reshape(pictures.shape, order="F")
    return Pixels(cube.transpose(3, 0, 1, 2), _labels(answers.values, path, classes, zero_is_ten))


def read(path: Path) -> Mapping[str, Variable]:
    """The variables of a file by name; of values only those that can be images `X` or labels `y`."""
    with opened(path) as stream:
        try:
            return _variables(stream, path)
        except (struct.error, UnicodeDecodeError, zlib.error, OverflowError) as error:
            raise ValueError(f"{path} is not a MATLAB file that can be read ({error})") from error


def _variables(stream: IO[bytes], path: Path) -> dict[str, Variable]:
    header = bytes(exactly(stream, 128, path))
    order = {b"IM": "<", b"MI": ">"}.get(header[126:])
    if header[:10] == b"MATLAB 7.3" or header[124:126] in (b"\x00\x02", b"\x02\x00"):
        raise ValueError(f"{path} is a MATLAB 7.3 file; save it in the version 5 format (-v7)")
    if order is None:
        raise ValueError(f"{path} is not a MATLAB file of version 5")
    found: dict[str, Variable] = {}
    while len(found) < MOST_VARIABLES:
        tag = stream.read(8)
        if not tag:
            return found
        kind, length = struct.unpack(f"{order}II", tag)
        begin = stream.tell()
        if kind == COMPRESSED:
            inner = _Inflated(stream, length)
            name, variable = _matrix(_Elements(inner, order, path), _kind(inner, order, path))
        elif kind == MATRIX:
            name, variable = _matrix(_Elements(stream, order, path), kind)
        else:
            raise ValueError(f"{path} has an element of type {kind} where a variable should begin")
        found[name] = variable
        if stream.seek(begin + length) > path.stat().st_size:
            raise ValueError(f"{path} is cut off: its variable {name!r} goes on after its end")
    raise ValueError(f"{path} has more than {MOST_VARIABLES} variables")


class _Inflated:
    """Reads like a file from a compressed element, no further than it goes."""

    def __init__(self, stream: IO[bytes], length: int) -> None:
        self._stream, self._left, self._inflate = stream, length, zlib.decompressobj()

    def read(self, number: int) -> bytes:
        while True:
            data = self._inflate.decompress(self._inflate.unconsumed_tail, number)
            if data or self._inflate.eof:
                return data
            packed = self._stream.read(min(CHUNK, self._left))
            if not packed:
                return b""
            self._left -= len(packed)
            data = self._inflate.decompress(self._inflate.unconsumed_tail + packed, number)
            if data:
                return data


@dataclass
class _Elements:
    """The elements of one variable, one after the other."""

    stream: Any  # a file, or what reads like one
    order: str
    path: Path

    def next(self, most: int) -> tuple[int, bytearray]:
        """Type and bytes of the next element; up to four bytes stand in the tag itself."""
        raw = bytes(exactly(self.stream, 8, self.path))
        kind, length = struct.unpack(f"{self.order}II", raw)
        if kind >> 16:
            kind, length = kind & 0xFFFF, kind >> 16
            if length > 4:
                raise ValueError(f"{self.path} has an element of {length} bytes where 4 fit")
            return kind, bytearray(raw[4 : 4 + length])
        if length > most:
            raise ValueError(f"{self.path} has an element of {length:,} bytes where at most {most:,} are expected")
        data = exactly(self.stream, length, self.path)
        exactly(self.stream, -length % 8, self.path)
        return kind, data


def _kind(stream: Any, order: str, path: Path) -> int:
    """The type that the next tag names."""
    kind: int = struct.unpack(f"{order}II", bytes(exactly(stream, 8, path)))[0]
    return kind


def _matrix(elements: _Elements, kind: int) -> tuple[str, Variable]:
    path, order = elements.path, elements.order
    if kind != MATRIX:
        raise ValueError(f"{path} has an element of type {kind} where a variable should be")
    kinds, data = zip(*(elements.next(1024) for _ in range(3)), strict=True)  # flags, sizes, name
    if kinds != (UINT32, INT32, INT8) or len(data[0]) != 8 or len(data[1]) % 4 or len(data[1]) < 8:
        raise ValueError(f"{path} has a variable that does not begin with its class, sizes and name")
    flags = struct.unpack(f"{order}II", data[0])[0]
    shape = struct.unpack(f"{order}{len(data[1]) // 4}i", data[1])
    name, what = data[2].decode("ascii"), CLASSES.get(flags & 0xFF, "unknown")
    is_complex = bool(flags & 0x800)
    if not _fits(name, shape, what) or is_complex:
        return name, Variable(shape, "complex numbers" if is_complex else what)
    number = math.prod(shape)
    kind, values = elements.next(8 * number)
    stored = NUMBERS.get(kind)
    if stored is None or len(values) != number * np.dtype(stored).itemsize or (name == "X" and stored != "u1"):
        raise ValueError(f"{path} has {len(values):,} bytes of type {kind} for {name}, which is {number:,} numbers")
    return name, Variable(shape, what, np.frombuffer(values, np.dtype(order + stored)))


def _fits(name: str, shape: tuple[int, ...], what: str) -> bool:
    """Whether a variable can be what is wanted, so that its values are worth reading."""
    if name == "X":
        is_cube = len(shape) == 4 and shape[2] == 3 and what == "uint8"
        fits = is_cube and all(0 < side <= LARGEST for side in shape[:2]) and 0 < shape[3] <= MOST_IMAGES
        return fits and math.prod(shape) <= MOST_BYTES
    return name == "y" and len(shape) == 2 and min(shape) == 1 and max(shape) <= MOST_IMAGES and what in NUMERIC


def _labels(found: np.ndarray[Any, Any], path: Path, classes: int, zero_is_ten: bool) -> Labels:
    first = 1 if zero_is_ten else 0
    last = first + classes - 1
    if not ((found >= first) & (found <= last) & (found == np.floor(found))).all():
        raise ValueError(f"{path} has labels from {found.min()} to {found.max()}; {first} to {last} are known")
    return found.astype(np.int64) % classes
