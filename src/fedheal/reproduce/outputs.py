"""From finished runs to what a recipe leaves behind: texts, files and sections of the page."""

import json
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedheal.report.figures import save_figure
from fedheal.report.html_page import Section
from fedheal.report.rows import Row
from fedheal.report.tables import align_columns
from fedheal.reproduce.figures import draw_convergence, draw_sweep
from fedheal.reproduce.paper_comparison import compare_with_paper, count_claims, load_rows
from fedheal.reproduce.plans import Recipe, RecipePlan
from fedheal.reproduce.sign_consistency import draw_windows, read_windows, tabulate_windows
from fedheal.runs.folder import write_text


@dataclass(frozen=True)
class RecipeOutputs:
    """What there is to show, and the files that were written."""

    texts: list[str] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)


def write_outputs(name: str, recipe: Recipe, plans: list[RecipePlan], stem: Path) -> RecipeOutputs:
    """Write tables, figures and notes of a recipe whose runs are finished; the files' names begin with `stem`."""
    outputs, markdown = RecipeOutputs(), []
    for plan in plans:
        comparison = compare_with_paper(recipe, plan)
        claims = [] if plan.smoke else count_claims(recipe, comparison)
        path = stem.with_name(f"{stem.name}-{_make_slug(plan.data)}")
        outputs.rows.extend(load_rows(plan))
        outputs.texts.append("\n".join([comparison.to_text(), *claims]))
        outputs.records.append(comparison.to_json() | {"result": name, "claims": claims})
        title = f"{plan.data} compared with the paper"
        outputs.sections.append(Section(title, [*claims, *comparison.notes], comparison.to_lines()))
        markdown.append("\n".join([comparison.to_markdown(), *(f"- {sentence}" for sentence in claims)]))
        draw = {"sweep": partial(draw_sweep, comparison), "curves": partial(draw_convergence, plan)}.get(recipe.figure)
        if draw:
            outputs.files.extend(save_figure(path, draw)[-1:])
        elif recipe.figure == "consistency":
            markdown += _write_consistency(recipe, plan, path, outputs)
    stem.parent.mkdir(parents=True, exist_ok=True)
    for ending, text in ((".md", "\n\n".join(markdown)), (".json", json.dumps(outputs.records, indent=2))):
        outputs.files.append(stem.with_name(stem.name + ending))
        write_text(outputs.files[-1], text + "\n")
    return outputs


def _write_consistency(recipe: Recipe, plan: RecipePlan, path: Path, outputs: RecipeOutputs) -> list[str]:
    """Write a figure per row, add its table to the outputs, and return the tables for Markdown."""
    about = "Share of parameters whose updates pointed the same way in more than 90 % of the rounds."
    markdown = []
    for row, jobs in plan.rows:
        windows = read_windows(jobs[0].folder)
        lines = tabulate_windows(windows)
        file = path.with_name(f"{path.name}-{_make_slug(row.label)}")
        outputs.files.extend(save_figure(file, partial(draw_windows, windows))[-1:])
        outputs.sections.append(Section(f"Directions, {plan.data}, {row.label}", [about, *recipe.notes], lines))
        title = f"{row.label}, seed {jobs[0].experiment.seed}"
        outputs.texts.append("\n".join([title, *(line.rstrip() for line in align_columns(lines, left=2))]))
        outputs.records[-1].setdefault("directions", {})[row.method] = lines
        markdown.append(f"```\n{outputs.texts[-1]}\n```")
    return markdown


def _make_slug(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
