"""A hook of the site's generator: formulas between dollar signs become pictures that need no script and no network.

They are set by matplotlib's own mathematics, whose dialect of LaTeX they must keep to; a formula it cannot set fails the build.
"""

from __future__ import annotations

import html
import io
import re
import zlib
from functools import cache
from typing import Any

from matplotlib import mathtext
from matplotlib.font_manager import FontProperties

BIGGER = 1.12  # than the text around it, whose letters are larger than these for the same size
SIZE = 60  # of the type; large, since matplotlib rounds a formula's size to whole points
CODE = re.compile(r"(```.*?```|~~~.*?~~~|`[^`\n]+`)", re.S)
BLOCK = re.compile(r"^\$\$(.+?)\$\$\s*$", re.S | re.M)
INLINE = re.compile(r"(?<![\\$\w])\$([^$\n]+?)\$(?![\w$])")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn formulas outside code into SVG."""
    parts = CODE.split(markdown)
    parts[::2] = [
        INLINE.sub(lambda match: draw_formula(match[1].strip()), BLOCK.sub(_draw_block, part)) for part in parts[::2]
    ]
    return "".join(parts)


def _draw_block(match: re.Match[str]) -> str:
    lines = [line for line in match[1].strip().splitlines() if line.strip()]
    drawn = "<br>".join(draw_formula(" ".join(line.strip().rstrip("\\").split())) for line in lines)
    return f'<p style="text-align:center;line-height:2.4">{drawn}</p>\n'


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
