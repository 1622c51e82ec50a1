"""Make the pictures of the documentation from the runs in results/: python tools/pictures.py  (make pictures)

Most pictures show four methods on the embedded digits, and one shows Digits. The pictures of the HTML page need Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from fedheal.report.diagnose import diagnose_run, draw_diagnosis
from fedheal.report.figures import save_figure, write_figures
from fedheal.report.html_page import render_page
from fedheal.report.rows import Row, build_rows, find_results
from fedheal.runs.folder import write_text

RESULTS = Path("results")
EMBEDDED = (RESULTS / "embedded", RESULTS / "confirmation" / "embedded")
EMBEDDED_METHODS = ("fedavg", "fedavg+uniform", "fedavg+afl", "fedavg+fedheal")
DIGITS_METHODS = ("fedavg", "fedavg+uniform", "fedavg+fedheal", "fedavg+fedheal:variant=released")
DIAGNOSED = EMBEDDED[0] / "fedavg-embedded-seed8"
FIGURES = ("domains", "rounds", "weights")
WIDTH, HEIGHT = 1280, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    options = parser.parse_args()
    rows = read_rows(EMBEDDED, EMBEDDED_METHODS)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        write_figures(rows, Path(scratch))
        save_figure(Path(scratch) / "diagnosis", partial(draw_diagnosis, diagnose_run(DIAGNOSED)))
        for name in (*FIGURES, "diagnosis"):
            shrink_picture(Path(scratch) / f"{name}.png", options.out / f"{name}.png", width=1400)
        draw_differences(Path(scratch), options.out)
        capture_page(rows, Path(scratch), options.out)
    for path in sorted(options.out.glob("*.png")):
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def read_rows(folders: Sequence[Path], methods: Sequence[str]) -> list[Row]:
    """Return the runs of these methods, in this order."""
    rows = build_rows(summary for summary in find_results(folders) if summary["method"] in methods)
    return sorted(rows, key=lambda row: (methods.index(row.method), row.seeds))


def draw_differences(scratch: Path, out: Path) -> None:
    """Draw the differences to uniform weights on Digits, by seed."""
    write_figures(read_rows([RESULTS / "digits"], DIGITS_METHODS), scratch / "digits", reference="fedavg+uniform")
    shrink_picture(scratch / "digits" / "differences.png", out / "digits-differences.png", width=1400)


def capture_page(rows: list[Row], scratch: Path, out: Path) -> None:
    """Take a picture of the HTML page: its beginning in the light theme, and a figure in the dark theme."""
    file = scratch / "report.html"
    write_text(file, render_page(rows, "Four methods on the embedded digits"))
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for theme, first in (("light", "h1"), ("dark", "[data-plot=differences]")):
            tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=theme)
            tab.goto(file.resolve().as_uri())
            tab.wait_for_selector("html[data-ready]")
            for plot in tab.query_selector_all(".plot"):
                plot.scroll_into_view_if_needed()
                tab.wait_for_function("node => node.matches('.js-plotly-plot, .none')", arg=plot)
            tab.evaluate(f"scrollTo(0, document.querySelector('{first}').offsetTop - 80)")
            tab.wait_for_timeout(300)
            tab.screenshot(path=scratch / f"report-{theme}.png")
            shrink_picture(scratch / f"report-{theme}.png", out / f"report-{theme}.png", WIDTH)
        browser.close()


def shrink_picture(source: Path, target: Path, width: int) -> None:
    """Write a picture at most so wide, in 128 colours, which suffice for figures."""
    with Image.open(source) as image:
        picture = image.convert("RGB")
        if picture.width > width:
            picture = picture.resize((width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS)
        picture.quantize(128).save(target, optimize=True)


if __name__ == "__main__":
    main()
