"""Methods x seeds into one folder, paired: per seed the same split, cohorts, batches and initial model for every method.

Beside methods, a comparison may have *bounds*, which say how far fairness could go: `standalone` (a model per client, of
its own data alone), `centralised` (one model of all clients' data in one place) and `leave-one-domain-out` (for each domain,
FedAvg over the clients of the others). A bound is a group of ordinary runs; `report.rows` puts them together again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedheal.campaign.pool import Job
from fedheal.core.errors import suggest
from fedheal.data.domains import Domains
from fedheal.methods import get, parse
from fedheal.report.rows import BOUNDS
from fedheal.simulate.build import load_domains, partition_clients
from fedheal.simulate.experiment import Experiment

MOST_SEEDS = 10_000


def plan(
    methods: Sequence[str], seeds: Sequence[int], values: Mapping[str, Any], out: Path, track: str | None = None
) -> list[Job]:
    """The runs of a comparison, all validated before the first starts."""
    if not methods:
        raise ValueError("name at least one method to compare, for example: fedheal compare fedavg fedheal")
    if not seeds:
        raise ValueError("a comparison needs at least one seed")
    for field in ("seed", "method", "name"):
        if field in values:
            raise ValueError(f"{field} is what a comparison varies: it cannot be given as {field}={values[field]}")
    for field in ("only", "without", "pool"):
        if field in values and set(methods) & set(BOUNDS):
            raise ValueError(f"{field} is what bounds vary: it cannot be given beside {', '.join(BOUNDS)}")
    _check_parameters(methods, values)
    domains = load_domains(Experiment.of(dict(values) | {"method": "fedavg"})) if set(methods) & set(BOUNDS) else None
    jobs = [
        Job(experiment, out / experiment.folder_name, track)
        for seed in seeds
        for method in methods
        for experiment in _experiments(method, dict(values) | {"seed": seed}, domains)
    ]
    twice = {folder.name for folder, times in Counter(job.folder for job in jobs).items() if times > 1}
    if twice:
        raise ValueError(f"two of the methods are the same: {sorted(twice)[0]}")
    return jobs


def _check_parameters(names: Sequence[str], values: Mapping[str, Any]) -> None:
    """A parameter that only some of the methods have belongs into their names: the others could not be told what it means."""
    for key in values.keys() - Experiment.model_fields.keys():
        takes = {name: name not in BOUNDS and key in get(name).parameters for name in names}
        if any(takes.values()) and not all(takes.values()):
            having = [name for name in names if takes[name]]
            lacking = [f"'{name}'" for name in names if not takes[name]]
            written = " ".join(_written(name, key, values[key]) for name in having)
            has = f"{', '.join(lacking)} {'has' if len(lacking) == 1 else 'have'}"
            raise ValueError(f"{has} no parameter '{key}': write it with the methods that have it, {written}")


def _written(name: str, key: str, value: Any) -> str:
    """A method's name with a parameter behind the part that has it."""
    parts = [part.set(key, str(value)) if key in part.parameters else part for part in parse(name)]
    return "+".join(part.format_explicit() for part in parts)


def _experiments(method: str, values: dict[str, Any], domains: Domains | None) -> list[Experiment]:
    if method in BOUNDS:
        assert domains is not None
        return [Experiment.of(values | {"method": "fedavg"} | part) for part in _parts(method, values, domains)]
    try:
        return [Experiment.of(values | {"method": method})]
    except ValueError as error:
        close = suggest(method, list(BOUNDS))
        raise ValueError(f"{error}{close}") from None


def _parts(bound: str, values: Mapping[str, Any], domains: Domains) -> list[dict[str, Any]]:
    seed = values["seed"]
    if bound == "centralised":
        return [{"pool": True, "name": f"centralised-seed{seed}"}]
    if bound == "leave-one-domain-out":
        names = [domain.name for domain in domains.domains]
        return [{"without": [name], "name": f"without-{name}-seed{seed}"} for name in names]
    clients = partition_clients(Experiment.of(dict(values) | {"method": "fedavg"}), domains)
    return [{"only": [c.id], "name": f"standalone-{c.id}-seed{seed}"} for c in clients]


def seeds_of(text: str) -> list[int]:
    """`5` is the seeds 0 to 4, `3-7` and `1,4` say which.

    >>> seeds_of("3"), seeds_of("3-5"), seeds_of("1,4")
    ([0, 1, 2], [3, 4, 5], [1, 4])
    """
    try:
        if "," in text:
            found: Sequence[int] = [int(part) for part in text.split(",")]
        else:
            first, last = (int(part) for part in text.split("-")) if "-" in text else (0, int(text) - 1)
            found = range(first, last + 1)
    except ValueError:
        found = []
    if found[MOST_SEEDS:]:
        raise ValueError(f"seeds = {text}: {MOST_SEEDS:,} are the most")
    if not found or len(set(found)) != len(found) or min(found) < 0:
        raise ValueError(f"seeds = {text}: use a number of seeds such as 5, a range such as 3-7, or a list such as 1,4")
    return list(found)
