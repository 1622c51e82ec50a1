"""Plan a comparison: methods x seeds into one folder, paired.

For one seed, every method has the same split, cohorts, batches and initial model. Bounds, which show how far fairness could go,
count as methods: `standalone` trains a model per client, on that client's data only; `centralised` trains one model on all
clients' data; `leave-one-domain-out` runs FedAvg without one domain's clients, for each domain. A bound is a group of ordinary
runs; `report.rows` combines them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedheal.campaign.jobs import Job
from fedheal.core.errors import suggest
from fedheal.data.domains import Domains
from fedheal.methods import get, parse
from fedheal.report.rows import BOUNDS
from fedheal.simulate.build import load_domains, partition_clients
from fedheal.simulate.experiment import Experiment

MAX_SEEDS = 10_000


def plan(
    methods: Sequence[str], seeds: Sequence[int], values: Mapping[str, Any], out: Path, track: str | None = None
) -> list[Job]:
    """Return the runs of a comparison. Raise ValueError if one of them could not be run.

    `values` are fields that all experiments share, `out` is the folder of the run folders, `track` a tracker for every run.
    """
    if not methods:
        raise ValueError("name at least one method to compare, for example: fedheal compare fedavg fedheal")
    if not seeds:
        raise ValueError("a comparison needs at least one seed")
    for field in ("seed", "method", "name"):
        if field in values:
            remedy = f": use --seeds {values[field]}-{values[field]}" if field == "seed" else ""
            raise ValueError(
                f"{field}={values[field]} cannot be set in a comparison, which sets {field} itself{remedy}"
            )
    _check_parameters(methods, values)
    domains = _load_bound_domains(methods, values)
    jobs = []
    for seed in seeds:
        for method in methods:
            experiments = _plan_method(method, dict(values) | {"seed": seed}, domains)
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
            advice = f"write it with the methods that have it, {names}"
            raise ValueError(f"{', '.join(lacking)} {verb} no parameter '{key}': {advice}")


def _add_parameter(name: str, key: str, value: Any) -> str:
    """Return a method's name with a parameter added to the part that has it."""
    parts = [part.set(key, str(value)) if key in part.parameters else part for part in parse(name)]
    return "+".join(part.format_explicit() for part in parts)


def _load_bound_domains(methods: Sequence[str], values: Mapping[str, Any]) -> Domains | None:
    """Return the data that bounds are planned from, or None if no method is a bound. Raise ValueError on conflicting fields."""
    if not set(methods) & set(BOUNDS):
        return None
    for field in ("only", "without", "pool"):
        if field in values:
            raise ValueError(f"{field} cannot be set in a comparison with bounds ({', '.join(BOUNDS)}): bounds set it")
    return load_domains(Experiment.of(dict(values) | {"method": "fedavg"}))


def _plan_method(method: str, values: dict[str, Any], domains: Domains | None) -> list[Experiment]:
    """Return the experiment of a method, or those that make up a bound, for one seed."""
    if method not in BOUNDS:
        try:
            return [Experiment.of(values | {"method": method})]
        except ValueError as error:
            raise ValueError(f"{error}{suggest(method, list(BOUNDS))}") from None
    assert domains is not None
    values, suffix = values | {"method": "fedavg"}, f"-seed{values['seed']}"
    changes: list[dict[str, Any]] = [{"pool": True, "name": f"centralised{suffix}"}]
    if method == "leave-one-domain-out":
        names = [domain.name for domain in domains.domains]
        changes = [{"without": [name], "name": f"without-{name}{suffix}"} for name in names]
    elif method == "standalone":
        clients = [client.id for client in partition_clients(Experiment.of(values), domains)]
        changes = [{"only": [client], "name": f"standalone-{client}{suffix}"} for client in clients]
    return [Experiment.of(values | change) for change in changes]


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
    if text.strip() == "0":
        raise ValueError(
            "seeds = 0: this is a number of seeds; use 1 (or 0-0) for seed 0 alone, 5 for the seeds 0 to 4"
        )
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError(f"seeds = {text}: use a number of seeds such as 5, a range such as 3-7, or a list such as 1,4")
    return list(seeds)
