"""Search over any fields, scored on validation data: examples held out of the clients' training data, never the test set.

Grid and random search are built in; Optuna's TPE sampler is an extra. Results on the test set are neither read nor shown: a
comparison of the choice on other seeds gives them.
"""

from __future__ import annotations

import math
import random
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedheal.campaign.compare import DEFAULT_SEEDS
from fedheal.campaign.jobs import Job
from fedheal.core.errors import explain_install
from fedheal.core.rng import SEED_FIELDS
from fedheal.report.rows import load_summary
from fedheal.simulate.build import load_domains, partition_clients
from fedheal.simulate.experiment import PER_DOMAIN, Experiment, check_epochs_or_steps, format_value, parse_override

METRICS = {"avg": True, "worst": True, "std": False, "gap": False, "jain": True}  # name -> whether higher is better
MAX_POINTS = 10_000  # values of a field, points of a grid, and trials
MAX_PROPOSALS = 20  # of Optuna for each trial, since it may propose a point again
VALIDATION = 0.2  # default share of each client's examples that is held out
Point = dict[str, Any]
Runner = Callable[[Sequence[Job]], object]


@dataclass(frozen=True)
class Trial:
    """One point of the search space, and its numbers over seeds on validation data; None if its training diverges."""

    point: Point
    validation: Mapping[str, tuple[float, ...]] | None

    def score(self, metric: str) -> float:
        """Return the metric's mean over seeds on validation data, with the sign that makes higher better."""
        if self.validation is None:
            return -math.inf
        return float(np.mean(self.validation[metric])) * (1 if METRICS[metric] else -1)


@dataclass(frozen=True)
class ValidationData:
    """The examples that points are scored on: how many per domain, and the AVG that a model without skill reaches."""

    sizes: Mapping[str, int]
    chance: float  # percent: the best AVG of always predicting one class

    def is_chance(self, trial: Trial) -> bool:
        """Return whether a point's AVG is at most two standard errors above chance, or its training diverges."""
        if trial.validation is None:
            return True
        accuracies, share = trial.validation["avg"], self.chance / 100
        variance = share * (1 - share) * sum(1 / size for size in self.sizes.values()) / len(self.sizes) ** 2
        return float(np.mean(accuracies)) <= self.chance + 200 * math.sqrt(variance / len(accuracies))


