"""MNIST's own format, idx: a header of big-endian integers (element type, rank, sizes), then the bytes; often gzipped."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from fedheal.data.readers.streams import exactly, opened
from fedheal.data.splits import Bytes, Pixels

UNSIGNED_BYTE = 8
MOST_BYTES = 1 << 31  # EMNIST, the largest set in this format, has 0.7 GB


def read(path: Path, rank: int) -> Bytes:
    """The array of unsigned bytes in a file; `rank` is how many sizes it must have."""
    with opened(path) as stream:
        zeros, kind, found = struct.unpack(">HBB", exactly(stream, 4, path))
        if zeros != 0 or kind != UNSIGNED_BYTE or found != rank:
            raise ValueError(f"{path} is not an idx file of unsigned bytes with {rank} dimension(s)")
        shape = struct.unpack(f">{rank}I", exactly(stream, 4 * rank, path))
        if math.prod(shape) > MOST_BYTES or math.prod(shape) == 0:
            raise ValueError(f"{path} promises an array of {' x '.join(map(str, shape))} bytes, which cannot be right")
        data = exactly(stream, math.prod(shape), path)
        if stream.read(1):
            raise ValueError(f"{path} goes on after the {math.prod(shape):,} bytes that it promises")
    return np.frombuffer(data, np.uint8).reshape(shape)


def images(image_file: Path, label_file: Path, classes: int) -> Pixels:
    """Grey images and their labels, from the two files of a split."""
    pixels, labels = read(image_file, 3), read(label_file, 1)
    if len(pixels) != len(labels):
        raise ValueError(f"{image_file} has {len(pixels)} images, but {label_file.name} has {len(labels)} labels")
    if labels.max() >= classes:
        raise ValueError(f"{label_file} has a label {labels.max()}; 0 to {classes - 1} are known")
    return Pixels(pixels, labels.astype(np.int64))
