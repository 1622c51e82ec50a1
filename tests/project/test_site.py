"""The site: it builds without a warning, has every public name, needs no network, and a browser shows it without a flaw."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from needs import needs
from project.test_reference import PUBLIC_MODULES, list_public

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
OPTIONS = ("--conf-dir", "docs", "--fail-on-warning", "--keep-going", "--quiet")
SHOWN = ("docs/index", "docs/methods", "docs/findings", "docs/concepts", "docs/api/aggregate", "examples/quickstart")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as `make docs` builds it, once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (
        (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site" / "html"
    )  # notebooks leave files beside it
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "objects.inv").exists():
            command = [sys.executable, "-m", "sphinx", *OPTIONS, ".", str(folder)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
    return folder


def test_make_docs_builds_the_same_way() -> None:
    assert f"-m sphinx {' '.join(OPTIONS)} . site/html\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_nothing_on_the_site_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r'(?:src|<link[^>]* href)="(?:https?:)?//[^"]*"', text) == [], page


def test_formulas_are_pictures(site: Path) -> None:
    concepts = (site / "docs" / "concepts.html").read_text(encoding="utf-8")
    article = concepts.partition("<article")[2].partition("</article")[0]
    assert article.count('<svg role="img"') > 20
    assert "$" not in re.sub(r"<[^>]*>", "", article)


def test_every_public_name_has_its_docstring_on_the_site(site: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    documented = {
        name.rpartition(".")[2] for kind, names in inventory.data.items() if kind.startswith("py:") for name in names
    }
    for module_name in PUBLIC_MODULES:
        assert {*list_public(module_name)} <= documented


def test_code_in_docstrings_is_shown_as_code(site: Path) -> None:
    for page in (site / "docs" / "api").glob("*.html"):
        quotes = re.findall(r"<blockquote>.*?</blockquote>", page.read_text(encoding="utf-8"), re.S)
        assert quotes == [], f"{page.name}: indented text needs '::' before it"


def test_notebooks_are_shown_with_their_outputs(site: Path) -> None:
    quickstart = (site / "examples" / "quickstart.html").read_text(encoding="utf-8")
    assert "accuracy in percent" in quickstart
    assert re.search(r'<img[^>]*src="../_images/', quickstart)


def test_a_browser_shows_every_page_without_overflow_or_error(site: Path) -> None:
    needs("browser")
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for width, theme in ((1280, "light"), (390, "dark")):
            tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
            tab.on(
                "console",
                lambda message: problems.append(message.text) if message.type in ("error", "warning") else None,
            )
            tab.on("pageerror", lambda error: problems.append(str(error)))
            tab.on(
                "request", lambda request: problems.append(request.url) if not request.url.startswith("file:") else None
            )
            for page in SHOWN:
                tab.goto((site / f"{page}.html").as_uri())
                assert tab.evaluate("document.documentElement.dataset.theme") == theme
                assert tab.evaluate("document.documentElement.scrollWidth") == width, page
                assert tab.evaluate(FIND_WIDE) == [], (page, width)
        browser.close()
    assert problems == []


# Elements of the text that reach beyond the window or their own box, unless they or something around them scrolls.
FIND_WIDE = """[...document.querySelectorAll("article *")].filter(element => {
  const box = element.getBoundingClientRect();
  const spills = element.clientWidth && element.scrollWidth > element.clientWidth + 1;
  if (!(element instanceof HTMLElement) || !box.width || !(spills || box.right > innerWidth + 1)) return false;
  for (let around = element; around.tagName !== "ARTICLE"; around = around.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(around).overflowX)) return false;
  return true;
}).map(element => element.outerHTML.slice(0, 80))"""