def measure_validation(experiment: Experiment) -> ValidationData:
    """Load the data of an experiment, and count the examples that its accuracy on validation data is measured on."""
    data, counts = load_domains(experiment), dict[str, Tensor]()
    halves = 2 if any(term.validates for term in experiment.resolved_method.local) else 1  # one half sets weights
    for client in partition_clients(experiment, data):
        scored = client.indices[len(client.indices) - client.held_out // halves :]
        classes = torch.bincount(data[client.domain].labels[scored], minlength=len(data.classes))
        counts[client.domain] = counts.get(client.domain, 0) + classes
    shares = torch.stack([classes / classes.sum() for classes in counts.values()])
    return ValidationData({d: int(classes.sum()) for d, classes in counts.items()}, 100 * float(shares.mean(0).max()))


@dataclass(frozen=True)
class Search:
    """A search: `space` has several values per field, `fixed` one."""

    space: Mapping[str, Sequence[Any]]
    fixed: Mapping[str, Any]
    seeds: Sequence[int]
    out: Path
    metric: str = "avg"

    def __post_init__(self) -> None:
        if not self.space:
            raise ValueError("nothing to search: give a field several values, such as tau=0:0.9:0.1 or beta=0,0.4,1")
        if self.metric not in METRICS:
            raise ValueError(f"metric = {self.metric}: use one of {', '.join(METRICS)}")
        remedies = dict.fromkeys(("seed", *SEED_FIELDS), "use --seeds")
        remedies |= {"name": "leave it out", "validation": "give it one value"}
        for field, remedy in remedies.items():
            if field in self.space:
                raise ValueError(f"{field} cannot be searched: {remedy}")
        for field in ("seed", "name"):
            if field in self.fixed:
                remedy = f": use --seeds {self.fixed[field]}-{self.fixed[field]}" if field == "seed" else ""
                raise ValueError(
                    f"{field}={self.fixed[field]} cannot be set in a sweep, which sets {field} itself{remedy}"
                )
        check_epochs_or_steps({**self.fixed, **self.space})
        share = self.fixed.get("validation", VALIDATION)
        if not isinstance(share, int | float) or not 0 < share < 1:
            raise ValueError(f"validation = {share}: a sweep needs a share between 0 and 1")

    @property
    def size(self) -> int:
        """The number of points of the grid."""
        return math.prod(len(values) for values in self.space.values())

    def point(self, number: int) -> Point:
        """Return a point of the grid by its number; the last field varies fastest. The grid may be too large for memory."""
        point: Point = {}
        for key, values in reversed(list(self.space.items())):
            number, i = divmod(number, len(values))
            point[key] = values[i]
        return {key: point[key] for key in self.space}

    def jobs(self, point: Point) -> list[Job]:
        """Return a point's runs, one per seed."""
        values = {"validation": VALIDATION, **self.fixed, **point}
        label = ",".join(f"{key}={value}" for key, value in point.items())
        experiments = [Experiment.of(values | {"seed": seed, "name": f"{label}-seed{seed}"}) for seed in self.seeds]
        return [Job(experiment, self.out / experiment.folder_name, may_diverge=True) for experiment in experiments]

    def evaluate(self, points: Sequence[Point], run: Runner) -> list[Trial]:
        """Run the points and read their results."""
        jobs = [self.jobs(point) for point in points]
        run([job for group in jobs for job in group])
        return [_read_trial(point, group) for point, group in zip(points, jobs, strict=True)]

    def format_next_command(self, best: Trial) -> str:
        """Return the command that compares the chosen values with FedAvg, on as many seeds as a comparison has by default."""
        values = {**self.fixed, **best.point}
        experiment = Experiment.of(values)
        methods = dict.fromkeys(["fedavg", experiment.method_name])
        words = [
            f"{k}={format_value(v)}"
            for k, v in values.items()
            if k in Experiment.model_fields.keys() - {"method", "data"}
        ]
        first = max(self.seeds) + 1
        seeds = f"{first}-{first + DEFAULT_SEEDS - 1}"
        return shlex.join(["fedheal", "compare", *methods, "--data", experiment.data, "--seeds", seeds, *words])


def search_grid(search: Search, run: Runner, trials: int = 0) -> list[Trial]:
    """Try every point, however many `trials` are asked for."""
    if search.size > MAX_POINTS:
        raise ValueError(
            f"the grid has {search.size:,} points, more than {MAX_POINTS:,}: use --search random or optuna"
        )
    return search.evaluate([search.point(number) for number in range(search.size)], run)


def search_randomly(search: Search, run: Runner, trials: int) -> list[Trial]:
    """Try that many different points of the grid, drawn at random."""
    _check_trials(trials)
    if search.size > sys.maxsize:
        raise ValueError(f"the grid has {search.size:,} points, too many to draw from: search fewer fields or values")
    numbers = random.Random(0).sample(range(search.size), min(trials, search.size))
    return search.evaluate([search.point(number) for number in numbers], run)


def search_with_optuna(search: Search, run: Runner, trials: int) -> Iterator[Trial]:
    """Try that many different points that Optuna's TPE sampler proposes.

    Its seed is fixed, so a restart proposes the same points and resumes. A point that it proposes again is not tried again.
    """
    try:
        import optuna
    except ImportError:
        raise ValueError(f"Optuna is not installed: {explain_install('sweep')}") from None
    _check_trials(trials)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    tried: dict[tuple[int, ...], Trial] = {}
    for _ in range(MAX_PROPOSALS * trials):
        if len(tried) == min(trials, search.size):
            return
        proposal = study.ask()
        # Values by their index in the list: Optuna takes only plain types.
        indices = {key: proposal.suggest_categorical(key, range(len(values))) for key, values in search.space.items()}
        numbers = tuple(indices.values())
        is_new = numbers not in tried
        if is_new:
            (tried[numbers],) = search.evaluate([{key: search.space[key][i] for key, i in indices.items()}], run)
        study.tell(proposal, tried[numbers].score(search.metric))
        if is_new:
            yield tried[numbers]


SEARCHES: dict[str, Callable[[Search, Runner, int], Iterable[Trial]]] = {
    "grid": search_grid,
    "random": search_randomly,
    "optuna": search_with_optuna,
}


def _check_trials(trials: int) -> None:
    if not 1 <= trials <= MAX_POINTS:
        raise ValueError(f"trials = {trials}: use 1 to {MAX_POINTS:,}")


def _read_trial(point: Point, jobs: Sequence[Job]) -> Trial:
    if not all(job.has_result for job in jobs):  # they all ran, so what has none diverged
        return Trial(point, None)
    results = []
    for job in jobs:
        results.append(
            load_summary(job.folder, ["validation", *(f"validation.{name}" for name in METRICS)])["validation"]
        )
        if results[-1] is None:
            raise ValueError(
                f"{job.folder / 'result.json'}: there is no accuracy on validation data; remove this run and rerun the sweep"
            )
    return Trial(point, {name: tuple(float(result[name]) for result in results) for name in METRICS})


def choose_best(trials: Sequence[Trial], metric: str) -> Trial:
    """Return the trial with the best mean on validation data; the first one of equals.

    Raise ValueError if training diverges with all of them.
    """
    best = max(trials, key=lambda trial: trial.score(metric))
    if best.validation is None:
        raise ValueError("training diverges at every point of the search: choose smaller values, such as a smaller lr")
    return best


def count_equals(trials: Sequence[Trial], best: Trial, metric: str) -> int:
    """Return how many others the seeds do not tell from the best: behind it by one standard error or less, paired by seed."""
    others = [t.validation[metric] for t in trials if t is not best and t.validation is not None]
    assert best.validation is not None
    differences = [np.subtract(values, best.validation[metric]) for values in others]
    errors = [np.std(d, ddof=1) / math.sqrt(len(d)) if len(d) > 1 else 0.0 for d in differences]
    return sum(bool(abs(np.mean(d)) <= error) for d, error in zip(differences, errors, strict=True))


def parse_space(words: Sequence[str]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Return what `key=values` words search and what they fix.

    >>> parse_space(["tau=0:0.2:0.1", "beta=0,0.4", "rounds=5"])
    ({'tau': [0.0, 0.1, 0.2], 'beta': [0, 0.4]}, {'rounds': 5})
    >>> parse_space(["only=mnist,usps", "clients_per_domain=mnist=5,usps=3"])  # one value each, as for a run
    ({}, {'only': 'mnist,usps', 'clients_per_domain': 'mnist=5,usps=3'})
    """
    space: dict[str, list[Any]] = {}
    fixed: dict[str, Any] = {}
    for word in words:
        key, value = parse_override(word)
        text = word.partition("=")[2]
        if key in space or key in fixed:
            raise ValueError(f"'{key}' is given twice: write all its values in one word, such as {key}=1,2")
        if not _is_text(key) and re.fullmatch(r"[-+.\deE]+(:[-+.\deE]+)+", text):
            space[key] = _parse_range(word, text)
        elif "," in text and value == text and not _is_single_value(key, text):
            parts = [part.strip() for part in text.split(",")]
            if not all(parts):
                raise ValueError(f"'{word}' has an empty value: leave out the comma, or give the value")
            space[key] = [parse_override(f"{key}={part}")[1] for part in parts]
            if len(set(map(str, space[key]))) < len(space[key]):
                raise ValueError(f"'{word}' has a value twice: leave one out")
        else:
            fixed[key] = value
    return space, fixed


def _is_text(key: str) -> bool:
    """Return whether a field takes text, in which colons mean no range: an address such as 127.0.0.1:6379."""
    field = Experiment.model_fields.get(key)
    return field is not None and field.annotation in (str, str | None)


def _is_single_value(key: str, text: str) -> bool:
    """Return whether commas belong to the value: of a method with parameters, of names, or of a number per domain."""
    return (key == "method" and ":" in text) or key in ("only", "without") or (key in PER_DOMAIN and "=" in text)


def _parse_range(word: str, text: str) -> list[float]:
    """Return the values of first:last:step, both ends included. Decimals are added as decimals: 3 x 0.1 is 0.3."""
    try:
        first, last, step = (Decimal(part) for part in text.split(":"))
    except (InvalidOperation, ValueError):
        raise ValueError(f"'{word}' should be first:last:step, three numbers") from None
    if step <= 0 or last < first:
        raise ValueError(f"'{word}' should be first:last:step with a step above 0 and the last not below the first")
    number = int((last - first) / step) + 1
    if number > MAX_POINTS:
        raise ValueError(f"'{word}' has {number:,} values: use at most {MAX_POINTS:,}")
    return [float(first + i * step) for i in range(number)]
