"""The notebooks run, and show what is committed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
NUMBER = re.compile(r"[-+]?\d+\.\d+\*?")


def run_notebook(name: str, folder: Path, replacements: Mapping[str, str] | None = None) -> tuple[list[str], list[str]]:
    """Run a notebook in a folder, with some of its code replaced; return the committed texts and those of this run."""
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    nbformat.validate(notebook)
    committed = list_texts(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for old, new in (replacements or {}).items():
        assert sum(old in cell.source for cell in code) == 1, old
        for cell in code:
            cell.source = cell.source.replace(old, new)
    for cell in code:
        cell.update(outputs=[], execution_count=None)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(
        notebook, timeout=300, coalesce_streams=True, resources=resources
    ).execute()  # an error in a cell raises
    assert [*folder.iterdir()] == []
    return committed, list_texts(notebook)


def list_texts(notebook: nbformat.NotebookNode) -> list[str]:
    """Return what the cells print, and the kinds of whatever else they show."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output["text"] if output.output_type == "stream" else str(sorted(output["data"])) for output in outputs]


def test_the_training_loop_prints_what_is_committed(tmp_path: Path) -> None:
    committed, texts = run_notebook("training_loop.ipynb", tmp_path)
    assert [NUMBER.sub("#", text) for text in texts] == [NUMBER.sub("#", text) for text in committed]
    for text, expected in zip(texts, committed, strict=True):
        numbers, expected_numbers = (list(map(float, NUMBER.findall(t))) for t in (text, expected))
        assert numbers == pytest.approx(expected_numbers, abs=2)  # processors round differently


def test_the_quickstart_prints_the_committed_table_with_other_numbers(tmp_path: Path) -> None:
    quick = {"ROUNDS, SEEDS = 6, 2": "ROUNDS, SEEDS = 1, 2", "clients_per_domain=1,": "clients_per_domain=1, steps=1,"}
    committed, texts = run_notebook("quickstart.ipynb", tmp_path, quick)
    assert list_rows(texts[0]) == list_rows(committed[0])
    assert len(list_rows(texts[0])) == 4
    assert texts[1:] == committed[1:]


def list_rows(text: str) -> list[list[str]]:
    """Return the words of the table's lines, without its numbers."""
    table = text.partition("\n\n")[2].partition("\n*")[0]
    return [NUMBER.sub("#", line).split() for line in table.splitlines() if not line.startswith("-")]
