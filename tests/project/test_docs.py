"""What the documentation says can be done: its commands parse, and its links lead somewhere. `test_site.py` builds the site.

Its Python code runs as doctests.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
import warnings
from pathlib import Path

import pytest
import typer

with warnings.catch_warnings():  # typer still imports names that click has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from fedheal import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LINKED = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for folder in ("docs", "examples", "results") for page in (ROOT / folder).rglob("*.md")),
        *(ROOT / "examples").glob("*.ipynb"),
    ]
)
HINTED = {".py", ".md", ".toml", ".yaml", ".ipynb"}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
COMMANDS = [
    (page.name, line.partition("#")[0].strip())
    for page in PAGES
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8"))
    for line in block.replace("\\\n", " ").splitlines()
    if language in ("", "bash", "sh", "console") and line.startswith("fedheal ")
]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_commands_of_the_documentation_parse(page, line):
    words = shlex.split(line)[1:]
    command, context = typer.main.get_command(cli.app), None
    while hasattr(command, "commands"):
        assert words, line
        assert words[0] in command.commands, f"{page}: there is no command '{words[0]}'"
        command, words = command.commands[words[0]], words[1:]
    context = command.make_context(command.name, list(words), resilient_parsing=False)
    assert context.params is not None


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_pictures_and_anchors_of_the_documentation_are_there(page):
    assert find_broken_links(page) == []


def test_broken_links_and_anchors_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# One `word` (and more)\n## Twice\n## Twice\n```\n# no heading\n```\n")
    good = "[a](other.md#one-word-and-more) [b](other.md#twice-1) [c](#here) [d](https://x.org) `[e](no)`\n# Here\n"
    bad = "[f](none.md) [g](other.md#no-heading) ![h](none.png) [i](#there)\n"
    (tmp_path / "page.md").write_text(good + bad)
    assert find_broken_links(tmp_path / "page.md") == ["none.md", "other.md#no-heading", "none.png", "#there"]


def read_markdown(page):
    """Return the Markdown of a page or of a notebook, without code."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def list_anchors(page):
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    anchors = []
    for heading in re.findall(r"^#+ (.+)$", read_markdown(page), flags=re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        anchors.append(f"{anchor}-{anchors.count(anchor)}" if anchor in anchors else anchor)
    return anchors


def find_broken_links(page):
    """Return the links of a page to files or headings that are not there."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`", "", read_markdown(page))):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in list_anchors(file)):
            broken.append(target)
    return broken


def test_pictures_are_small_and_shown():
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    pictures = [path for path in (ROOT / "docs" / "pictures").iterdir() if path.is_file()]
    assert pictures
    for path in pictures:
        assert path.stat().st_size < 200_000, path
        assert path.name in texts, f"{path.name} is shown nowhere"


def test_install_hints_name_extras_of_a_checkout():
    """fedheal is not on PyPI, so `fedheal[extra]` cannot be installed."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    code = [path for folder in ("src", "examples") for path in (ROOT / folder).rglob("*.*") if path.suffix in HINTED]
    texts = {path: path.read_text() for path in [*PAGES, *code]}
    assert [path for path, text in texts.items() if re.search(r"\bfedheal\[[a-z]", text)] == []
    named = {
        extra
        for text in texts.values()
        for extra in re.findall(r"(?:\.\[|explain_install\(['\"])([a-z]+)['\"\]]", text)
    }
    assert named >= {"flower", "hub", "nvflare", "parquet", "ray", "sweep", "track"}
    assert named <= extras.keys()
