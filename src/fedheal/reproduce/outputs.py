"""From finished runs to what a recipe leaves behind: texts, files and sections of the page."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedheal.report.figures import saved
from fedheal.report.html_page import Extra
from fedheal.report.rows import Row
from fedheal.reproduce import figures as pictures
from fedheal.reproduce import paper_comparison as beside
from fedheal.reproduce import sign_consistency as watched
from fedheal.reproduce.plans import Planned, Recipe
from fedheal.runs import folder as records


@dataclass(frozen=True)
class Reproduced:
    """What there is to show and where it was written."""

    texts: list[str]
    tidy: list[dict[str, Any]]
    rows: list[Row]
    extras: list[Extra]
    files: list[Path]


def reproduced(name: str, recipe: Recipe, parts: list[Planned], stem: Path) -> Reproduced:
    """Tables, figures and notes of a recipe whose runs are finished; files begin with `stem`."""
    texts, tidy, extras, files, marked = [], [], [], [], []
    for part in parts:
        table = beside.beside(recipe, part)
        said = beside.claims(recipe, table)
        where = stem.with_name(f"{stem.name}-{_slug(part.data)}")
        texts.append("\n".join([beside.text(table), *said]))
        marked.append("\n".join([beside.markdown(table), *(f"- {sentence}" for sentence in said)]))
        extras.append(beside.extra(table, said))
        tidy.append(beside.tidy(table) | {"result": name, "claims": said})
        if recipe.kind == "sweep":
            files += saved(where, partial(pictures.sweep, table))[-1:]
        elif recipe.kind == "curves":
            files += saved(where, partial(pictures.convergence, part))[-1:]
        elif recipe.kind == "consistency":
            for entry, jobs in part.rows:
                windows = watched.windows(jobs[0].folder)
                file = where.with_name(f"{where.name}-{_slug(entry.label)}")
                files += saved(file, partial(watched.picture, windows))[-1:]
                extras.append(watched.extra(f"{part.data}, {entry.label}", windows, recipe.notes))
                counted = _aligned(f"{entry.label}, seed {jobs[0].experiment.seed}", watched.cells(windows))
                texts.append(counted)
                marked.append(f"```\n{counted}\n```")
                tidy[-1].setdefault("directions", {})[entry.method] = watched.cells(windows)
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = {".md": "\n\n".join(marked) + "\n", ".json": json.dumps(tidy, indent=2) + "\n"}
    for ending, text in written.items():
        path = stem.with_name(stem.name + ending)
        records.write_text(path, text)
        files.append(path)
    return Reproduced(texts, tidy, [row for part in parts for row in beside.found(part)], extras, files)


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def _aligned(title: str, cells: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [
        "  ".join(
            word.ljust(w) if i < 2 else word.rjust(w) for i, (word, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return "\n".join([title, *(line.rstrip() for line in lines)])
