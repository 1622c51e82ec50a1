"""USPS as LIBSVM text: `label 1:value 2:value ...` a line, labels 1 to 10 for the digits 0 to 9, values from -1 to 1."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from fedheal.data.readers.streams import open_stream
from fedheal.data.splits import Pixels

SIDE = 16
MAX_BYTES = 1 << 26  # of text; USPS has about 20 MB
MAX_LINES = 100_000  # each becomes an image, however short; USPS has 9,298


def read_libsvm_images(path: Path, classes: int) -> Pixels:
    """Return grey 16 x 16 images and their labels. Pixels that a line leaves out are background."""
    from sklearn.datasets import load_svmlight_file  # importing it takes a second, and few runs read such files

    with open_stream(path) as stream:
        text = stream.read(MAX_BYTES)
        if stream.read(1):
            raise ValueError(f"{path} has more than {MAX_BYTES:,} bytes of text")
        if text.count(b"\n") > MAX_LINES:
            raise ValueError(f"{path} has more than {MAX_LINES:,} lines")
    try:
        sparse, labels = load_svmlight_file(io.BytesIO(text), n_features=SIDE * SIDE, zero_based=False)
    except (ValueError, IndexError, OverflowError) as error:
        raise ValueError(f"{path} is not LIBSVM text of up to {SIDE * SIDE} values a line ({error})") from error
    if not len(labels):
        raise ValueError(f"{path} has no lines")
    if not np.isin(labels, np.arange(1, classes + 1)).all():
        raise ValueError(f"{path} has labels from {labels.min():g} to {labels.max():g}; labels must be 1 to {classes}")
    if not (np.abs(sparse.data) <= 1).all():
        raise ValueError(f"{path} has values that are not between -1 and 1")
    entries, values = sparse.tocoo(), np.full(sparse.shape, -1.0)
    values[entries.row, entries.col] = entries.data
    pixels = ((values + 1) / 2 * 255).astype(np.uint8)
    return Pixels(pixels.reshape(-1, SIDE, SIDE), labels.astype(np.int64) - 1)
