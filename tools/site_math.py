"""A Sphinx extension: formulas become pictures that need no script and no network.

They are set by matplotlib's own mathematics, whose dialect of LaTeX they must keep to; a formula it cannot set fails the build.
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

BIGGER = 1.12  # than the text around it, whose letters are larger than these for the same size
SIZE = 60  # of the type; large, since matplotlib rounds a formula's size to whole points


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer, which `html_math_renderer` names."""
    app.add_html_math_renderer("picture", (write_inline, None), (write_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_inline(writer: Any, node: nodes.Element) -> None:
    writer.body.append(draw_formula(node.astext().strip()))
    raise nodes.SkipNode


def write_block(writer: Any, node: nodes.Element) -> None:
    """Write a displayed formula, each of its lines on a line of its own."""
    lines = [" ".join(line.rstrip("\\ ").split()) for line in node.astext().splitlines() if line.strip()]
    drawn = "<br>".join(map(draw_formula, lines))
    writer.body.append(f'<p style="text-align:center;line-height:2.4;overflow-x:auto">{drawn}</p>\n')
    raise nodes.SkipNode


@cache
def draw_formula(formula: str) -> str:
    """Return one formula as an SVG element in the colour and size of the text around it, standing on its base line."""
    out = io.BytesIO()
    depth = mathtext.math_to_image(f"${formula}$", out, FontProperties(size=SIZE, math_fontfamily="stix"), 72, "svg")
    svg = out.getvalue().decode()
    width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    drawn = svg[svg.index('<g id="text_1">') : svg.rindex("</svg>")].removesuffix("</g>\n")
    drawn = re.sub(r"<!--.*?-->", "", drawn, flags=re.S)
    # Pictures of one page would share names of glyphs: each formula gets its own.
    drawn = re.sub(r'(id="|href="#)', rf"\g<1>m{zlib.crc32(formula.encode())}-", drawn).replace("xlink:href", "href")
    drawn = re.sub(r"\s+", " ", drawn)
    size = SIZE / BIGGER
    style = f"height:{height / size:.3f}em;width:{width / size:.3f}em;vertical-align:{-depth / size:.3f}em"
    label = html.escape(formula).replace("_", "&#95;").replace("*", "&#42;")
    return (
        f'<svg role="img" aria-label="{label}" style="{style}" viewBox="0 0 {width:g} {height:g}" fill="currentColor" '
        f'xmlns="http://www.w3.org/2000/svg">{drawn}</svg>'
    )
