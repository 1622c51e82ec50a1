"""The confirmations: the runs that docs/search-plan.md fixed before they were made, and what they show so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from fedheal.analysis.paired_tests import holm
from fedheal.reproduce import RECIPES
from fedheal.reproduce.plans import Recipe, RecipeRow
from results_data import Run, read_runs
from results_page import (
    TEST_COLUMNS,
    WITHOUT_STAND_IN,
    describe_time,
    drop_stand_ins,
    format_list,
    format_table,
    subtract_row,
    tabulate_tests,
)

WITH_ADAM = RecipeRow("uniform weights with FedAdam", "fedavg+uniform+fedadam")
CONTROLS = ("uniform weights", "FedHEAL (paper)")  # rows of the headline: runs serve both
ALPHA = 0.05
METRICS = {"AVG": 1, "STD": -1}  # -1: lower is better
ROUNDS = {"embedded": 20, "digits": 200, "office-caltech": 100}


@dataclass(frozen=True)
class Confirmation:
    """A method, the controls that it must beat, and the seeds that were fixed before it ran with them.

    Attributes:
        folder: Where its runs are kept, below results/, and its name for `results.py run --recipe`. Runs of controls that are
            rows of the headline are in the headline's folders.
        title: The heading of its section.
        introduction: What a reader must know before the tables.
        chosen: The method.
        seeds: The seeds of every row, by data set.
        others: Controls beside those of the headline.
    """

    folder: str
    title: str
    introduction: str
    chosen: RecipeRow
    seeds: Mapping[str, Sequence[int]]
    others: Sequence[RecipeRow] = ()

    def list_rows(self, data: str) -> list[RecipeRow]:
        """Return the controls, FedHEAL with the paper's tau for the data set, and the method."""
        headline = [row for row in RECIPES["headline"].list_rows(data) if row.label in CONTROLS]
        return [*headline, *self.others, self.chosen]

    @property
    def recipe(self) -> Recipe:
        """The rows as a recipe."""
        return Recipe(f"{self.chosen.label} and its controls", tuple(self.seeds), self.list_rows)


OF_SEARCH = Confirmation(
    folder="confirmation",
    title="Confirmation",
    introduction="`docs/search-plan.md` fixed the method, the controls, the seeds (8 to 15), the rounds and the tests before "
    "these runs. The answer is *yes* if the chosen method is better than each control in AVG and in STD, six "
    "comparisons for a data set, on Digits and on Office-Caltech. The embedded digits decide nothing. Runs of "
    "controls that are rows of the headline are in its folders, the others in `confirmation`.",
    chosen=RecipeRow("the chosen method", "fedavg+qffl:q=2.0,mode=reweight+fphl+mix:last=0.9+fedadam"),
    seeds=dict.fromkeys(ROUNDS, range(8, 16)),
    others=(WITH_ADAM,),
)
OF_SCAFFOLD = Confirmation(
    folder="confirmation-scaffold",
    title="Confirmation of SCAFFOLD",
    introduction="`docs/search-plan.md` fixed the seeds, the rounds and the tests before these runs of SCAFFOLD. The answer is"
    " *yes* if SCAFFOLD is better than uniform weights and than FedHEAL in AVG and in STD, four comparisons for a"
    " data set, on Digits and on Office-Caltech. Runs of the controls are in the headline's folders.",
    chosen=RecipeRow("SCAFFOLD", "scaffold"),
    seeds={"digits": (1, 2, *range(8, 14)), "office-caltech": (0, *range(8, 15))},
)
CONFIRMATIONS = (OF_SEARCH, OF_SCAFFOLD)


def write_confirmations(results: Path) -> list[str]:
    """Return the parts of the page; a confirmation without a run of its method has none."""
    return [part for confirmation in CONFIRMATIONS for part in write_confirmation(confirmation, results)]


def write_confirmation(confirmation: Confirmation, results: Path) -> list[str]:
    """Return the parts of the page, or nothing without a run of its method."""
    parts = []
    has_begun = False
    for data in confirmation.seeds:
        runs = read_confirmation(confirmation, results, data)
        has_begun |= any(run.entry == confirmation.chosen for run in runs)
        if runs:
            parts += [f"### {confirmation.title} on {data}", *_write_data_set(confirmation, runs, data)]
    return [f"## {confirmation.title}", confirmation.introduction, *parts] if has_begun else []


