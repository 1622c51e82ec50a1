"""Decode image files, and resize images to the size of a protocol.

The resize is Pillow's bilinear filter, which widens when it shrinks an image (antialiasing). torchvision does the same
with Pillow images, and so did the paper's pipeline. Grey images are resized as grey and repeated as RGB afterwards.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP")
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".pgm", ".ppm", ".webp")
MAX_PIXELS = 64_000_000  # of one image; a file of some kilobytes may claim far more
BATCH = 256  # images at a time, limited by
BATCH_BYTES = 1 << 26


class UnreadableImageError(ValueError):
    """An image cannot be read or decoded; the message says why."""


def quote_unprintable(name: str) -> str:
    """Return a file name for a message, quoted if it has line breaks or other unprintable characters."""
    return name if name.isprintable() else repr(name)


def decode_image(data: bytes, name: str) -> Image.Image:
    """Decode an image file to grey or RGB. Raise UnreadableImageError if it is damaged or too large."""
    name = quote_unprintable(name)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise UnreadableImageError(f"{name} has {width} x {height} pixels, more than {MAX_PIXELS:,}")
            if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would clip to white
                return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
            return image.convert("L" if image.mode in ("1", "L") else "RGB")
    except UnreadableImageError:
        raise
    except UnidentifiedImageError:
        raise UnreadableImageError(f"{name} is not an image of a known format ({', '.join(FORMATS)})") from None
    except Exception as error:  # decoders raise all kinds of errors on damaged bytes
        raise UnreadableImageError(f"{name} cannot be decoded ({quote_unprintable(str(error))})") from error


def measure_depth(data: bytes) -> int:
    """Return how many of its 16 bits the brightest pixel of a 16-bit grey image uses; 0 for another or an unreadable image."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            is_deep = image.mode.startswith("I") and math.prod(image.size) <= MAX_PIXELS
            return max(1, int(np.asarray(image).max()).bit_length()) if is_deep else 0
    except Exception:  # `decode_image` explains what is wrong with it
        return 0


def resize_image(image: Image.Image, size: int) -> npt.NDArray[np.uint8]:
    """Return the image as uint8 `[3, size, size]`."""
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return np.broadcast_to(pixels, (3, size, size)) if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def decode_batches(
    count: int, get_image: Callable[[int], Image.Image], size: int
) -> Iterator[list[npt.NDArray[np.uint8] | UnreadableImageError]]:
    """Yield all images in order, in batches: each decoded and resized, or the error it raised."""

    def decode(index: int) -> npt.NDArray[np.uint8] | UnreadableImageError:
        try:
            return resize_image(get_image(index), size)
        except UnreadableImageError as error:
            return error

    step = max(1, min(BATCH, BATCH_BYTES // (3 * size * size)))
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow releases the GIL
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about odd files; `decode_image` checks sizes itself
        warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
        for start in range(0, count, step):
            yield list(pool.map(decode, range(start, min(count, start + step))))
