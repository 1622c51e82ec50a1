"""What a recipe is, and the runs it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fedheal.campaign.jobs import Job
from fedheal.reproduce import paper
from fedheal.runs.schema import FREE
from fedheal.simulate.experiment import Experiment

# A smoke run shows that everything works, in minutes on a CPU; its numbers mean nothing.
SMOKE: Mapping[str, Any] = {"rounds": 5, "epochs": 1}
SMOKE_DATA = "embedded"
BESIDE = {SMOKE_DATA: "digits"}  # whose numbers stand beside those of data that the paper does not have


@dataclass(frozen=True)
class Entry:
    """One row: what it is called, our method, and the paper's numbers (`DOMAINS`, AVG, STD; or just the last two)."""

    label: str
    method: str
    published: paper.Numbers = ()
    misprint: tuple[tuple[str, ...], str] = ((), "")


@dataclass(frozen=True)
class Claim:
    """Something that should hold in several places: the first method is better than the second."""

    words: str
    pairs: tuple[tuple[str, str], ...]  # labels of rows


@dataclass(frozen=True)
class Recipe:
    """One result of the paper."""

    title: str
    data: tuple[str, ...]
    entries: Callable[[str], list[Entry]]  # the rows on a data set
    notes: tuple[str, ...] = ()
    claims: Callable[[], list[Claim]] = list
    values: Callable[[int], Mapping[str, Any]] = field(default=lambda rounds: {})  # fields it fixes, given the rounds
    smoke: Mapping[str, Any] = field(default_factory=lambda: SMOKE)
    kind: str = "table"  # or "sweep", "curves", "consistency": which figure belongs to it


@dataclass(frozen=True)
class Options:
    """What a user may say."""

    seeds: Sequence[int] = (0,)
    rows: Sequence[str] = ()  # patterns for labels or methods; all if none
    data: Sequence[str] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    smoke: bool = False


@dataclass(frozen=True)
class Planned:
    """A data set's part of a recipe: its rows, each with a job a seed; two rows may share a run."""

    data: str
    rows: Sequence[tuple[Entry, Sequence[Job]]]
    smoke: bool = False

    @property
    def jobs(self) -> list[Job]:
        return list({job.folder: job for _, jobs in self.rows for job in jobs}.values())


def planned(recipe: Recipe, options: Options, out: Path) -> list[Planned]:
    """The runs of a recipe, all validated before the first starts."""
    if not options.seeds:
        raise ValueError("a result needs at least one seed")
    _refuse_fixed(("seed", "method", "name", "data"), options.values)
    sets = tuple(options.data) or ((SMOKE_DATA,) if options.smoke else recipe.data)
    chosen = _chosen({data: recipe.entries(data) for data in sets}, options.rows)
    return [_on(recipe, data, entries, options, out) for data, entries in chosen.items()]


def _refuse_fixed(fixed: Iterable[str], values: Mapping[str, Any]) -> None:
    for key in fixed:
        if key in values:
            raise ValueError(f"{key} is what a recipe sets: it cannot be given as {key}={values[key]}")


def suffix(options: Options) -> str:
    """What sets these runs apart from those of the protocol itself, for names of folders and files."""
    said = [f"{key}={value}" for key, value in sorted(options.values.items()) if key not in FREE]
    return "".join(f"-{word}" for word in (["smoke"] if options.smoke else []) + said).replace("/", "_")


def _on(recipe: Recipe, data: str, entries: Sequence[Entry], options: Options, out: Path) -> Planned:
    given = (dict(recipe.smoke) if options.smoke else {}) | {"data": data} | dict(options.values)
    rounds = Experiment.of(given | {"method": "fedavg"}).rounds
    fixed = dict(recipe.values(rounds))
    _refuse_fixed(fixed, options.values)
    own = "".join(f"-{key}={value}" for key, value in sorted(fixed.items()))
    folder = out / f"{data.replace(':', '.').replace('/', '_')}{own}{suffix(options)}"
    rows = []
    for entry in entries:
        experiments = [Experiment.of(given | fixed | {"method": entry.method, "seed": seed}) for seed in options.seeds]
        rows.append((entry, [Job(experiment, folder / experiment.folder_name) for experiment in experiments]))
    return Planned(data, rows, options.smoke)


def _chosen(sets: Mapping[str, Sequence[Entry]], patterns: Sequence[str]) -> dict[str, list[Entry]]:
    """The rows that any pattern fits, by label or method, without regard to case, and the data sets that have any of them."""
    for pattern in patterns:
        if not any(_fits(entry, pattern) for entries in sets.values() for entry in entries):
            known = [
                f"{', '.join(f'{entry.label!r} ({entry.method})' for entry in entries)} on {data}"
                for data, entries in sets.items()
            ]
            raise ValueError(f"rows = {pattern}: no row is called so; the rows are {'; '.join(known)}")
    chosen = {
        data: [entry for entry in entries if not patterns or any(_fits(entry, pattern) for pattern in patterns)]
        for data, entries in sets.items()
    }
    return {data: entries for data, entries in chosen.items() if entries}


def _fits(entry: Entry, pattern: str) -> bool:
    names = (entry.method.lower(), entry.method.lower().partition(":")[0], entry.label.lower())
    return any(fnmatch(name, pattern.lower()) for name in names)


def printed_in(data: str, table: Mapping[str, Mapping[Any, paper.Numbers]], key: Any) -> paper.Numbers:
    """The paper's numbers for a row on this data set, or on the one that stands beside it; empty if there are none."""
    return table.get(BESIDE.get(data, data), {}).get(key, ())
