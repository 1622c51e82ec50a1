"""The confirmation of the chosen method: the runs that docs/search-plan.md fixed, and what they show so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from fedheal.analysis.paired_tests import holm
from fedheal.reproduce import RECIPES
from fedheal.reproduce.plans import Recipe, RecipeRow
from results_data import Run, read_runs
from results_page import TEST_COLUMNS, describe_time, format_list, format_table, tabulate_tests

FOLDER = "confirmation"
CHOSEN = RecipeRow("the chosen method", "fedavg+qffl:q=2.0,mode=reweight+fphl+mix:last=0.9+fedadam")
WITH_ADAM = RecipeRow("uniform weights with FedAdam", "fedavg+uniform+fedadam")
CONTROLS = ("uniform weights", "FedHEAL (paper)")  # rows of the headline: runs serve both
SEEDS = tuple(range(8, 16))
ALPHA = 0.05
METRICS = {"AVG": 1, "STD": -1}  # -1: lower is better
ROUNDS = {"embedded": 20, "digits": 200, "office-caltech": 100}
INTRODUCTION = (
    "`docs/search-plan.md` fixed the method, the controls, the seeds (8 to 15), the rounds and the tests before these runs. "
    "The answer is *yes* if the chosen method is better than each control in AVG and in STD, six comparisons for a data set, "
    "on Digits and on Office-Caltech. The embedded digits decide nothing. Runs of controls that are rows of the headline are "
    f"in its folders, the others in `{FOLDER}`."
)


def list_rows(data: str) -> list[RecipeRow]:
    """Return the controls, FedHEAL with the paper's tau for the data set, and the chosen method."""
    headline = [row for row in RECIPES["headline"].list_rows(data) if row.label in CONTROLS]
    return [*headline, WITH_ADAM, CHOSEN]


RECIPE = Recipe("The chosen method and its controls", tuple(ROUNDS), list_rows)


def write_confirmation(results: Path) -> list[str]:
    """Return the parts of the page, or nothing without runs."""
    parts = []
    for data, rounds in ROUNDS.items():
        runs = read_confirmation(results, data, rounds)
        if runs:
            parts += [f"### Confirmation on {data}", *_write_data_set(runs, data)]
    return ["## Confirmation", INTRODUCTION, *parts] if parts else []


def read_confirmation(results: Path, data: str, rounds: int) -> list[Run]:
    """Return the runs with the planned seeds and rounds, in the order of the rows and their seeds."""
    entries = list_rows(data)
    folders = (results / data, results / FOLDER / data)
    found = [run for folder in folders for run in read_runs(entries, data, folder, rounds, skips_others=True)]
    runs = [run for run in found if run.is_full and run.experiment.seed in SEEDS]
    return sorted(runs, key=lambda run: (entries.index(run.entry), run.experiment.seed))


def _write_data_set(runs: Sequence[Run], data: str) -> list[str]:
    groups = {row.label: [run for run in runs if run.entry == row] for row in list_rows(data)}
    shared = set.intersection(*({run.experiment.seed for run in group} for group in groups.values() if group))
    columns = ("AVG", "STD", "worst")
    lines = [
        [label, *(f"{np.mean([run.numbers[c] for run in group if run.experiment.seed in shared]):.2f}" for c in columns),
         ", ".join(str(run.experiment.seed) for run in group)]
        for label, group in groups.items() if group and shared
    ]  # fmt: skip
    averaged = f"{'seed' if len(shared) == 1 else 'mean of seeds'} {', '.join(map(str, sorted(shared)))}"
    parts = [format_table([f"percent, {averaged}", *columns, "runs with seeds"], lines)] if lines else []
    compared = {label: group for label, group in groups.items() if len(group) > 1}
    if CHOSEN.label in compared and len(compared) > 1:
        tests, notes = tabulate_tests(compared, CHOSEN.label)
        parts += [format_table([f"less {CHOSEN.label}", *TEST_COLUMNS], tests), format_list(notes)]
    return [*parts, describe_time(runs), *_report_futility(groups), *_list_open_runs(groups, data)]


def _report_futility(groups: Mapping[str, Sequence[Run]]) -> list[str]:
    """Name the comparisons that open runs can no longer make significant. Return nothing if there are none."""
    if all(len(group) == len(SEEDS) for group in groups.values()):
        return []
    chosen = {run.experiment.seed: run.numbers for run in groups[CHOSEN.label]}
    bounds = {}
    for label in groups:
        if label != CHOSEN.label:
            paired = [(chosen[run.experiment.seed], run) for run in groups[label] if run.experiment.seed in chosen]
            for metric, sign in METRICS.items():
                gains = [sign * (ours[metric] - run.numbers[metric]) for ours, run in paired]
                bounds[f"{metric} against {label}"] = bound_final_p(gains, len(SEEDS))
    futile = {name: p for name, p in zip(bounds, holm(list(bounds.values())), strict=True) if p > ALPHA}
    if not futile:
        return []
    return [
        "**The answer is not *yes*.** Whatever the open seeds give, p after Holm's correction will be at least "
        + ", ".join(f"{p:.3f} for {name}" for name, p in futile.items())
        + ". The open runs can still narrow the intervals."
    ]


def bound_final_p(gains: Sequence[float], planned: int) -> float:
    """Bound the p that a gain can have in the paired test once all planned seeds have run.

    A sign flip of the known gains that does not lower their sum does not lower the final sum either, so the test counts it,
    and its mirror image.

    Args:
        gains: The gains of the seeds that have run; positive if the chosen method is better.
        planned: The number of planned seeds.
    """
    least = sum(gains) - 1e-9 * sum(map(abs, gains))  # as in the test: rounding must not exclude ties
    flips = product(*((gain, -gain) for gain in gains))
    return min(1.0, 2 * sum(sum(flip) >= least for flip in flips) / 2**planned)


def _list_open_runs(groups: dict[str, list[Run]], data: str) -> list[str]:
    """Say which runs are missing, and which command runs them."""
    missing = {
        label: [seed for seed in SEEDS if seed not in {run.experiment.seed for run in group}]
        for label, group in groups.items()
    }
    number = sum(map(len, missing.values()))
    if not number:
        return [f"All {len(groups) * len(SEEDS)} runs are finished."]
    command = f"python tools/results.py run --recipe confirmation --data {data}"
    lines = [f"{label}: seeds {', '.join(map(str, seeds))}" for label, seeds in missing.items() if seeds]
    planned = len(groups) * len(SEEDS)
    first = f"Open are {number} of {planned} runs (`{command} --seeds {SEEDS[0]}-{SEEDS[-1]}`, then `collect`):"
    return [first, format_list(lines)]
