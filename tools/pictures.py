"""Make the pictures of the documentation from runs of this version: python tools/pictures.py  (make pictures)

The runs are four methods with eight seeds on the embedded digits; finished runs are not run again. One picture shows the runs
in results/digits. The pictures of the HTML page need Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from functools import partial
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from fedheal.campaign.compare import plan
from fedheal.campaign.pool import run_all
from fedheal.report.diagnose import diagnose_run, draw_diagnosis
from fedheal.report.figures import save_figure, write_figures
from fedheal.report.html_page import render_page
from fedheal.report.rows import Row, build_rows, find_results
from fedheal.runs.folder import read_json, write_text

METHODS = ("fedavg", "fedavg+uniform", "fedavg+afl", "fedheal")
SEEDS = tuple(range(8))
FIGURES = ("domains", "rounds", "weights")
RESULTS = Path("results/digits")
RESULT_METHODS = ("fedavg", "fedavg+uniform", "fedavg+fedheal", "fedavg+fedheal:variant=released")
WIDTH, HEIGHT = 1280, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/pictures"))
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    jobs = plan(METHODS, SEEDS, {}, options.runs)
    for job in run_all(jobs, options.processes):
        print(job.folder.name)
    rows = build_rows(read_json(job.folder / "result.json") | {"folder": str(job.folder)} for job in jobs)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        write_figures(rows, Path(scratch))
        save_figure(Path(scratch) / "diagnosis", partial(draw_diagnosis, diagnose_run(jobs[0].folder)))
        for name in (*FIGURES, "diagnosis"):
            shrink_picture(Path(scratch) / f"{name}.png", options.out / f"{name}.png", width=1400)
        draw_results(Path(scratch), options.out)
        capture_page(rows, Path(scratch), options.out)
    for path in sorted(options.out.glob("*.png")):
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def draw_results(scratch: Path, out: Path) -> None:
    """Draw the differences to uniform weights on Digits, by seed."""
    rows = build_rows(summary for summary in find_results([RESULTS]) if summary["method"] in RESULT_METHODS)
    write_figures(rows, scratch / "digits", reference="fedavg+uniform")
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
