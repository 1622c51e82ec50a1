"""Warp, blur and blend images in integer arithmetic, so that the bytes are the same on every machine.

Grey images are int64 [N, H, W] with values 0..255. Coordinates are fixed point, `ONE` units to a pixel, relative to the middle
of the image.
"""

from __future__ import annotations

import numpy as np

from fedheal.core.arrays import Integers

ONE = 256


def make_pixel_grid(size: int) -> tuple[Integers, Integers]:
    """Return the coordinates x and y of all pixels, each [1, size, size]."""
    line = (2 * np.arange(size, dtype=np.int64) - (size - 1)) * (ONE // 2)
    x, y = np.meshgrid(line, line)
    return x[None], y[None]


def rotate(x: Integers, y: Integers, sine: Integers) -> tuple[Integers, Integers]:
    """Rotate by small angles whose sines are sine / ONE (second-order cosine, so no trigonometry is needed)."""
    cosine = ONE - sine * sine // (2 * ONE)
    return (cosine * x - sine * y) // ONE, (sine * x + cosine * y) // ONE


def sample_bilinear(images: Integers, x: Integers, y: Integers) -> Integers:
    """Interpolate each image bilinearly at its points x, y; black outside."""
    n, height, width = images.shape
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    x = np.clip(x + (width + 1) * ONE // 2, 0, (width + 1) * ONE - 1)
    y = np.clip(y + (height + 1) * ONE // 2, 0, (height + 1) * ONE - 1)
    right, down = x % ONE, y % ONE
    first = np.arange(n)[:, None, None] * (height + 2)  # first row of each image in the flat array
    above = (first + y // ONE) * (width + 2) + x // ONE
    below = above + width + 2
    top = padded.take(above) * (ONE - right) + padded.take(above + 1) * right
    bottom = padded.take(below) * (ONE - right) + padded.take(below + 1) * right
    value: Integers = (top * (ONE - down) + bottom * down + ONE * ONE // 2) // (ONE * ONE)
    return value


def blur(images: Integers) -> Integers:
    """Apply the 3 x 3 binomial filter with repeated edges over the last two axes."""
    p: Integers = np.pad(images, [(0, 0)] * (images.ndim - 2) + [(1, 1), (1, 1)], mode="edge")
    rows: Integers = p[..., :-2, :] + 2 * p[..., 1:-1, :] + p[..., 2:, :]
    return (rows[..., :-2] + 2 * rows[..., 1:-1] + rows[..., 2:] + 8) // 16


def shrink(images: Integers, factor: int) -> Integers:
    """Average squares of factor x factor pixels."""
    n, height, width = images.shape
    total: Integers = images.reshape(n, height // factor, factor, width // factor, factor).sum(axis=(2, 4))
    return (total + factor * factor // 2) // (factor * factor)


def blend(below: Integers, above: Integers, opacity: Integers) -> Integers:
    """Blend `above` over `below` with an opacity from 0 to 255."""
    return (below * (255 - opacity) + above * opacity + 127) // 255
