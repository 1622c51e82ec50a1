"""Recipes, and the runs that they need."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fedheal.campaign.jobs import Job
from fedheal.methods import get
from fedheal.reproduce import paper
from fedheal.runs.schema import FREE
from fedheal.simulate.experiment import Experiment

# A smoke run shows that everything works, in minutes on a CPU; its numbers are meaningless.
SMOKE: Mapping[str, Any] = {"rounds": 5, "epochs": 1}
SMOKE_DATA = "embedded"
PAPER_DATA = {SMOKE_DATA: "digits"}  # data that the paper does not have -> its data whose numbers are shown instead


@dataclass(frozen=True)
class RecipeRow:
    """One row of a table: its label, our method, and the paper's numbers (`DOMAINS`, AVG, STD; or only the last two)."""

    label: str
    method: str
    published: paper.Numbers = ()
    misprint: tuple[tuple[str, ...], str] = ((), "")  # columns in doubt, and why


@dataclass(frozen=True)
class Claim:
    """A claim that should hold for several pairs of rows: the first is better than the second."""

    text: str
    pairs: tuple[tuple[str, str], ...]  # labels of rows


@dataclass(frozen=True)
class Recipe:
    """One result of the paper."""

    title: str
    data: tuple[str, ...]
    list_rows: Callable[[str], list[RecipeRow]]  # the rows on a data set
    notes: tuple[str, ...] = ()
    list_claims: Callable[[], list[Claim]] = list
    values: Callable[[int], Mapping[str, Any]] = field(default=lambda rounds: {})  # fields it fixes, given the rounds
    smoke: Mapping[str, Any] = field(default_factory=lambda: SMOKE)
    figure: str = ""  # which figure belongs to it: "sweep", "curves", "consistency" or none


@dataclass(frozen=True)
class Options:
    """What a user may choose."""

    seeds: Sequence[int] = (0,)
    rows: Sequence[str] = ()  # patterns for labels or methods; all if none
    data: Sequence[str] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    smoke: bool = False


@dataclass(frozen=True)
class RecipePlan:
    """The runs of a recipe on one data set: its rows, each with one job per seed. Two rows may share a run."""

    data: str
    rows: Sequence[tuple[RecipeRow, Sequence[Job]]]
    smoke: bool = False

    @property
    def jobs(self) -> list[Job]:
        """The jobs of all rows, each once."""
        return list({job.folder: job for _, jobs in self.rows for job in jobs}.values())


def plan_recipe(recipe: Recipe, options: Options, out: Path) -> list[RecipePlan]:
    """Plan the runs of a recipe below the folder `out`, one plan per data set.

    Raises:
        ValueError: An option is invalid; every experiment is validated here, and nothing is written yet.
    """
    if not options.seeds:
        raise ValueError("a result needs at least one seed")
    _refuse_fixed(("seed", "method", "name", "data"), options.values)
    data_sets = tuple(options.data) or ((SMOKE_DATA,) if options.smoke else recipe.data)
    selected = _select_rows({data: recipe.list_rows(data) for data in data_sets}, options.rows)
    parameters = {key for rows in selected.values() for row in rows for key in get(row.method).parameters}
    _refuse_fixed(parameters - Experiment.model_fields.keys(), options.values)
    return [_plan_data_set(recipe, data, rows, options, out) for data, rows in selected.items()]


def _refuse_fixed(fixed: Iterable[str], values: Mapping[str, Any]) -> None:
    for key in fixed:
        if key in values:
            raise ValueError(f"{key} is set by the recipe: leave out {key}={values[key]}")


def make_suffix(options: Options) -> str:
    """Return what distinguishes these runs from the protocol's, for names of folders and files."""
    words = [f"{key}={value}" for key, value in sorted(options.values.items()) if key not in FREE]
    return "".join(f"-{word}" for word in (["smoke"] if options.smoke else []) + words).replace("/", "_")


def _plan_data_set(recipe: Recipe, data: str, rows: Sequence[RecipeRow], options: Options, out: Path) -> RecipePlan:
    values = (dict(recipe.smoke) if options.smoke else {}) | {"data": data} | dict(options.values)
    if "steps" in options.values and "epochs" not in options.values:
        values.pop("epochs", None)  # those of a smoke test
    fixed = dict(recipe.values(Experiment.of(values | {"method": "fedavg"}).rounds))
    _refuse_fixed(fixed, options.values)
    suffix = "".join(f"-{key}={value}" for key, value in sorted(fixed.items())) + make_suffix(options)
    folder = out / f"{data.replace(':', '.').replace('/', '_')}{suffix}"
    planned = []
    for row in rows:
        experiments = [Experiment.of(values | fixed | {"method": row.method, "seed": seed}) for seed in options.seeds]
        planned.append((row, [Job(experiment, folder / experiment.folder_name) for experiment in experiments]))
    return RecipePlan(data, planned, options.smoke)


def _select_rows(data_sets: Mapping[str, Sequence[RecipeRow]], patterns: Sequence[str]) -> dict[str, list[RecipeRow]]:
    """Return the rows that match any pattern, by data set; data sets without such rows are left out."""
    for pattern in patterns:
        if not any(_matches(row, [pattern]) for rows in data_sets.values() for row in rows):
            names = {data: [f"{row.label!r} ({row.method})" for row in rows] for data, rows in data_sets.items()}
            known = "; ".join(f"{', '.join(labels)} on {data}" for data, labels in names.items())
            raise ValueError(f"rows = {pattern}: no row has this label or method; the rows are {known}")
    selected = {data: [row for row in rows if _matches(row, patterns or ["*"])] for data, rows in data_sets.items()}
    return {data: rows for data, rows in selected.items() if rows}


def _matches(row: RecipeRow, patterns: Iterable[str]) -> bool:
    """Return whether any pattern matches a row's label or method, ignoring case."""
    names = (row.method.lower(), row.method.lower().partition(":")[0], row.label.lower())
    return any(fnmatch(name, pattern.lower()) for name in names for pattern in patterns)
