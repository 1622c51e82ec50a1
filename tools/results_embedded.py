"""Methods on the embedded digits with eight seeds. A CPU suffices: a run takes about half a minute on one core."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedheal.reproduce import RECIPES
from fedheal.reproduce.plans import Recipe, RecipeRow
from results_confirmation import CHOSEN, SEEDS, WITH_ADAM
from results_confirmation import FOLDER as CONFIRMATION
from results_data import read_runs
from results_page import (
    TEST_COLUMNS,
    format_list,
    format_table,
    group_by_label,
    list_machines,
    subtract_row,
    tabulate_means,
    tabulate_tests,
)

DATA, ROUNDS = "embedded", 20
CONTROL = "uniform weights"
# The README's picture shows these rows. They were fixed before the runs of FedAvg and AFL. Eight seeds can show a
# difference in a family of six comparisons, and not in a larger one.
TESTED = ("FedAvg", CONTROL, "FedHEAL (paper)", "AFL")
INTRODUCTION = (
    "The digits that come with the package, by the data set's own protocol: `small_cnn`, 20 rounds of two epochs. The paper "
    "has no such data. The seeds are those of the confirmation, which the search had not used; the last two rows are the "
    "confirmation's."
)


def list_rows(data: str) -> list[RecipeRow]:
    """Return the headline's rows without the paper's numbers, combinations of the package's parts, and the chosen method."""
    headline = [replace(row, published=(), misprint=((), "")) for row in RECIPES["headline"].list_rows(data)]
    combinations = [
        RecipeRow("FedHEAL per step", "fedavg+fedheal:per_step=true"),
        RecipeRow("FedPW", "fedpw"),
        RecipeRow("AFL + FPHL", "fedavg+afl+fphl"),
    ]
    return [*headline, *combinations, WITH_ADAM, CHOSEN]


RECIPE = Recipe("Methods on the embedded digits", (DATA,), list_rows)


def write_embedded(results: Path) -> list[str]:
    """Return the parts of the page, or nothing without runs."""
    entries = list_rows(DATA)
    folders = (results / DATA, results / CONFIRMATION / DATA)
    runs = [run for folder in folders for run in read_runs(entries, DATA, folder, ROUNDS, skips_others=True)]
    runs = sorted((run for run in runs if run.experiment.seed in SEEDS), key=lambda run: entries.index(run.entry))
    if not runs:
        return []
    groups = group_by_label(runs)
    difference, _ = subtract_row(runs, CONTROL, DATA)
    parts = [f"## {DATA}", INTRODUCTION, tabulate_means(runs), *([difference] if difference else [])]
    tested = {label: groups[label] for label in TESTED if label in groups}
    if CONTROL in tested and len(tested) > 1:
        tests, notes = tabulate_tests(tested, CONTROL)
        parts += [format_table([f"less {CONTROL}", *TEST_COLUMNS], tests), format_list(notes)]
    missing = [row.label for row in entries if len(groups.get(row.label, ())) < len(SEEDS)]
    if missing:
        command = (
            f"python tools/results.py run --recipe {DATA} --data {DATA} --device cpu --seeds {SEEDS[0]}-{SEEDS[-1]}"
        )
        parts.append(f"Rows with open runs (`{command}`, then `collect`): {', '.join(missing)}.")
    return [*parts, list_machines(runs)]
