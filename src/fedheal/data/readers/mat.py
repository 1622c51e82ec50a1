"""Digits as MATLAB files: one variable of images and one of labels, whose names and axes `MatNames` states.

This reads just these two of MATLAB's version 5 format, because `scipy.io.loadmat` is not safe on damaged files. A few
flipped bits in a header end the process with a bus error (SciPy 1.17). A child process would cost a second a file.

An element states its type and its length. A variable is a sequence of elements (class, sizes, name, values), plain or
compressed as a whole; a cell array holds variables. Every length is checked before it is used.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedheal.data.readers.streams import CHUNK, open_stream, read_exactly
from fedheal.data.splits import Bytes, Labels, Pixels

MAX_IMAGES = 1_000_000  # Ganin's SYN, the largest, has 479,400
MAX_BYTES = 1 << 31
MAX_SIDE = 64  # pixels, height and width
MAX_VARIABLES = 100
MAX_CELLS = 16
MATRIX, COMPRESSED, INT8, INT32, UINT32 = 14, 15, 1, 5, 6  # types of elements
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
CLASSES = {
    1: "cell", 2: "struct", 3: "object", 4: "char", 5: "sparse", 6: "double", 7: "single", 8: "int8", 9: "uint8",
    10: "int16", 11: "uint16", 12: "int32", 13: "uint32", 14: "int64", 15: "uint64", 16: "function", 17: "opaque",
}  # fmt: skip
NUMERIC = [CLASSES[number] for number in range(6, 16)]


@dataclass(frozen=True)
class MatNames:
    """How a file calls its images and labels. A cell of a cell array is `name{row,column}`, counted from 0."""

    images: str = "X"
    labels: str = "y"
    axes: str = "hwcn"  # of the images: height, width, channels (3, or 1 for grey), number
    first_label: int = 0  # 1: labels are 1 to 10, and 10 is the digit zero
    kinds: tuple[str, ...] = ("uint8",)  # floats are in [0, 1] or [0, 255]

    def is_wanted(self, name: str, shape: tuple[int, ...], matlab_class: str) -> bool:
        """Return whether a variable can be the images or the labels: only such values are read."""
        if name == self.images:
            sizes = dict(zip(self.axes, shape, strict=False))
            is_image = len(shape) == len(self.axes) and matlab_class in self.kinds and sizes.get("c", 1) in (1, 3)
            is_small = is_image and all(0 < sizes[side] <= MAX_SIDE for side in "hw") and 0 < sizes["n"] <= MAX_IMAGES
            return is_small and math.prod(shape) <= MAX_BYTES
        is_small = len(shape) == 2 and 0 < max(shape) <= MAX_IMAGES and 0 < min(shape) <= MAX_SIDE
        return name == self.labels and is_small and matlab_class in NUMERIC


@dataclass(frozen=True)
class Variable:
    """The shape and class of a variable, and its values if they can be the images or the labels."""

    shape: tuple[int, ...]
    kind: str
    values: np.ndarray[Any, Any] | None = None

    def __str__(self) -> str:
        return f"{' x '.join(map(str, self.shape))} in {self.kind}"


def read_mat_images(path: Path, classes: int, names: MatNames) -> Pixels:
    """Return images, grey or RGB, and their labels, which may be one-hot."""
    with open_stream(path) as stream:
        try:
            variables = _read_variables(stream, path, names)
        except (struct.error, UnicodeDecodeError, zlib.error, OverflowError) as error:
            raise ValueError(f"{path} is not a readable MATLAB file ({error})") from error
    for name in (names.images, names.labels):
        if name not in variables:
            raise ValueError(
                f"{path} has no variable {name}; {names.images} (the images) and {names.labels} (their labels) are required"
            )
    images, labels = variables[names.images], variables[names.labels]
    if images.values is None:
        words = {"h": "height", "w": "width", "c": "3", "n": "N"}
        wanted = f"{' x '.join(words[axis] for axis in names.axes)} in {' or '.join(names.kinds)}"
        raise ValueError(
            f"{path} has {names.images} of {images}; it must be {wanted}, of at most {MAX_SIDE} x {MAX_SIDE}"
        )
    cube = images.values.reshape(images.shape, order="F")
    cube = cube.transpose([names.axes.index(axis) for axis in "nhwc" if axis in names.axes])
    pixels = _scale(cube[..., 0] if cube.shape[3:] == (1,) else cube, f"{path} has {names.images}")
    return Pixels(pixels, _decode_labels(labels, len(pixels), classes, names, path))


def _scale(values: np.ndarray[Any, Any], where: str) -> Bytes:
    """Return pixels as bytes. Floats up to 1 are shares of white."""
    if values.dtype == np.uint8:
        return values
    low, high = float(values.min()), float(values.max())
    if not 0 <= low <= high <= 255:
        raise ValueError(f"{where} from {low} to {high}; pixels must be 0 to 1, or 0 to 255")
    return (values * (255 if high <= 1 else 1)).astype(np.uint8)


def _decode_labels(labels: Variable, count: int, classes: int, names: MatNames, path: Path) -> Labels:
    values = labels.values
    if values is not None and labels.shape == (count, classes):
        table = values.reshape(labels.shape, order="F")
        if not (np.isin(table, (0, 1)).all() and (table.sum(axis=1) == 1).all()):
            raise ValueError(f"{path} has {names.labels} with rows that are not one-hot")
        found: Labels = table.argmax(axis=1)
        return found
    if values is None or labels.shape not in ((count, 1), (1, count)):
        raise ValueError(
            f"{path} has {names.labels} of {labels}; it must be {count} x 1 or {count} x {classes} numbers"
        )
    first, last = names.first_label, names.first_label + classes - 1
    if not ((values >= first) & (values <= last) & (values == np.floor(values))).all():
        raise ValueError(f"{path} has labels from {values.min()} to {values.max()}; labels must be {first} to {last}")
    return values.astype(np.int64) % classes


def _read_variables(stream: IO[bytes], path: Path, names: MatNames) -> dict[str, Variable]:
    header = bytes(read_exactly(stream, 128, path))
    order = {b"IM": "<", b"MI": ">"}.get(header[126:])
    if header[:10] == b"MATLAB 7.3" or header[124:126] in (b"\x00\x02", b"\x02\x00"):
        raise ValueError(f"{path} is a MATLAB 7.3 file; save it in the version 5 format (-v7)")
    if order is None:
        raise ValueError(f"{path} is not a MATLAB file of version 5")
    variables: dict[str, Variable] = {}
    while tag := stream.read(8):
        if len(variables) >= MAX_VARIABLES:
            raise ValueError(f"{path} has more than {MAX_VARIABLES} variables")
        kind, length = struct.unpack(f"{order}II", tag)
        begin = stream.tell()
        source: Any = stream
        if kind == COMPRESSED:
            source = _InflatedStream(stream, length)
            kind = struct.unpack(f"{order}II", read_exactly(source, 8, path))[0]
        if kind != MATRIX:
            raise ValueError(f"{path} has an element of type {kind} instead of a variable")
        name = _read_matrix(source, order, path, names, variables)
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


def _read_matrix(
    source: Any, order: str, path: Path, names: MatNames, variables: dict[str, Variable], cell: str = ""
) -> str:
    """Add a variable, or the variables of a cell array, to `variables`, and return its name; a cell has the name `cell`."""
    kinds, data = zip(*(_read_element(source, order, path, 1024) for _ in range(3)), strict=True)  # flags, sizes, name
    if kinds != (UINT32, INT32, INT8) or len(data[0]) != 8 or len(data[1]) % 4 or len(data[1]) < 8:
        raise ValueError(f"{path} has a variable that does not begin with its class, sizes and name")
    flags = struct.unpack(f"{order}II", data[0])[0]
    shape = struct.unpack(f"{order}{len(data[1]) // 4}i", data[1])
    name, matlab_class = cell or data[2].decode("ascii"), CLASSES.get(flags & 0xFF, "unknown")
    if flags & 0x800:
        matlab_class = "complex numbers"
    variables[name] = Variable(shape, matlab_class)
    if matlab_class == "cell" and not cell and names.images.startswith(f"{name}{{"):
        _read_cells(source, order, path, names, variables, name)
    elif names.is_wanted(name, shape, matlab_class):
        count = math.prod(shape)
        kind, values = _read_element(source, order, path, 8 * count)
        stored = NUMBERS.get(kind)
        is_wrong = stored is None or len(values) != count * np.dtype(stored).itemsize
        if is_wrong or (matlab_class == "uint8" and name == names.images and stored != "u1"):
            raise ValueError(f"{path} has {len(values):,} bytes of type {kind} for the {count:,} numbers of {name}")
        variables[name] = Variable(shape, matlab_class, np.frombuffer(values, np.dtype(f"{order}{stored}")))
    return name


def _read_cells(
    source: Any, order: str, path: Path, names: MatNames, variables: dict[str, Variable], name: str
) -> None:
    """Add the cells of a cell array to `variables`, column by column as they are stored."""
    shape = variables[name].shape
    if len(shape) != 2 or not 0 < math.prod(shape) <= MAX_CELLS:
        raise ValueError(f"{path} has {name} of {variables[name]}; at most {MAX_CELLS} cells are expected")
    for column in range(shape[1]):
        for row in range(shape[0]):
            kind, data = _read_element(source, order, path, MAX_BYTES)
            if kind != MATRIX:
                raise ValueError(f"{path} has an element of type {kind} instead of a cell of {name}")
            _read_matrix(io.BytesIO(data), order, path, names, variables, f"{name}{{{row},{column}}}")
