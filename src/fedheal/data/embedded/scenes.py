"""Draw the four domains of the embedded data set, each by a function from labels to images.

The name of the split alone selects the random numbers. Grey ink is drawn first, then colour and noise. All arithmetic is on
integers (see `raster`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedheal.data.embedded.raster import (
    ONE,
    blend,
    blur,
    broadcast_per_image,
    make_pixel_grid,
    rotate,
    sample_bilinear,
    shrink,
)
from fedheal.data.embedded.stable_random import Ints, draw_integers

SIZE = 32

# Segments lit by each digit, in the usual order a (top), b, c (right), d (bottom), e, f (left), g (middle).
_LIT = "1111110 0110000 1101101 1111001 0110011 1011011 1011111 1110000 1111111 1111011"
SEGMENTS = np.array([[int(lit) for lit in digit] for digit in _LIT.split()], dtype=np.int64)


@dataclass(frozen=True)
class SegmentStyle:
    """The look of the segments of a display; each field is a range to draw from for every image."""

    half_thickness: tuple[int, int]  # in 1/512 pixel
    slant: tuple[int, int]  # tangent, in 1/256


def draw_handwritten(pixels: Ints) -> Ints:
    """Enlarge 8 x 8 pen images with values 0..16 to 32 x 32: light ink on black, grey as RGB."""
    x, y = make_pixel_grid(SIZE)
    still = broadcast_per_image(np.zeros(len(pixels), dtype=np.int64))
    return _repeat_rgb(sample_bilinear(np.minimum(255, pixels * 16), x // 4 + still, y // 4 + still))


def draw_print(labels: Ints, glyphs: Ints, name: str) -> Ints:
    """Draw dark ink on paper: one digit per image, slightly moved, scaled and of varying weight."""
    n = len(labels)
    font = draw_integers(f"{name}/font", 0, len(glyphs) - 1, n)
    x, y = _place_glyphs(name, n, zoom=(300, 420), shift=3, slope=10)
    ink = _set_stroke_weight(
        sample_bilinear(blur(glyphs)[font, labels], x, y), draw_integers(f"{name}/weight", 40, 110, n)
    )
    paper = broadcast_per_image(draw_integers(f"{name}/paper", 225, 250, n))
    pen = broadcast_per_image(draw_integers(f"{name}/pen", 5, 60, n))
    return _repeat_rgb(blend(paper, pen, ink)) + _draw_noise(f"{name}/grain", n, 6)


def draw_street(labels: Ints, glyphs: Ints, name: str) -> Ints:
    """Draw house numbers: two colours, neighbours cut off at the sides, perspective, clutter, blur and noise."""
    n = len(labels)
    font = draw_integers(f"{name}/font", 0, len(glyphs) - 1, n)
    x, y = _place_glyphs(name, n, zoom=(290, 440), shift=3, slope=40)
    x, y = _tilt(x, y, name)
    soft = blur(glyphs)
    ink = sample_bilinear(soft[font, labels], x, y)
    for side in (-1, 1):
        neighbour = draw_integers(f"{name}/neighbour{side}", 0, 9, n)
        gap = broadcast_per_image(draw_integers(f"{name}/gap{side}", 26, 44, n)) * ONE
        ink = np.maximum(ink, sample_bilinear(soft[font, neighbour], x - side * gap, y))
    ink = _set_stroke_weight(ink, draw_integers(f"{name}/weight", 40, 100, n))
    wall, paint = _draw_two_colours(name, n)
    scene = _add_clutter(_shade(wall, name), name)
    image = blend(scene, paint[:, :, None, None], ink[:, None])
    return _defocus(image, draw_integers(f"{name}/focus", 0, 255, n)) + _draw_noise(f"{name}/grain", n, 24)


def draw_display(labels: Ints, style: SegmentStyle, name: str) -> Ints:
    """Draw seven-segment displays whose unlit segments show, so that only contrast tells the digit."""
    n = len(labels)
    x, y = make_pixel_grid(2 * SIZE)
    x, y = rotate(x, y, draw_integers(f"{name}/slope", -8, 8, n))
    x = x + y * broadcast_per_image(draw_integers(f"{name}/slant", *style.slant, n)) // ONE
    x = x + broadcast_per_image(draw_integers(f"{name}/x", -4, 4, n)) * ONE
    y = y + broadcast_per_image(draw_integers(f"{name}/y", -4, 4, n)) * ONE
    segments = _draw_segments(x, y, style, name)
    lit = shrink((segments * SEGMENTS[labels][:, :, None, None]).max(axis=1), 2)
    ghost = shrink(segments.max(axis=1), 2)
    panel, on, off = _draw_panel_colours(name, n)
    image = blend(panel[:, :, None, None], off[:, :, None, None], ghost[:, None])
    image = blend(image, on[:, :, None, None], lit[:, None])
    return _add_glare(blur(image), name) + _draw_noise(f"{name}/grain", n, 32)


def _repeat_rgb(grey: Ints) -> Ints:
    return np.repeat(grey[:, None], 3, axis=1)


def _draw_noise(name: str, n: int, amount: int) -> Ints:
    return draw_integers(name, -amount, amount, n, 3, SIZE, SIZE)


def _place_glyphs(name: str, n: int, *, zoom: tuple[int, int], shift: int, slope: int) -> tuple[Ints, Ints]:
    """Return the glyph coordinates of each pixel: moved, rotated, and scaled by ONE / zoom."""
    x, y = make_pixel_grid(SIZE)
    x = x + broadcast_per_image(draw_integers(f"{name}/x", -shift * ONE, shift * ONE, n))
    y = y + broadcast_per_image(draw_integers(f"{name}/y", -shift * ONE, shift * ONE, n))
    x, y = rotate(x, y, draw_integers(f"{name}/slope", -slope, slope, n))
    height = broadcast_per_image(draw_integers(f"{name}/zoom", *zoom, n))
    width = height * broadcast_per_image(draw_integers(f"{name}/aspect", 230, 290, n)) // ONE
    return x * width // ONE, y * height // ONE


def _tilt(x: Ints, y: Ints, name: str) -> tuple[Ints, Ints]:
    """Divide by 1 + g x + h y with small g and h: one side of the sign is nearer than the other."""
    n = len(x)
    g, h = (broadcast_per_image(draw_integers(f"{name}/tilt-{axis}", -3, 3, n)) for axis in "xy")
    depth = np.maximum(256 * ONE + g * x + h * y, 64 * ONE)
    return x * 256 * ONE // depth, y * 256 * ONE // depth


def _set_stroke_weight(ink: Ints, threshold: Ints) -> Ints:
    """Steepen soft ink around a threshold: a low one gives a bold stroke, a high one a fine stroke."""
    steep: Ints = np.clip((ink - broadcast_per_image(threshold)) * 3, 0, 255)
    return steep


def _draw_two_colours(name: str, n: int) -> tuple[Ints, Ints]:
    """Return wall and paint [n, 3]; their brightness differs by at least 70 before tinting."""
    bright, dark = draw_integers(f"{name}/bright", 130, 220, n), draw_integers(f"{name}/dark", 30, 60, n)
    swap = draw_integers(f"{name}/swap", 0, 1, n) == 1
    wall, paint = np.where(swap, dark, bright), np.where(swap, bright, dark)
    tint_wall = draw_integers(f"{name}/tint-wall", -35, 35, n, 3)
    tint_paint = draw_integers(f"{name}/tint-paint", -35, 35, n, 3)
    return np.clip(wall[:, None] + tint_wall, 0, 255), np.clip(paint[:, None] + tint_paint, 0, 255)


def _shade(colour: Ints, name: str) -> Ints:
    """Fill the image with a colour [n, 3] that gets darker to one side."""
    x, y = make_pixel_grid(SIZE)
    n = len(colour)
    g, h = (broadcast_per_image(draw_integers(f"{name}/fall-{axis}", -2, 2, n)) for axis in "xy")
    fall: Ints = (g * x + h * y) // (2 * ONE)
    return colour[:, :, None, None] + fall[:, None]


def _add_clutter(scene: Ints, name: str) -> Ints:
    """Add three bars of other brightness across the wall: joints, frames, shadows."""
    n = len(scene)
    x, y = make_pixel_grid(SIZE)
    for k in range(3):
        lean = broadcast_per_image(draw_integers(f"{name}/bar{k}-lean", -60, 60, n))
        upright = broadcast_per_image(draw_integers(f"{name}/bar{k}-upright", 0, 1, n))
        place = broadcast_per_image(draw_integers(f"{name}/bar{k}-place", -16 * ONE, 16 * ONE, n))
        half = broadcast_per_image(draw_integers(f"{name}/bar{k}-half", ONE // 2, 3 * ONE, n))
        across = np.where(upright == 1, x + lean * y // ONE, y + lean * x // ONE) - place
        change = broadcast_per_image(draw_integers(f"{name}/bar{k}-change", -45, 45, n))
        scene = scene + np.where(np.abs(across) < half, change, 0)[:, None]
    return scene


def _defocus(images: Ints, amount: Ints) -> Ints:
    return blend(images, blur(blur(images)), amount[:, None, None, None])


def _draw_segments(x: Ints, y: Ints, style: SegmentStyle, name: str) -> Ints:
    """Return the seven segments, 0 or 255, as [n, 7, H, W]: bars with pointed ends, in double resolution."""
    n = len(x)
    wide = broadcast_per_image(draw_integers(f"{name}/wide", 9 * ONE, 13 * ONE, n))  # half the digit's width
    tall = broadcast_per_image(draw_integers(f"{name}/tall", 10 * ONE, 12 * ONE, n))  # half of one of its two storeys
    half = broadcast_per_image(draw_integers(f"{name}/thick", *style.half_thickness, n))
    bars = []
    for level, column in ((-2, 0), (-1, 1), (1, 1), (2, 0), (1, -1), (-1, -1), (0, 0)):
        u, v = x - column * wide, y - level * tall
        along, across, length = (u, v, wide) if column == 0 else (v, u, tall)
        along, across = np.abs(along), np.abs(across)
        bars.append((across <= half) & (along + across <= length - ONE // 2))
    return np.stack(bars, axis=1).astype(np.int64) * 255


def _draw_panel_colours(name: str, n: int) -> tuple[Ints, Ints, Ints]:
    """Return the colours [n, 3] of the panel and of lit and unlit segments: dark on a light liquid crystal."""
    back = draw_integers(f"{name}/back", 120, 170, n)[:, None] + draw_integers(f"{name}/back-tint", -12, 12, n, 3)
    on = back - draw_integers(f"{name}/contrast", 80, 110, n)[:, None]
    off = back - draw_integers(f"{name}/ghost", 25, 45, n)[:, None]
    return back, on, off


def _add_glare(images: Ints, name: str) -> Ints:
    """Add a soft bright streak across the glass."""
    n = len(images)
    x, y = make_pixel_grid(SIZE)
    lean = broadcast_per_image(draw_integers(f"{name}/glare-lean", -200, 200, n))
    place = broadcast_per_image(draw_integers(f"{name}/glare-place", -16 * ONE, 16 * ONE, n))
    distance = np.abs(x + lean * y // ONE - place) // ONE
    streak: Ints = np.maximum(0, 40 - 6 * distance)
    return images + streak[:, None]
