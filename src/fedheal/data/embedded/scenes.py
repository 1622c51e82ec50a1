"""The four ways digits look in the embedded data set, each a function from labels to images.

Every function is given the name of the split it draws for; that name and nothing else selects the random
numbers. Grey ink is drawn first, colour and noise follow. All arithmetic is on integers (see `_raster`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedheal.data.embedded.draw import Ints, integers
from fedheal.data.embedded.raster import ONE, blend, blur, centred_grid, per_image, rotated, sample, shrink

SIZE = 32

# Segments lit by each digit, in the usual order a (top), b, c (right), d (bottom), e, f (left), g (middle).
_LIT = "1111110 0110000 1101101 1111001 0110011 1011011 1011111 1110000 1111111 1111011"
SEGMENTS = np.array([[int(lit) for lit in digit] for digit in _LIT.split()], dtype=np.int64)


@dataclass(frozen=True)
class SegmentStyle:
    """How the segments of a display look; each field is a range from which every image draws."""

    half_thickness: tuple[int, int]  # in 1/512 pixel
    slant: tuple[int, int]  # tangent, in 1/256


def handwritten(pixels: Ints) -> Ints:
    """8 x 8 pen images with values 0..16, enlarged to 32 x 32: light ink on black, grey as RGB."""
    x, y = centred_grid(SIZE)
    still = per_image(np.zeros(len(pixels), dtype=np.int64))
    return _rgb(sample(np.minimum(255, pixels * 16), x // 4 + still, y // 4 + still))


def printed(labels: Ints, glyphs: Ints, name: str) -> Ints:
    """Dark ink on paper: one digit per image, slightly moved, scaled and of varying weight."""
    n = len(labels)
    font = integers(f"{name}/font", 0, len(glyphs) - 1, n)
    x, y = _placed(name, n, zoom=(300, 420), shift=3, slope=10)
    ink = _weighted(sample(blur(glyphs)[font, labels], x, y), integers(f"{name}/weight", 40, 110, n))
    paper = per_image(integers(f"{name}/paper", 225, 250, n))
    pen = per_image(integers(f"{name}/pen", 5, 60, n))
    return _rgb(blend(paper, pen, ink)) + _noise(f"{name}/grain", n, 6)


def street(labels: Ints, glyphs: Ints, name: str) -> Ints:
    """House numbers: two colours, neighbours cut off at the sides, perspective, clutter, blur and noise."""
    n = len(labels)
    font = integers(f"{name}/font", 0, len(glyphs) - 1, n)
    x, y = _placed(name, n, zoom=(290, 440), shift=3, slope=40)
    x, y = _perspective(x, y, name)
    soft = blur(glyphs)
    ink = sample(soft[font, labels], x, y)
    for side in (-1, 1):
        neighbour = integers(f"{name}/neighbour{side}", 0, 9, n)
        gap = per_image(integers(f"{name}/gap{side}", 26, 44, n)) * ONE
        ink = np.maximum(ink, sample(soft[font, neighbour], x - side * gap, y))
    ink = _weighted(ink, integers(f"{name}/weight", 40, 100, n))
    wall, paint = _two_colours(name, n)
    scene = _clutter(_shaded(wall, name), name)
    image = blend(scene, paint[:, :, None, None], ink[:, None])
    return _out_of_focus(image, integers(f"{name}/focus", 0, 255, n)) + _noise(f"{name}/grain", n, 24)


def display(labels: Ints, style: SegmentStyle, name: str) -> Ints:
    """Seven-segment displays: segments that are off show too, so that only contrast tells the digit."""
    n = len(labels)
    x, y = centred_grid(2 * SIZE)
    x, y = rotated(x, y, integers(f"{name}/slope", -8, 8, n))
    x = x + y * per_image(integers(f"{name}/slant", *style.slant, n)) // ONE
    x = x + per_image(integers(f"{name}/x", -4, 4, n)) * ONE
    y = y + per_image(integers(f"{name}/y", -4, 4, n)) * ONE
    segments = _segments(x, y, style, name)
    lit = shrink((segments * SEGMENTS[labels][:, :, None, None]).max(axis=1), 2)
    ghost = shrink(segments.max(axis=1), 2)
    panel, on, off = _panel(name, n)
    image = blend(panel[:, :, None, None], off[:, :, None, None], ghost[:, None])
    image = blend(image, on[:, :, None, None], lit[:, None])
    return _glare(blur(image), name) + _noise(f"{name}/grain", n, 32)


def _rgb(grey: Ints) -> Ints:
    return np.repeat(grey[:, None], 3, axis=1)


def _noise(name: str, n: int, amount: int) -> Ints:
    return integers(name, -amount, amount, n, 3, SIZE, SIZE)


def _placed(name: str, n: int, *, zoom: tuple[int, int], shift: int, slope: int) -> tuple[Ints, Ints]:
    """Where each pixel of the image lies on the glyph: moved, turned, and scaled by ONE / zoom."""
    x, y = centred_grid(SIZE)
    x = x + per_image(integers(f"{name}/x", -shift * ONE, shift * ONE, n))
    y = y + per_image(integers(f"{name}/y", -shift * ONE, shift * ONE, n))
    x, y = rotated(x, y, integers(f"{name}/slope", -slope, slope, n))
    height = per_image(integers(f"{name}/zoom", *zoom, n))
    width = height * per_image(integers(f"{name}/aspect", 230, 290, n)) // ONE
    return x * width // ONE, y * height // ONE


def _perspective(x: Ints, y: Ints, name: str) -> tuple[Ints, Ints]:
    """Divide by 1 + g x + h y with small g and h: one side of the sign is nearer than the other."""
    n = len(x)
    g, h = (per_image(integers(f"{name}/tilt-{axis}", -3, 3, n)) for axis in "xy")
    depth = np.maximum(256 * ONE + g * x + h * y, 64 * ONE)
    return x * 256 * ONE // depth, y * 256 * ONE // depth


def _weighted(ink: Ints, threshold: Ints) -> Ints:
    """Steepen soft ink around a threshold: a low one gives a bold stroke, a high one a fine stroke."""
    steep: Ints = np.clip((ink - per_image(threshold)) * 3, 0, 255)
    return steep


def _two_colours(name: str, n: int) -> tuple[Ints, Ints]:
    """Wall and paint [n, 3], whose brightness differs by at least 70 before tinting."""
    bright, dark = integers(f"{name}/bright", 130, 220, n), integers(f"{name}/dark", 30, 60, n)
    swap = integers(f"{name}/swap", 0, 1, n) == 1
    wall, paint = np.where(swap, dark, bright), np.where(swap, bright, dark)
    tint_wall = integers(f"{name}/tint-wall", -35, 35, n, 3)
    tint_paint = integers(f"{name}/tint-paint", -35, 35, n, 3)
    return np.clip(wall[:, None] + tint_wall, 0, 255), np.clip(paint[:, None] + tint_paint, 0, 255)


def _shaded(colour: Ints, name: str) -> Ints:
    """A colour [n, 3] over the whole image, falling off to one side."""
    x, y = centred_grid(SIZE)
    n = len(colour)
    g, h = (per_image(integers(f"{name}/fall-{axis}", -2, 2, n)) for axis in "xy")
    fall: Ints = (g * x + h * y) // (2 * ONE)
    return colour[:, :, None, None] + fall[:, None]


def _clutter(scene: Ints, name: str) -> Ints:
    """Three bars of other brightness across the wall: joints, frames, shadows."""
    n = len(scene)
    x, y = centred_grid(SIZE)
    for k in range(3):
        lean = per_image(integers(f"{name}/bar{k}-lean", -60, 60, n))
        upright = per_image(integers(f"{name}/bar{k}-upright", 0, 1, n))
        place = per_image(integers(f"{name}/bar{k}-place", -16 * ONE, 16 * ONE, n))
        half = per_image(integers(f"{name}/bar{k}-half", ONE // 2, 3 * ONE, n))
        across = np.where(upright == 1, x + lean * y // ONE, y + lean * x // ONE) - place
        change = per_image(integers(f"{name}/bar{k}-change", -45, 45, n))
        scene = scene + np.where(np.abs(across) < half, change, 0)[:, None]
    return scene


def _out_of_focus(images: Ints, amount: Ints) -> Ints:
    return blend(images, blur(blur(images)), amount[:, None, None, None])


def _segments(x: Ints, y: Ints, style: SegmentStyle, name: str) -> Ints:
    """The seven segments, 0 or 255, as [n, 7, H, W]: bars with pointed ends, in double resolution."""
    n = len(x)
    wide = per_image(integers(f"{name}/wide", 9 * ONE, 13 * ONE, n))  # half the digit's width
    tall = per_image(integers(f"{name}/tall", 10 * ONE, 12 * ONE, n))  # half of one of its two storeys
    half = per_image(integers(f"{name}/thick", *style.half_thickness, n))
    bars = []
    for level, column in ((-2, 0), (-1, 1), (1, 1), (2, 0), (1, -1), (-1, -1), (0, 0)):
        u, v = x - column * wide, y - level * tall
        along, across, length = (u, v, wide) if column == 0 else (v, u, tall)
        along, across = np.abs(along), np.abs(across)
        bars.append((across <= half) & (along + across <= length - ONE // 2))
    return np.stack(bars, axis=1).astype(np.int64) * 255


def _panel(name: str, n: int) -> tuple[Ints, Ints, Ints]:
    """Colours [n, 3] of the panel, of segments that are on and off: dark on a light liquid crystal."""
    back = integers(f"{name}/back", 120, 170, n)[:, None] + integers(f"{name}/back-tint", -12, 12, n, 3)
    on = back - integers(f"{name}/contrast", 80, 110, n)[:, None]
    off = back - integers(f"{name}/ghost", 25, 45, n)[:, None]
    return back, on, off


def _glare(images: Ints, name: str) -> Ints:
    """A soft bright streak across the glass."""
    n = len(images)
    x, y = centred_grid(SIZE)
    lean = per_image(integers(f"{name}/glare-lean", -200, 200, n))
    place = per_image(integers(f"{name}/glare-place", -16 * ONE, 16 * ONE, n))
    distance = np.abs(x + lean * y // ONE - place) // ONE
    streak: Ints = np.maximum(0, 40 - 6 * distance)
    return images + streak[:, None]
