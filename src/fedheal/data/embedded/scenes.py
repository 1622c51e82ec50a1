"""Draw the four domains of the embedded data set, each by a function from labels to images.

The name of the split alone selects the random numbers. Grey ink is drawn first, then colour and noise. All arithmetic is on
integers (see `raster`). Values drawn as [n, 1, 1] are one for each image.
"""

from __future__ import annotations

import numpy as np

from fedheal.core.arrays import Integers
from fedheal.data.embedded.raster import ONE, blend, blur, make_pixel_grid, rotate, sample_bilinear, shrink
from fedheal.data.embedded.stable_random import draw_integers

SIZE = 32
Range = tuple[int, int]  # to draw from for every image

# Segments lit by each digit, in the usual order a (top), b, c (right), d (bottom), e, f (left), g (middle).
_LIT = "1111110 0110000 1101101 1111001 0110011 1011011 1011111 1110000 1111111 1111011"
SEGMENTS = np.array([[int(lit) for lit in digit] for digit in _LIT.split()], dtype=np.int64)


def draw_handwritten(pixels: Integers) -> Integers:
    """Enlarge 8 x 8 pen images with values 0..16 to 32 x 32: light ink on black, grey as RGB."""
    x, y = make_pixel_grid(SIZE)
    return np.repeat(sample_bilinear(np.minimum(255, pixels * 16), x // 4, y // 4)[:, None], 3, axis=1)


def draw_print(labels: Integers, glyphs: Integers, name: str) -> Integers:
    """Draw dark ink on paper: one digit per image, slightly moved, scaled and of varying weight."""
    n = len(labels)
    font = draw_integers(f"{name}/font", 0, len(glyphs) - 1, n)
    x, y = _place_glyphs(name, n, zoom=(300, 420), slope=10)
    threshold = draw_integers(f"{name}/weight", 40, 110, n, 1, 1)
    ink = _set_stroke_weight(sample_bilinear(blur(glyphs)[font, labels], x, y), threshold)
    paper = draw_integers(f"{name}/paper", 225, 250, n, 1, 1)
    pen = draw_integers(f"{name}/pen", 5, 60, n, 1, 1)
    return blend(paper, pen, ink)[:, None] + _draw_noise(name, n, 6)


def draw_street(labels: Integers, glyphs: Integers, name: str) -> Integers:
    """Draw house numbers: two colours, neighbours cut off at the sides, perspective, clutter, blur and noise."""
    n = len(labels)
    font = draw_integers(f"{name}/font", 0, len(glyphs) - 1, n)
    x, y = _tilt(*_place_glyphs(name, n, zoom=(290, 440), slope=40), name)
    soft = blur(glyphs)
    ink = sample_bilinear(soft[font, labels], x, y)
    for side in (-1, 1):
        neighbour = draw_integers(f"{name}/neighbour{side}", 0, 9, n)
        gap = draw_integers(f"{name}/gap{side}", 26, 44, n, 1, 1) * ONE
        ink = np.maximum(ink, sample_bilinear(soft[font, neighbour], x - side * gap, y))
    ink = _set_stroke_weight(ink, draw_integers(f"{name}/weight", 40, 100, n, 1, 1))
    wall, paint = _draw_two_colours(name, n)
    image = blend(wall + _draw_clutter(name, n)[:, None], paint, ink[:, None])
    focus = draw_integers(f"{name}/focus", 0, 255, n, 1, 1, 1)
    return blend(image, blur(blur(image)), focus) + _draw_noise(name, n, 24)


def draw_display(labels: Integers, half_thickness: Range, slant: Range, name: str) -> Integers:
    """Draw seven-segment displays whose unlit segments show. Half thickness is in 1/512 pixel, slant a tangent in 1/256."""
    n = len(labels)
    x, y = rotate(*make_pixel_grid(2 * SIZE), draw_integers(f"{name}/slope", -8, 8, n, 1, 1))
    x = x + y * draw_integers(f"{name}/slant", *slant, n, 1, 1) // ONE
    x = x + draw_integers(f"{name}/x", -4, 4, n, 1, 1) * ONE
    y = y + draw_integers(f"{name}/y", -4, 4, n, 1, 1) * ONE
    segments = _draw_segments(x, y, half_thickness, name)
    lit = shrink((segments * SEGMENTS[labels][:, :, None, None]).max(axis=1), 2)
    ghost = shrink(segments.max(axis=1), 2)
    # Dark on a light liquid crystal.
    panel = draw_integers(f"{name}/back", 120, 170, n, 1, 1, 1) + draw_integers(
        f"{name}/back-tint", -12, 12, n, 3, 1, 1
    )
    on = panel - draw_integers(f"{name}/contrast", 80, 110, n, 1, 1, 1)
    off = panel - draw_integers(f"{name}/ghost", 25, 45, n, 1, 1, 1)
    image = blend(blend(panel, off, ghost[:, None]), on, lit[:, None])
    return blur(image) + _draw_glare(name, n)[:, None] + _draw_noise(name, n, 32)


def _draw_noise(name: str, n: int, amount: int) -> Integers:
    return draw_integers(f"{name}/grain", -amount, amount, n, 3, SIZE, SIZE)


def _place_glyphs(name: str, n: int, *, zoom: Range, slope: int) -> tuple[Integers, Integers]:
    """Return the glyph coordinates of each pixel: moved by up to 3 pixels, rotated, and scaled by ONE / zoom."""
    x, y = make_pixel_grid(SIZE)
    x = x + draw_integers(f"{name}/x", -3 * ONE, 3 * ONE, n, 1, 1)
    y = y + draw_integers(f"{name}/y", -3 * ONE, 3 * ONE, n, 1, 1)
    x, y = rotate(x, y, draw_integers(f"{name}/slope", -slope, slope, n, 1, 1))
    height = draw_integers(f"{name}/zoom", *zoom, n, 1, 1)
    width = height * draw_integers(f"{name}/aspect", 230, 290, n, 1, 1) // ONE
    return x * width // ONE, y * height // ONE


def _tilt(x: Integers, y: Integers, name: str) -> tuple[Integers, Integers]:
    """Divide by 1 + g x + h y with small g and h: one side of the sign is nearer than the other."""
    g, h = (draw_integers(f"{name}/tilt-{axis}", -3, 3, len(x), 1, 1) for axis in "xy")
    depth = np.maximum(256 * ONE + g * x + h * y, 64 * ONE)
    return x * 256 * ONE // depth, y * 256 * ONE // depth


def _set_stroke_weight(ink: Integers, threshold: Integers) -> Integers:
    """Steepen soft ink around a threshold: a low one gives a bold stroke, a high one a fine stroke."""
    steep: Integers = np.clip((ink - threshold) * 3, 0, 255)
    return steep


def _draw_two_colours(name: str, n: int) -> tuple[Integers, Integers]:
    """Return wall and paint [n, 3, 1, 1]; their brightness differs by at least 70 before tinting."""
    bright, dark = draw_integers(f"{name}/bright", 130, 220, n, 1), draw_integers(f"{name}/dark", 30, 60, n, 1)
    swap = draw_integers(f"{name}/swap", 0, 1, n, 1) == 1
    wall = np.where(swap, dark, bright) + draw_integers(f"{name}/tint-wall", -35, 35, n, 3)
    paint = np.where(swap, bright, dark) + draw_integers(f"{name}/tint-paint", -35, 35, n, 3)
    return np.clip(wall, 0, 255)[:, :, None, None], np.clip(paint, 0, 255)[:, :, None, None]


def _draw_clutter(name: str, n: int) -> Integers:
    """Return changes of the wall's brightness: darker to one side, and three bars (joints, frames, shadows)."""
    x, y = make_pixel_grid(SIZE)
    g, h = (draw_integers(f"{name}/fall-{axis}", -2, 2, n, 1, 1) for axis in "xy")
    clutter: Integers = (g * x + h * y) // (2 * ONE)
    for k in range(3):
        lean = draw_integers(f"{name}/bar{k}-lean", -60, 60, n, 1, 1)
        upright = draw_integers(f"{name}/bar{k}-upright", 0, 1, n, 1, 1)
        place = draw_integers(f"{name}/bar{k}-place", -16 * ONE, 16 * ONE, n, 1, 1)
        half = draw_integers(f"{name}/bar{k}-half", ONE // 2, 3 * ONE, n, 1, 1)
        across = np.where(upright == 1, x + lean * y // ONE, y + lean * x // ONE) - place
        change = draw_integers(f"{name}/bar{k}-change", -45, 45, n, 1, 1)
        clutter = clutter + np.where(np.abs(across) < half, change, 0)
    return clutter


def _draw_segments(x: Integers, y: Integers, half_thickness: Range, name: str) -> Integers:
    """Return the seven segments, 0 or 255, as [n, 7, H, W]: bars with pointed ends, in double resolution."""
    n = len(x)
    wide = draw_integers(f"{name}/wide", 9 * ONE, 13 * ONE, n, 1, 1)  # half the digit's width
    tall = draw_integers(f"{name}/tall", 10 * ONE, 12 * ONE, n, 1, 1)  # half of one of its two storeys
    half = draw_integers(f"{name}/thick", *half_thickness, n, 1, 1)
    bars = []
    for level, column in ((-2, 0), (-1, 1), (1, 1), (2, 0), (1, -1), (-1, -1), (0, 0)):
        u, v = np.abs(x - column * wide), np.abs(y - level * tall)
        along, across, length = (u, v, wide) if column == 0 else (v, u, tall)
        bars.append((across <= half) & (along + across <= length - ONE // 2))
    return np.stack(bars, axis=1).astype(np.int64) * 255


def _draw_glare(name: str, n: int) -> Integers:
    """Return a soft bright streak across the glass."""
    x, y = make_pixel_grid(SIZE)
    lean = draw_integers(f"{name}/glare-lean", -200, 200, n, 1, 1)
    place = draw_integers(f"{name}/glare-place", -16 * ONE, 16 * ONE, n, 1, 1)
    streak: Integers = np.maximum(0, 40 - 6 * (np.abs(x + lean * y // ONE - place) // ONE))
    return streak
