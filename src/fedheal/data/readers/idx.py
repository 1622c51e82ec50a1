"""MNIST's idx format: a header of big-endian integers (element type, rank, sizes), then the bytes; often gzipped."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from fedheal.core.errors import format_count
from fedheal.data.readers.streams import open_stream, read_exactly
from fedheal.data.splits import Bytes, Pixels

UNSIGNED_BYTE = 8
MAX_BYTES = 1 << 30  # EMNIST, the largest data set in this format, has 0.7 GB


def read_idx_array(path: Path, rank: int) -> Bytes:
    """Return the array of unsigned bytes in a file, which must have `rank` dimensions."""
    with open_stream(path) as stream:
        zeros, kind, file_rank = struct.unpack(">HBB", read_exactly(stream, 4, path))
        if zeros != 0 or kind != UNSIGNED_BYTE or file_rank != rank:
            raise ValueError(f"{path} is not an idx file of unsigned bytes with {format_count(rank, 'dimension')}")
        shape = struct.unpack(f">{rank}I", read_exactly(stream, 4 * rank, path))
        if not 0 < math.prod(shape) <= MAX_BYTES:
            raise ValueError(f"{path} has an invalid header: an array of {' x '.join(map(str, shape))} bytes")
        data = read_exactly(stream, math.prod(shape), path)
        if stream.read(1):
            raise ValueError(f"{path} has more than the {math.prod(shape):,} bytes that its header states")
    return np.frombuffer(data, np.uint8).reshape(shape)


def read_idx_images(image_file: Path, label_file: Path, classes: int) -> Pixels:
    """Return grey images and their labels from the two files of a split."""
    pixels, labels = read_idx_array(image_file, 3), read_idx_array(label_file, 1)
    if len(pixels) != len(labels):
        raise ValueError(f"{image_file} has {len(pixels)} images, but {label_file.name} has {len(labels)} labels")
    if labels.max() >= classes:
        raise ValueError(f"{label_file} has the label {labels.max()}; labels must be 0 to {classes - 1}")
    return Pixels(pixels, labels.astype(np.int64))