def read_confirmation(confirmation: Confirmation, results: Path, data: str) -> list[Run]:
    """Return the runs with the planned seeds and rounds, in the order of the rows and their seeds."""
    entries = confirmation.list_rows(data)
    folders = (results / data, results / confirmation.folder / data)
    found = [run for folder in folders for run in read_runs(entries, data, folder, ROUNDS[data], skips_others=True)]
    runs = [run for run in found if run.is_full and run.experiment.seed in confirmation.seeds[data]]
    return sorted(runs, key=lambda run: (entries.index(run.entry), run.experiment.seed))


def _write_data_set(confirmation: Confirmation, runs: Sequence[Run], data: str) -> list[str]:
    chosen, seeds = confirmation.chosen.label, confirmation.seeds[data]
    groups = {row.label: [run for run in runs if run.entry == row] for row in confirmation.list_rows(data)}
    parts = [*_compare_rows(groups, chosen, data), describe_time(runs)]
    if any(len(group) < len(seeds) for group in groups.values()):
        options = f"--recipe {confirmation.folder} --data {data}"
        return [*parts, *_report_futility(groups, chosen, len(seeds)), *_list_open_runs(groups, seeds, options)]
    parts.append(f"All {len(runs)} runs are finished.")
    if reduced := drop_stand_ins(runs, data):
        groups = {label: [run for run in reduced if run.label == label] for label in groups}
        heading = f"#### {confirmation.title} on {data}, without the stand-in"
        parts += [heading, WITHOUT_STAND_IN, *_compare_rows(groups, chosen, data)]
    return parts


def _compare_rows(groups: Mapping[str, Sequence[Run]], chosen: str, data: str) -> list[str]:
    """Return the rows' means over their common seeds, the differences by domain, and the tests."""
    shared = set.intersection(*({run.experiment.seed for run in group} for group in groups.values() if group))
    columns = ("AVG", "STD", "worst")
    lines = [
        [label, *(f"{np.mean([run.numbers[c] for run in group if run.experiment.seed in shared]):.2f}" for c in columns),
         ", ".join(str(run.experiment.seed) for run in group)]
        for label, group in groups.items() if group and shared
    ]  # fmt: skip
    averaged = f"{'seed' if len(shared) == 1 else 'mean of seeds'} {', '.join(map(str, sorted(shared)))}"
    parts = [format_table([f"percent, {averaged}", *columns, "runs with seeds"], lines)] if lines else []
    paired = [run for group in groups.values() for run in group if run.experiment.seed in shared]
    differences, _ = subtract_row(paired, CONTROLS[0], data)
    parts += [differences] if differences else []
    compared = {label: group for label, group in groups.items() if len(group) > 1}
    if chosen in compared and len(compared) > 1:
        tests, notes = tabulate_tests(compared, chosen)
        parts += [format_table([f"less {chosen}", *TEST_COLUMNS], tests), format_list(notes)]
    return parts


def _report_futility(groups: Mapping[str, Sequence[Run]], chosen_label: str, planned: int) -> list[str]:
    """Name the comparisons that open runs can no longer make significant. Return nothing if there are none."""
    chosen = {run.experiment.seed: run.numbers for run in groups[chosen_label]}
    bounds = {}
    for label in groups:
        if label != chosen_label:
            paired = [(chosen[run.experiment.seed], run) for run in groups[label] if run.experiment.seed in chosen]
            for metric, sign in METRICS.items():
                gains = [sign * (ours[metric] - run.numbers[metric]) for ours, run in paired]
                bounds[f"{metric} against {label}"] = bound_final_p(gains, planned)
    futile = {name: p for name, p in zip(bounds, holm(list(bounds.values())), strict=True) if p > ALPHA}
    if not futile:
        return []
    return [
        "**The answer is not *yes*.** Whatever the open seeds give, the chosen method cannot be shown to be better in every "
        "comparison: p of a gain after Holm's correction will be at least "
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


def _list_open_runs(groups: Mapping[str, Sequence[Run]], seeds: Sequence[int], words: str) -> list[str]:
    """Say which runs are missing, and which command runs them. `words` are its recipe and data."""
    missing = {
        label: [seed for seed in seeds if seed not in {run.experiment.seed for run in group}]
        for label, group in groups.items()
    }
    number = sum(map(len, missing.values()))
    lines = [f"{label}: seeds {', '.join(map(str, open_seeds))}" for label, open_seeds in missing.items() if open_seeds]
    command = f"python tools/results.py run {words} --seeds {','.join(map(str, seeds))}"
    first = f"Open are {number} of {len(groups) * len(seeds)} runs (`{command}`, then `collect`):"
    return [first, format_list(lines)]
