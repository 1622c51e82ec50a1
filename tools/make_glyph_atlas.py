"""Render the digits of free fonts into the atlas from which the embedded domains are drawn.

The bytes of `fedheal.data.embedded` must not depend on the version of a font renderer. So the glyphs are rendered
once and shipped as grey bitmaps. The fonts come from Debian packages. All their licences allow the redistribution of
rendered shapes (SIL OFL 1.1, Apache 2.0, Bitstream Vera, BSD). The list below has the licence of every family, and the
file next to the atlas repeats it. No family serves for both training and testing.

    apt-get download fonts-lato fonts-open-sans ...        # see --packages for the list
    for deb in *.deb; do dpkg -x "$deb" fonts/; done
    python tools/make_glyph_atlas.py fonts src/fedheal/data/embedded

Each digit is `GLYPH_HEIGHT` pixels high, at most `MAX_WIDTH` pixels wide, and centred in a `CELL` x `CELL` square.
0 is background, 255 is ink.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL = 40
GLYPH_HEIGHT = 32
MAX_WIDTH = 34
RENDER_SIZE = 320  # large, and then reduced by area averaging, so that hinting does not matter

OFL = "SIL Open Font License 1.1"
APACHE = "Apache License 2.0"
BITSTREAM = "Bitstream Vera / Arev licence"
BSD = "BSD 3-clause"


@dataclass(frozen=True)
class Font:
    family: str
    package: str
    file: str
    licence: str
    style: str


TRAIN = (
    Font("Lato", "fonts-lato", "Lato-Regular.ttf", OFL, "sans"),
    Font("Open Sans", "fonts-open-sans", "OpenSans-Bold.ttf", APACHE, "sans bold"),
    Font("Roboto Slab", "fonts-roboto-slab", "RobotoSlab-Regular.otf", APACHE, "slab"),
    Font("DejaVu Sans", "fonts-dejavu-core", "DejaVuSans.ttf", BITSTREAM, "sans"),
    Font("Comfortaa", "fonts-comfortaa", "Comfortaa-Bold.ttf", OFL, "rounded"),
    Font("Comic Neue", "fonts-comic-neue", "ComicNeue-Bold.otf", OFL, "hand-written"),
    Font("Dosis", "fonts-dosis", "Dosis-Medium.otf", OFL, "sans narrow"),
    Font("Cabin", "fonts-cabin", "Cabin-Bold.otf", OFL, "sans bold"),
    Font("Courier Prime", "fonts-courier-prime", "Courier Prime Bold.otf", OFL, "mono slab"),
    Font("Tinos", "fonts-croscore", "Tinos-Regular.ttf", OFL, "serif"),
    Font("Bebas Neue", "fonts-bebas-neue", "BebasNeue-Regular.otf", OFL, "condensed"),
    Font("Anonymous Pro", "fonts-anonymous-pro", "Anonymous Pro.ttf", OFL, "mono"),
    Font("Averia Serif", "fonts-averia-serif-gwf", "AveriaSerifGWF-Regular.ttf", OFL, "serif soft"),
    Font("Fantasque Sans Mono", "fonts-fantasque-sans", "FantasqueSansMono-Bold.ttf", OFL, "mono"),
    Font("Play", "fonts-play", "Play-Regular.ttf", OFL, "sans square"),
    Font("Kaushan Script", "fonts-kaushanscript", "KaushanScript-Regular.otf", OFL, "script"),
    Font("League Spartan", "fonts-league-spartan", "LeagueSpartan-ExtraBold.otf", OFL, "geometric bold"),
    Font("Lobster Two", "fonts-lobstertwo", "LobsterTwo-Regular.otf", OFL, "script"),
    Font("Manrope", "fonts-manrope", "Manrope-Regular.ttf", OFL, "geometric"),
    Font("National Park", "fonts-national-park", "NationalPark-Regular.otf", OFL, "sans sign"),
    Font("Quattrocento", "fonts-quattrocento", "Quattrocento-Regular.otf", OFL, "serif"),
    Font("Clear Sans", "fonts-clear-sans", "ClearSans-Regular.ttf", APACHE, "sans"),
    Font("Gentium", "fonts-sil-gentium", "Gentium-R.ttf", OFL, "serif"),
    Font("Yanone Kaffeesatz", "fonts-yanone-kaffeesatz", "YanoneKaffeesatz-Regular.otf", OFL, "condensed"),
    Font("Yrsa", "fonts-yrsa-rasa", "Yrsa-Bold.ttf", OFL, "serif bold"),
    Font("Yusei Magic", "fonts-yusei-magic", "YuseiMagic-Regular.ttf", OFL, "hand-written"),
    Font("Klee One", "fonts-klee", "KleeOne-Regular.ttf", OFL, "hand-written"),
    Font("JetBrains Mono", "fonts-jetbrains-mono", "JetBrainsMono-Bold.ttf", APACHE, "mono bold"),
    Font("Dancing Script", "fonts-dancingscript", "DancingScript-Regular.otf", OFL, "script"),
)

TEST = (
    Font("Arimo", "fonts-croscore", "Arimo-Regular.ttf", OFL, "sans"),
    Font("Caladea", "fonts-crosextra-caladea", "Caladea-Regular.ttf", OFL, "serif"),
    Font("Charis SIL", "fonts-sil-charis", "CharisSIL-Bold.ttf", OFL, "serif bold"),
    Font("Fira Code", "fonts-firacode", "FiraCode-Medium.ttf", OFL, "mono"),
    Font("Quicksand", "fonts-quicksand", "Quicksand-Medium.ttf", OFL, "rounded"),
    Font("Roboto Condensed", "fonts-roboto-unhinted", "RobotoCondensed-Bold.ttf", APACHE, "condensed bold"),
    Font("RocknRoll One", "fonts-rocknroll", "RocknRollOne-Regular.ttf", OFL, "display"),
    Font("Chilanka", "fonts-smc-chilanka", "Chilanka-Regular.otf", OFL, "hand-written"),
    Font("Go Mono", "fonts-go", "Go-Mono.ttf", BSD, "mono slab"),
    Font("Andika", "fonts-sil-andika", "Andika-Bold.ttf", OFL, "sans literacy"),
    Font("Sora", "fonts-sora", "Sora-Regular.otf", OFL, "geometric wide"),
    Font("Allerta", "fonts-allerta", "allerta_medium.otf", OFL, "sans"),
)


def find_font_file(folder: Path, font: Font) -> Path:
    paths = sorted(folder.rglob(font.file))
    if not paths:
        raise FileNotFoundError(f"{font.file} (package {font.package}) is not below {folder}")
    return paths[0]


def render_glyph(face: ImageFont.FreeTypeFont, digit: int) -> np.ndarray:
    """Render one digit as a `CELL` x `CELL` grey image, ink 255."""
    canvas = Image.new("L", (3 * RENDER_SIZE, 3 * RENDER_SIZE), 0)
    ImageDraw.Draw(canvas).text((RENDER_SIZE, RENDER_SIZE // 2), str(digit), fill=255, font=face)
    box = canvas.getbbox()
    if box is None:
        raise ValueError(f"The font {face.getname()} draws nothing for the digit {digit}.")
    ink = canvas.crop(box)
    scale = min(GLYPH_HEIGHT / ink.height, MAX_WIDTH / ink.width)
    size = (max(1, round(ink.width * scale)), max(1, round(ink.height * scale)))
    cell = Image.new("L", (CELL, CELL), 0)
    cell.paste(ink.resize(size, Image.Resampling.BOX), ((CELL - size[0]) // 2, (CELL - size[1]) // 2))
    return np.asarray(cell)


def render_fonts(folder: Path, fonts: tuple[Font, ...]) -> np.ndarray:
    """Render all digits of all fonts as uint8 [fonts, 10, CELL, CELL]."""
    faces = [ImageFont.truetype(str(find_font_file(folder, font)), RENDER_SIZE) for font in fonts]
    return np.stack([np.stack([render_glyph(face, digit) for digit in range(10)]) for face in faces])


def make_credit(font: Font) -> dict[str, str]:
    credit = {"family": font.family, "style": font.style, "file": font.file}
    return credit | {"debian_package": font.package, "licence": font.licence}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("fonts", type=Path, nargs="?", help="folder with the unpacked font packages")
    parser.add_argument("out", type=Path, nargs="?", help="folder for glyphs.npz and glyphs.json")
    parser.add_argument("--packages", action="store_true", help="list the Debian packages and stop")
    options = parser.parse_args()
    if options.packages:
        sys.stdout.write("\n".join(sorted({font.package for font in TRAIN + TEST})) + "\n")
        return
    if options.fonts is None or options.out is None:
        parser.error("pass the folder of fonts and the output folder")
    train, test = render_fonts(options.fonts, TRAIN), render_fonts(options.fonts, TEST)
    np.savez_compressed(options.out / "glyphs.npz", train=train, test=test)
    credits = {"train": [make_credit(font) for font in TRAIN], "test": [make_credit(font) for font in TEST]}
    (options.out / "glyphs.json").write_text(json.dumps(credits, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
