"""Search over any fields, judged on validation data: examples held out of the clients' own training data, never the test set.

Grid and random search are built in; Optuna's TPE sampler is an extra. Results of the test set are shown beside, for
information: what was chosen did not see them.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np

from fedheal.campaign.pool import Job
from fedheal.report.rows import load_summary
from fedheal.simulate.experiment import PER_DOMAIN, Experiment, parse_override

METRICS = {"avg": True, "worst": True, "std": False, "gap": False, "jain": True}  # name -> whether higher is better
MOST = 10_000  # values of a field, points of a grid that are all tried, and trials
VALIDATION = 0.2  # share of each client's examples, unless another is given
Point = dict[str, Any]
Runner = Callable[[Sequence[Job]], object]


@dataclass(frozen=True)
class Trial:
    """One point of the search space: its numbers over seeds, on validation data and on the test set."""

    point: Point
    validation: Mapping[str, tuple[float, ...]]
    test: Mapping[str, tuple[float, ...]]

    def score(self, metric: str) -> float:
        """The mean over seeds of what the choice is made by; higher is better."""
        return float(np.mean(self.validation[metric])) * (1 if METRICS[metric] else -1)


@dataclass(frozen=True)
class Search:
    """What to search: `space` has several values a field, `fixed` one."""

    space: Mapping[str, Sequence[Any]]
    fixed: Mapping[str, Any]
    seeds: Sequence[int]
    out: Path
    metric: str = "avg"

    def __post_init__(self) -> None:
        if not self.space:
            raise ValueError(
                "nothing to search: give a field several values, for example tau=0:0.9:0.1 or beta=0,0.4,1"
            )
        if self.metric not in METRICS:
            raise ValueError(f"metric = {self.metric}: use one of {', '.join(METRICS)}")
        for field in ("seed", "name", "validation"):
            if field in self.space:
                raise ValueError(f"{field} cannot be searched{'; --seeds says how many' if field == 'seed' else ''}")
        for field in ("seed", "name"):
            if field in self.fixed:
                raise ValueError(f"{field} is what a sweep varies: it cannot be given as {field}={self.fixed[field]}")
        share = self.fixed.get("validation", VALIDATION)
        if not isinstance(share, int | float) or not 0 < share < 1:
            raise ValueError(f"validation = {share}: a sweep needs a share between 0 and 1 to judge by")

    @property
    def size(self) -> int:
        """How many points the grid has."""
        return math.prod(len(values) for values in self.space.values())

    def point(self, place: int) -> Point:
        """The point at a place of the grid, in which the last field varies fastest: a grid need not fit into memory."""
        chosen: Point = {}
        for key, values in reversed(list(self.space.items())):
            place, i = divmod(place, len(values))
            chosen[key] = values[i]
        return {key: chosen[key] for key in self.space}

    def jobs(self, point: Point) -> list[Job]:
        values = {"validation": VALIDATION, **self.fixed, **point}
        label = ",".join(f"{key}={value}" for key, value in point.items())
        made = [Experiment.of(values | {"seed": seed, "name": f"{label}-seed{seed}"}) for seed in self.seeds]
        return [Job(experiment, self.out / experiment.folder_name) for experiment in made]

    def trial(self, point: Point) -> Trial:
        """What the runs of a point found."""
        results = [_result(job.folder) for job in self.jobs(point)]
        return Trial(
            point,
            {name: tuple(float(r["validation"][name]) for r in results) for name in METRICS},
            {name: tuple(float(r[name]) for r in results) for name in METRICS},
        )


def grid(search: Search, run: Runner) -> list[Trial]:
    """Every point."""
    if search.size > MOST:
        raise ValueError(
            f"the grid has {search.size:,} points: {MOST:,} are the most; --search random or optuna tries some of them"
        )
    return _all(search, [search.point(place) for place in range(search.size)], run)


def randomly(search: Search, run: Runner, trials: int, seed: int = 0) -> list[Trial]:
    """So many different points of the grid, drawn at random."""
    _check_trials(trials)
    if search.size > sys.maxsize:
        raise ValueError(f"the grid has {search.size:,} points, too many to draw from: search fewer fields or values")
    places = random.Random(seed).sample(range(search.size), min(trials, search.size))
    return _all(search, [search.point(place) for place in places], run)


def by_optuna(search: Search, run: Runner, trials: int, seed: int = 0) -> Iterator[Trial]:
    """Points that Optuna's TPE sampler proposes one after another. The same seed proposes the same, so a restart goes on."""
    try:
        import optuna
    except ImportError:
        raise ValueError("Optuna is not installed: pip install 'fedheal[sweep]'") from None
    _check_trials(trials)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    for _ in range(trials):
        asked = study.ask()
        # Values by their place in the list: Optuna knows only plain types.
        chosen = {
            key: values[asked.suggest_categorical(key, range(len(values)))] for key, values in search.space.items()
        }
        (trial,) = _all(search, [chosen], run)
        study.tell(asked, trial.score(search.metric))
        yield trial


