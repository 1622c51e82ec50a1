"""Studies on the embedded digits, for which a CPU suffices: all methods, and those that the paper's tables lack."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedheal.reproduce import RECIPES
from fedheal.reproduce.plans import Recipe, RecipeRow
from fedheal.simulate.experiment import Experiment
from results_confirmation import OF_SEARCH
from results_data import Run, read_runs
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

DATA = "embedded"


@dataclass(frozen=True)
class Study:
    """Rows on the embedded digits, compared with one of them.

    Attributes:
        name: Its name for `results.py run --recipe`.
        title: The heading of its section.
        text: What a reader must know before the tables.
        rows: The rows.
        control: The label of the row that the others are compared with.
        seeds: The seeds of every row.
        settings: Settings that differ from the data set's protocol.
        tested: The labels of the rows in the family of tests, which was fixed before the runs; all if none.
        folder: Where the runs are kept, below results/.
        other_folders: Other folders with runs of these rows.
    """

    name: str
    title: str
    text: str
    rows: Sequence[RecipeRow]
    control: str
    seeds: Sequence[int]
    settings: Mapping[str, Any] = field(default_factory=dict)
    tested: Sequence[str] = ()
    folder: str = ""
    other_folders: Sequence[str] = ()

    @property
    def recipe(self) -> Recipe:
        """The rows as a recipe."""
        return Recipe(self.title, (DATA,), lambda data: list(self.rows))

    @property
    def rounds(self) -> int:
        """The planned number of rounds."""
        return Experiment.of({**self.settings, "data": DATA}).rounds


def _list_all_methods() -> list[RecipeRow]:
    """Return the headline's rows without the paper's numbers, combinations of the package's parts, and the chosen method."""
    headline = [replace(row, published=(), misprint=((), "")) for row in RECIPES["headline"].list_rows(DATA)]
    combinations = [
        RecipeRow("FedHEAL per step", "fedavg+fedheal:per_step=true"),
        RecipeRow("FedPW", "fedpw"),
        RecipeRow("AFL + FPHL", "fedavg+afl+fphl"),
    ]
    return [*headline, *combinations, *OF_SEARCH.others, OF_SEARCH.chosen]


def _list_methods(*names: str) -> list[RecipeRow]:
    return [RecipeRow(name, name) for name in names]


