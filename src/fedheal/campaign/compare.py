"""Plan a comparison: methods x seeds into one folder, paired.

For one seed, every method has the same split, cohorts, batches and initial model. Bounds (`campaign.bounds`) count as methods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedheal.campaign.bounds import load_bound_domains, plan_bound
from fedheal.campaign.jobs import Job
from fedheal.core.errors import suggest
from fedheal.methods import get, parse
from fedheal.report.rows import BOUNDS
from fedheal.simulate.experiment import Experiment

MAX_SEEDS = 10_000


def plan(
    methods: Sequence[str], seeds: Sequence[int], values: Mapping[str, Any], out: Path, track: str | None = None
) -> list[Job]:
    """Return the runs of a comparison, all validated.

    Args:
        methods: names of methods and bounds.
        seeds: the seeds of each method.
        values: fields that all experiments share.
        out: the folder that the run folders go into.
        track: a tracker for every run, as `fedheal.tracking.tracker` takes it.

    Raises:
        ValueError: if one of the runs could not be run.
    """
    if not methods:
        raise ValueError("name at least one method to compare, for example: fedheal compare fedavg fedheal")
    if not seeds:
        raise ValueError("a comparison needs at least one seed")
    for field in ("seed", "method", "name"):
        if field in values:
            raise ValueError(f"{field}={values[field]} cannot be set in a comparison, which sets {field} itself")
    _check_parameters(methods, values)
    domains = load_bound_domains(methods, values)
    jobs = []
    for seed in seeds:
        seed_values = dict(values) | {"seed": seed}
        for method in methods:
            if method in BOUNDS:
                assert domains is not None
                experiments = plan_bound(method, seed_values, domains)
            else:
                experiments = [_make_experiment(method, seed_values)]
            jobs += [Job(experiment, out / experiment.folder_name, track) for experiment in experiments]
    repeated = [folder.name for folder, times in Counter(job.folder for job in jobs).items() if times > 1]
    if repeated:
        raise ValueError(f"two of the methods are the same: {min(repeated)}")
    return jobs


def _check_parameters(methods: Sequence[str], values: Mapping[str, Any]) -> None:
    """Raise ValueError if only some of the methods have a parameter: it belongs into their names."""
    for key in values.keys() - Experiment.model_fields.keys():
        having = [name for name in methods if name not in BOUNDS and key in get(name).parameters]
        lacking = [f"'{name}'" for name in methods if name not in having]
        if having and lacking:
            verb = "has" if len(lacking) == 1 else "have"
            names = " ".join(_add_parameter(name, key, values[key]) for name in having)
            raise ValueError(
                f"{', '.join(lacking)} {verb} no parameter '{key}': write it with the methods that have it, {names}"
            )


def _add_parameter(name: str, key: str, value: Any) -> str:
    """Return a method's name with a parameter added to the part that has it."""
    parts = [part.set(key, str(value)) if key in part.parameters else part for part in parse(name)]
    return "+".join(part.format_explicit() for part in parts)


def _make_experiment(method: str, values: dict[str, Any]) -> Experiment:
    try:
        return Experiment.of(values | {"method": method})
    except ValueError as error:
        raise ValueError(f"{error}{suggest(method, list(BOUNDS))}") from None


def parse_seeds(text: str) -> list[int]:
    """Return the seeds that a text names: `5` means 0 to 4, `3-7` is a range, `1,4` a list.

    >>> parse_seeds("3"), parse_seeds("3-5"), parse_seeds("1,4")
    ([0, 1, 2], [3, 4, 5], [1, 4])
    """
    seeds: Sequence[int]
    try:
        if "," in text:
            seeds = [int(part) for part in text.split(",")]
        else:
            first, last = (int(part) for part in text.split("-")) if "-" in text else (0, int(text) - 1)
            seeds = range(first, last + 1)
    except ValueError:
        seeds = []
    if seeds[MAX_SEEDS:]:
        raise ValueError(f"seeds = {text}: use at most {MAX_SEEDS:,} seeds")
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError(f"seeds = {text}: use a number of seeds such as 5, a range such as 3-7, or a list such as 1,4")
    return list(seeds)
