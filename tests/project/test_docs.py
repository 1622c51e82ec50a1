"""What the documentation says can be done: its commands parse, its links lead somewhere, its site builds and needs no network.

Its Python code runs as doctests.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import typer

with warnings.catch_warnings():  # typer still imports names that click has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from fedheal import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(?:bash|sh|console)?\n(.*?)^```", re.S | re.M)
COMMANDS = [
    (page.name, line.partition("#")[0].strip())
    for page in PAGES
    for block in BLOCK.findall(page.read_text(encoding="utf-8"))
    for line in block.splitlines()
    if line.startswith("fedheal ")
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_of_the_documentation_are_there(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http", "#", "mailto:")):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f" {page.name}\n" in navigation, page.name


def test_pictures_are_small_and_shown():
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    pictures = [path for path in (ROOT / "docs" / "pictures").iterdir() if path.is_file()]
    assert pictures
    for path in pictures:
        assert path.stat().st_size < 200_000, path
        assert path.name in texts, f"{path.name} is shown nowhere"


@pytest.mark.slow
def test_the_site_builds_and_fetches_nothing(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(PAGES)  # a page for each but the README, and one for what is not found
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert re.findall(r'(?:src|<link[^>]* href)="(?:https?:)?//[^"]*"', text) == [], page
    concepts = (tmp_path / "site" / "concepts" / "index.html").read_text(encoding="utf-8")
    assert concepts.count('<svg role="img"') > 20
    assert "$" not in re.sub(
        r"<[^>]*>|<script.*?</script>", "", concepts.partition("<article")[2].partition("</article")[0]
    )
