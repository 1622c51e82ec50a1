"""USPS as LIBSVM text: `label 1:value 2:value ...` a line, labels 1 to 10 for the digits 0 to 9, values from -1 to 1."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedheal.data.readers.streams import opened
from fedheal.data.splits import Bytes, Pixels

SIDE = 16
LONGEST = 64 * SIDE * SIDE  # of a line, in bytes
MOST_LINES = 100_000


def images(path: Path, classes: int) -> Pixels:
    """Grey 16 x 16 images and their labels."""
    rows: list[Bytes] = []
    labels: list[int] = []
    with opened(path) as stream:
        while line := stream.readline(LONGEST):
            where = f"line {len(rows) + 1} of {path}"
            if len(rows) == MOST_LINES:
                raise ValueError(f"{path} has more than {MOST_LINES:,} lines")
            label, row = _parsed(line, where)
            if not 1 <= label <= classes:
                raise ValueError(f"{where} has the label {label}; 1 to {classes} are known")
            labels.append(label - 1)
            rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no lines")
    return Pixels(np.stack(rows), np.array(labels, dtype=np.int64))


def _parsed(line: bytes, where: str) -> tuple[int, Bytes]:
    values = np.full(SIDE * SIDE, -1.0)  # what is not named is background
    try:
        label, *items = line.split()
        for item in items:
            place, _, value = item.partition(b":")
            number = int(place) - 1
            if number < 0:
                raise ValueError
            values[number] = float(value)
        number = int(float(label))
    except (ValueError, IndexError, OverflowError):
        raise ValueError(f"{where} is not a label and up to {SIDE * SIDE} values as number:value") from None
    if not (np.abs(values) <= 1).all():
        raise ValueError(f"{where} has a value that is not between -1 and 1")
    return number, ((values + 1) / 2 * 255).astype(np.uint8).reshape(SIDE, SIDE)