STUDIES = (
    Study(
        "embedded",
        "embedded",
        "The digits that come with the package, by the data set's own protocol: `small_cnn`, 20 rounds of two epochs. The "
        "paper has no such data. The seeds are those of the confirmation, which the search had not used. The last two rows "
        "are the confirmation's. The tests have the rows of the README's picture: eight seeds can show a difference among "
        "six comparisons, and not among more.",
        _list_all_methods(),
        "uniform weights",
        OF_SEARCH.seeds[DATA],
        tested=("FedAvg", "uniform weights", "FedHEAL (paper)", "AFL"),
        other_folders=(OF_SEARCH.folder,),
    ),
    Study(
        "tutorial",
        "The tutorial's comparison on embedded",
        "The runs of `docs/start-research.md`, with the first eight seeds.",
        _list_methods("fedavg", "fedavg+uniform", "fedavg+fedheal"),
        "fedavg+uniform",
        range(8),
        folder="tutorial",
    ),
    Study(
        "local-methods",
        "Local methods on embedded",
        "Short runs with one client per domain: ten rounds of one epoch at lr = 0.005. They show that the methods work, and "
        "are too short to rank them.",
        _list_methods("fedavg", "fedavg+uniform", "fedavg+fedheal", "feddg", "fedsam", "fedlesam", "fedism"),
        "fedavg",
        range(10),
        {"clients_per_domain": 1, "rounds": 10, "epochs": 1, "lr": 0.005},
        folder="local-methods",
    ),
    Study(
        "drift-correction",
        "FedProx and SCAFFOLD with and without FedHEAL on embedded",
        "On Digits with one seed SCAFFOLD leads FedHEAL and uniform weights in AVG and STD. These runs ask whether it does so "
        "here, by the data set's own protocol. The seeds are new. The rows and the tests were fixed before the runs.",
        _list_methods("fedavg+uniform", "fedavg+fedheal", "fedprox", "fedprox+fedheal", "scaffold", "scaffold+fedheal"),
        "fedavg+uniform",
        range(16, 26),
        folder="drift-correction",
    ),
    Study(
        "drift-correction-parts",
        "What of FedHEAL fails with SCAFFOLD on embedded",
        "`scaffold+fedheal` fails in the runs above. These runs of the same seeds have its parts alone, and controls with the "
        "weights of the average (`fair_controls=p`).",
        _list_methods("scaffold", "scaffold+fael", "scaffold+fphl", "scaffold:fair_controls=p+fedheal"),
        "scaffold",
        range(16, 26),
        folder="drift-correction-parts",
        other_folders=("drift-correction",),
    ),
    *(
        Study(
            f"rate-{rate}",
            f"FedAvg, FedHEAL and FedDG at lr = {rate} on embedded",
            "The short runs again at another learning rate. FedDG's loss is a sum of two cross-entropies, so at one rate it "
            "takes longer steps than the others.",
            _list_methods("fedavg", "fedavg+fedheal", "feddg"),
            "fedavg",
            range(10),
            {"clients_per_domain": 1, "rounds": 10, "epochs": 1, "lr": rate},
            folder=f"rate-{rate}",
        )
        for rate in (0.01, 0.02, 0.04)
    ),
    Study(
        "server-optimisers",
        "Server optimisers on embedded",
        "One client per domain, all else by the data set's protocol. `eta` was chosen on validation data "
        "(`docs/findings.md#server-optimisers`).",
        _list_methods(
            "fedavg",
            "fedavg+uniform",
            "fedavg+fedheal",
            "fedavg+fedadam:eta=0.03",
            "fedavg+fedheal+fedavgm:eta=0.3",
            "fedavg+fedheal+fedadam:eta=0.03",
            "fedavg+fedheal+fedyogi:eta=0.03",
            "fedavg+fedheal+fedadagrad:eta=0.03",
        ),
        "fedavg+fedheal",
        range(10),
        {"clients_per_domain": 1, "eval_every": 5},
        folder="server-optimisers",
    ),
    Study(
        "public-images",
        "FCCL and FCCL+ on embedded",
        "Half of the data set's usual examples and rounds, so that enough images are left to be public.",
        _list_methods("fedavg", "fedavg+uniform", "fedavg+fedheal", "fccl", "fcclplus"),
        "fedavg",
        range(10),
        {
            "samples_per_client": {"handwritten": 200, "print": 200, "street": 150, "display": 40},
            "rounds": 10,
            "eval_every": 5,
        },
        folder="public-images",
    ),
    Study(
        "public-images-parts",
        "Parts of FCCL and FCCL+ on embedded",
        "The same examples in four rounds, without the steps on public images (`public_lr=0`) or without the teacher "
        "(`inter=0`).",
        _list_methods("fedavg", "fccl", "fccl:public_lr=0.0", "fcclplus:public_lr=0.0", "fcclplus:inter=0.0"),
        "fedavg",
        range(10),
        {"samples_per_client": {"handwritten": 200, "print": 200, "street": 150, "display": 40}, "rounds": 4},
        folder="public-images-parts",
    ),
)


def write_studies(results: Path) -> list[str]:
    """Return the parts of the page; a study without runs has none."""
    return [part for study in STUDIES for part in write_study(study, results)]


def _describe_means(runs: Sequence[Run]) -> str:
    """Say which rounds an accuracy is the mean of."""
    numbers = sorted({int(run.summary["averaged"]) for run in runs})
    if numbers == [1]:
        return "Accuracy is that of the last round alone."
    return f"Accuracy is the mean of the last {' or '.join(map(str, numbers))} rounds that were evaluated."


def write_study(study: Study, results: Path) -> list[str]:
    """Return the section of a study, or nothing without runs."""
    folders = [results / name / DATA for name in (study.folder, *study.other_folders)]
    runs = [run for folder in folders for run in read_runs(study.rows, DATA, folder, study.rounds, skips_others=True)]
    runs = [run for run in runs if run.experiment.seed in study.seeds]
    runs.sort(key=lambda run: study.rows.index(run.entry))
    if not runs:
        return []
    groups = group_by_label(runs)
    difference, _ = subtract_row(runs, study.control, DATA)
    text = f"{study.text} {_describe_means(runs)}"
    parts = [f"## {study.title}", text, tabulate_means(runs), *([difference] if difference else [])]
    tested = {label: group for label, group in groups.items() if label in study.tested or not study.tested}
    if study.control in tested and len(tested) > 1:
        tests, notes = tabulate_tests(tested, study.control)
        parts += [format_table([f"less {study.control}", *TEST_COLUMNS], tests), format_list(notes)]
    missing = [row.label for row in study.rows if len(groups.get(row.label, ())) < len(study.seeds)]
    if missing:
        seeds = f"{study.seeds[0]}-{study.seeds[-1]}"
        command = f"python tools/results.py run --recipe {study.name} --data {DATA} --device cpu --seeds {seeds}"
        parts.append(f"Some runs are open (`{command} --rows {shlex.quote(','.join(missing))}`, then `collect`).")
    return [*parts, list_machines(runs)]
