"""One image file to pixels, and pixels to the size a protocol asks for.

The resize is Pillow's bilinear filter, which widens when it shrinks an image (antialiasing): what torchvision does with
Pillow images, and so what the paper's pipeline saw. Grey images are resized as grey and repeated as RGB afterwards.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP")
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".pgm", ".ppm", ".webp")
MOST_PIXELS = 64_000_000  # of one image; a file of some kilobytes may claim to be far more
BATCH = 256  # images at a time, or fewer:
BATCH_BYTES = 1 << 26


class Unreadable(ValueError):
    """An image that cannot be decoded, with the reason."""


def printable(name: str) -> str:
    """A file's name for a sentence: one with line breaks or bytes that are no text is quoted."""
    return name if name.isprintable() else repr(name)


def decoded(data: bytes, name: str) -> Image.Image:
    """An image file, as grey or RGB. `Unreadable` says what is wrong with it."""
    name = printable(name)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise Unreadable(f"{name} has {width} x {height} pixels, more than {MOST_PIXELS:,}")
            return image.convert("L" if image.mode in ("1", "L") else "RGB")
    except Unreadable:
        raise
    except UnidentifiedImageError:
        raise Unreadable(f"{name} is not an image of a known kind ({', '.join(FORMATS)})") from None
    except Exception as error:  # decoders raise whatever damaged bytes make them trip over
        raise Unreadable(f"{name} cannot be decoded ({printable(str(error))})") from error


def resized(image: Image.Image, size: int) -> npt.NDArray[np.uint8]:
    """uint8 `[3, size, size]`."""
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return np.broadcast_to(pixels, (3, size, size)) if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def batches(
    number: int, image: Callable[[int], Image.Image], size: int
) -> Iterator[list[npt.NDArray[np.uint8] | Unreadable]]:
    """All images in order, some at a time: decoded and resized, or what is wrong with them."""

    def one(index: int) -> npt.NDArray[np.uint8] | Unreadable:
        try:
            return resized(image(index), size)
        except Unreadable as trouble:
            return trouble

    step = max(1, min(BATCH, BATCH_BYTES // (3 * size * size)))
    with calm(), ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes and resizes without holding the lock
        for start in range(0, number, step):
            yield list(pool.map(one, range(start, min(number, start + step))))


@contextmanager
def calm() -> Iterator[None]:
    """Pillow's warnings about odd files say nothing that matters here; sizes are checked above."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
        yield
