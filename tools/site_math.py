"""Sphinx extension that turns formulas into pictures, which need no script and no network.

matplotlib draws the formulas, so they must keep to its dialect of LaTeX. A formula that it cannot draw fails the build.
"""

from __future__ import annotations

import html
import io
import re
import zlib
from functools import cache
from typing import Any

from docutils import nodes
from matplotlib import mathtext
from matplotlib.font_manager import FontProperties

SCALE = 1.12  # of a formula: for the same font size its letters are smaller than those of the text
SIZE = 60  # of the font; large, because matplotlib rounds the size of a formula to whole points


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer, which `html_math_renderer` names."""
    app.add_html_math_renderer("picture", (write_inline, None), (write_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_inline(writer: Any, node: nodes.Element) -> None:
    writer.body.append(draw_formula(node.astext().strip()))
    raise nodes.SkipNode


def write_block(writer: Any, node: nodes.Element) -> None:
    """Write a displayed formula line by line."""
    lines = [" ".join(line.rstrip("\\ ").split()) for line in node.astext().splitlines() if line.strip()]
    pictures = "<br>".join(map(draw_formula, lines))
    writer.body.append(f'<p style="text-align:center;line-height:2.4;overflow-x:auto">{pictures}</p>\n')
    raise nodes.SkipNode


@cache
def draw_formula(formula: str) -> str:
    """Return one formula as an SVG element with the colour, size and base line of the text around it."""
    out = io.BytesIO()
    depth = mathtext.math_to_image(f"${formula}$", out, FontProperties(size=SIZE, math_fontfamily="stix"), 72, "svg")
    svg = out.getvalue().decode()
    width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    glyphs = svg[svg.index('<g id="text_1">') : svg.rindex("</svg>")].removesuffix("</g>\n")
    glyphs = re.sub(r"<!--.*?-->", "", glyphs, flags=re.S)
    # Each formula gets its own names of glyphs, because all pictures of a page share one space of names.
    glyphs = re.sub(r'(id="|href="#)', rf"\g<1>m{zlib.crc32(formula.encode())}-", glyphs).replace("xlink:href", "href")
    glyphs = re.sub(r"\s+", " ", glyphs)
    size = SIZE / SCALE
    style = f"height:{height / size:.3f}em;width:{width / size:.3f}em;vertical-align:{-depth / size:.3f}em"
    label = html.escape(formula).replace("_", "&#95;").replace("*", "&#42;")
    return (
        f'<svg role="img" aria-label="{label}" style="{style}" viewBox="0 0 {width:g} {height:g}" fill="currentColor" '
        f'xmlns="http://www.w3.org/2000/svg">{glyphs}</svg>'
    )
