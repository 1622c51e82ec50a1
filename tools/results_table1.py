"""The paper's first table on Digits with one seed: the rows that were run, beside the paper's, and those that are open."""

from __future__ import annotations

from pathlib import Path

from fedheal.campaign.jobs import Job
from fedheal.reproduce import RECIPES
from fedheal.reproduce.paper_comparison import compare_with_paper
from fedheal.reproduce.plans import RecipePlan
from fedheal.simulate.experiment import Experiment
from results_data import read_runs
from results_page import format_list, format_table, name_columns

RECIPE = RECIPES["table1"]
DATA, SEED, ROUNDS = "digits", 0, 200
FOLDER = "table1"


def write_table1(results: Path) -> list[str]:
    """Return the parts of the page, or nothing without runs. Runs of the headline are rows of this table, too."""
    entries = RECIPE.list_rows(DATA)
    folders = (results / DATA, results / FOLDER / DATA)
    runs = [run for folder in folders for run in read_runs(entries, DATA, folder, ROUNDS, skips_others=True)]
    jobs = {
        run.summary["method"]: Job(run.experiment, run.folder)
        for run in runs
        if run.is_full and run.experiment.seed == SEED
    }
    if not jobs:
        return []
    names = {entry.label: Experiment.of({"method": entry.method, "data": DATA}).method_name for entry in entries}
    rows = [(entry, [jobs[names[entry.label]]]) for entry in entries if names[entry.label] in jobs]
    table = compare_with_paper(RECIPE, RecipePlan(DATA, rows))
    head, *lines = table.to_lines()
    missing = [label for label, name in names.items() if name not in jobs]
    parts = [
        f"## Table 1 on {DATA}",
        f"The paper's first table with uniform weights added, seed {SEED}: {len(rows)} of {len(entries)} rows.",
        format_table([*head[:2], *name_columns(head[2:], DATA)], lines),
        format_list(table.notes),
    ]
    if missing:
        command = f"python tools/results.py run --recipe table1 --data {DATA} --seeds {SEED}-{SEED}"
        parts.append(f"Open (`{command}`, then `collect`): {', '.join(missing)}.")
    return parts