def _check_trials(trials: int) -> None:
    if not 1 <= trials <= MOST:
        raise ValueError(f"trials = {trials}: use 1 to {MOST:,}")


def _result(folder: Path) -> dict[str, Any]:
    """What a run found, on both kinds of data."""
    summary = load_summary(folder, [*METRICS, "validation", *(f"validation.{name}" for name in METRICS)])
    if summary["validation"] is None:
        raise ValueError(f"{folder / 'result.json'}: there is no accuracy on validation data")
    return summary


def _all(search: Search, points: Sequence[Point], run: Runner) -> list[Trial]:
    run([job for point in points for job in search.jobs(point)])
    return [search.trial(point) for point in points]


def best(trials: Sequence[Trial], metric: str) -> Trial:
    """The trial with the best mean on validation data; the first of equals."""
    return max(trials, key=lambda trial: trial.score(metric))


def space_of(words: Sequence[str]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """What is searched and what is fixed, from `key=values` words.

    >>> space_of(["tau=0:0.2:0.1", "beta=0,0.4", "rounds=5"])
    ({'tau': [0.0, 0.1, 0.2], 'beta': [0, 0.4]}, {'rounds': 5})
    >>> space_of(["only=mnist,usps", "clients_per_domain=mnist=5,usps=3"])  # one value each, as for a run
    ({}, {'only': 'mnist,usps', 'clients_per_domain': 'mnist=5,usps=3'})
    """
    space: dict[str, list[Any]] = {}
    fixed: dict[str, Any] = {}
    for word in words:
        key, value = parse_override(word)
        text = word.partition("=")[2]
        if key in space or key in fixed:
            raise ValueError(f"'{key}' is given twice")
        if re.fullmatch(r"[-+.\deE]+:[-+.\deE]+:[-+.\deE]+", text):
            space[key] = _range(word, text)
        elif "," in text and value == text and not _one_value(key, text):
            space[key] = [parse_override(f"{key}={part.strip()}")[1] for part in text.split(",")]
            if len(set(map(str, space[key]))) < len(space[key]):
                raise ValueError(f"'{word}' has a value twice")
        else:
            fixed[key] = value
    return space, fixed


def _one_value(key: str, text: str) -> bool:
    """Whether commas are a part of the value: of a method with parameters, of names, or of a number for each domain."""
    return (key == "method" and ":" in text) or key in ("only", "without") or (key in PER_DOMAIN and "=" in text)


def _range(word: str, text: str) -> list[float]:
    """Both ends belong to it; decimals are added as decimals, so 0.1 three times is 0.3."""
    try:
        first, last, step = (Decimal(part) for part in text.split(":"))
    except InvalidOperation:
        raise ValueError(f"'{word}' should be first:last:step, three numbers") from None
    if step <= 0 or last < first:
        raise ValueError(f"'{word}' should be first:last:step with a step above 0 and the last not below the first")
    number = int((last - first) / step) + 1
    if number > MOST:
        raise ValueError(f"'{word}' has {number:,} values: {MOST:,} are the most")
    return [float(first + i * step) for i in range(number)]
