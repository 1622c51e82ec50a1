"""Plan a comparison: methods x seeds into one folder, paired.

For one seed, every method has the same split, cohorts, batches and initial model. With `vary`, the split, the
initial model or the batches have several seeds each, in all combinations, for variance components.

Bounds show how far fairness could go, and count as methods. `standalone` trains a model per client, on that client's
data only. `centralised` trains one model on all clients' data. `leave-one-domain-out` runs FedAvg without one domain's
clients, for each domain. A bound is a group of ordinary runs, and `report.rows` combines them.

With `evaluate=unseen` every method is run once for each domain, without its clients, and evaluated on that domain.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

from fedheal.campaign.jobs import Job
from fedheal.core.checks import check_type
from fedheal.core.errors import suggest
from fedheal.core.rng import SOURCES
from fedheal.data.domains import Domains
from fedheal.methods import get, parse
from fedheal.report.rows import BOUNDS, UNSEEN
from fedheal.simulate.build import load_domains, partition_clients
from fedheal.simulate.experiment import Experiment

MAX_SEEDS = 10_000
DEFAULT_SEEDS = 8
VARY_REMEDY = "give each of split, init, batch a number of seeds, a range or a list, as in split=10,init=3"
SeedFields = Mapping[str, int]  # such as {"split_seed": 0, "init_seed": 2}


def plan(
    methods: Sequence[str],
    seeds: Sequence[int | SeedFields],
    values: Mapping[str, Any],
    out: Path,
    track: str | None = None,
) -> list[Job]:
    """Return the runs of a comparison. Raise ValueError if one of them could not be run.

    `seeds` are seeds, or fields such as `{"split_seed": 0, "init_seed": 2}`. `values` are fields that all experiments
    share, `out` is the folder of the run folders, and `track` is a tracker for every run.
    """
    if not methods:
        raise ValueError("name at least one method to compare, for example: fedheal compare fedavg fedheal")
    if not seeds:
        raise ValueError("a comparison needs at least one seed")
    fields = [{"seed": seed} if isinstance(seed, int) else dict(seed) for seed in seeds]
    for field in (*fields[0], "method", "name"):
        if field in values:
            remedy = f": use --seeds {values[field]}-{values[field]}" if field == "seed" else ""
            raise ValueError(
                f"{field}={values[field]} cannot be set in a comparison, which sets {field} itself{remedy}"
            )
    _check_parameters(methods, values)
    domains = _load_planned_domains(methods, values)
    jobs: list[Job] = []
    planned: dict[Path, str] = {}  # folder -> method
    for own in fields:
        for method in methods:
            for experiment in _plan_method(method, dict(values) | own, domains):
                folder = out / experiment.folder_name
                if folder in planned:
                    other = planned[folder]
                    same = f"'{other}' is given twice" if other == method else f"'{other}' and '{method}' are the same"
                    raise ValueError(f"{same}: name each method once")
                planned[folder] = method
                jobs.append(Job(experiment, folder, track))
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


def _load_planned_domains(methods: Sequence[str], values: Mapping[str, Any]) -> Domains | None:
    """Return the data that bounds and unseen domains are planned from, None without such. Raise ValueError on conflicts."""
    bounds = [method for method in methods if method in BOUNDS]
    if values.get("evaluate") == UNSEEN:
        if bounds:
            advice = "leave it out; fedavg has the numbers of leave-one-domain-out"
            raise ValueError(f"'{bounds[0]}' cannot be compared with evaluate=unseen: {advice}")
        return load_domains(Experiment.of(dict(values) | {"method": "fedavg"}))
    if not bounds:
        return None
    for field in ("only", "without", "pool"):
        if field in values:
            raise ValueError(f"{field} cannot be set in a comparison with bounds ({', '.join(BOUNDS)}): bounds set it")
    return load_domains(Experiment.of(dict(values) | {"method": "fedavg"}))


def _plan_method(method: str, values: dict[str, Any], domains: Domains | None) -> list[Experiment]:
    """Return the experiment of a method, or the experiments that make up a bound, for one seed."""
    if method not in BOUNDS:
        try:
            return expand_unseen(values | {"method": method}, domains)
        except ValueError as error:
            names_bound = not BOUNDS.keys().isdisjoint(re.split(r"[+:]", method))  # then the error says so
            raise ValueError(f"{error}{'' if names_bound else suggest(method, list(BOUNDS))}") from None
    assert domains is not None
    values = values | {"method": "fedavg"}
    suffix = f"-{Experiment.of(values).seed_name}"
    changes: list[dict[str, Any]] = [{"pool": True, "name": f"centralised{suffix}"}]
    if method == "leave-one-domain-out":
        names = _list_left_out(method, values.get("data", "embedded"), domains)
        changes = [{"without": [name], "name": f"without-{name}{suffix}"} for name in names]
    elif method == "standalone":
        clients = [client.id for client in partition_clients(Experiment.of(values), domains)]
        changes = [{"only": [client], "name": f"standalone-{client}{suffix}"} for client in clients]
    return [Experiment.of(values | change) for change in changes]


def expand_unseen(values: Mapping[str, Any], domains: Domains | None = None) -> list[Experiment]:
    """Return the experiment of these fields or, with `evaluate=unseen`, one for each domain, which leaves that domain out.

    `domains` are the experiment's data, if they are loaded already.
    """
    experiment = Experiment.of(values)
    if experiment.evaluate != UNSEEN or experiment.without:
        return [experiment]
    names = _list_left_out("evaluate = 'unseen'", experiment.data, domains or load_domains(experiment))
    name = experiment.folder_name
    return [Experiment.of(dict(values) | {"without": [d], "name": f"{name}-unseen-{d}"}) for d in names]


def _list_left_out(evaluation: str, data: str, domains: Domains) -> list[str]:
    """Return the domains, each of which one run leaves out. Raise ValueError if there is only one."""
    names = [domain.name for domain in domains.domains]
    if len(names) < 2:
        raise ValueError(f"{evaluation}: data '{data}' has only the domain '{names[0]}', and needs two; leave it out")
    return names


def choose_seeds(
    seeds: int | str | Sequence[int] | None, vary: str | Mapping[str, int | str | Sequence[int]] | None
) -> list[SeedFields]:
    """Return the seeds of a comparison as fields of experiments: plain seeds, or all combinations of what is varied.

    >>> choose_seeds(2, None), choose_seeds(None, "split=2,init=3-4")[:2]
    ([{'seed': 0}, {'seed': 1}], [{'split_seed': 0, 'init_seed': 3}, {'split_seed': 0, 'init_seed': 4}])
    """
    if vary is None:
        return [{"seed": seed} for seed in _list_seeds(DEFAULT_SEEDS if seeds is None else seeds)]
    if seeds is not None:
        raise ValueError(f"seeds = {seeds}: vary sets the seeds itself; leave one of the two out")
    given = vary
    if isinstance(vary, str):
        pairs = [word.partition("=") for word in re.split(r",(?=\s*[a-z])", vary)]
        names = [name.strip() for name, _, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError(f"vary = {vary}: a source is given twice; {VARY_REMEDY}")
        for name, (_, _, levels_text) in zip(names, pairs, strict=True):
            if name in SOURCES and not levels_text.strip():
                raise ValueError(f"vary = {vary}: {name} needs a number, as in {name}=5")
        vary = dict(zip(names, (levels for _, _, levels in pairs), strict=True))
    check_type("vary", vary, Mapping, VARY_REMEDY)
    unknown = [str(name) for name in vary if name not in SOURCES]
    if not vary or unknown:
        problem = f"there is no source '{unknown[0]}'{suggest(unknown[0], list(SOURCES))}; " if any(unknown) else ""
        raise ValueError(f"vary = {given}: {problem}{VARY_REMEDY}")
    levels = {f"{source}_seed": _list_seeds(vary[source], f"vary: {source}") for source in SOURCES if source in vary}
    for field, numbers in levels.items():
        if len(numbers) < 2:
            source = field.removesuffix("_seed")
            raise ValueError(
                f"vary: {source} has one seed, but needs two or more to vary: use {source}=5, or {field}=..."
            )
    if math.prod(map(len, levels.values())) > MAX_SEEDS:
        raise ValueError(f"vary = {given}: use at most {MAX_SEEDS:,} combinations")
    return [dict(zip(levels, numbers, strict=True)) for numbers in product(*levels.values())]


def name_design(seeds: Sequence[SeedFields]) -> list[str]:
    """Return what the name of a comparison's folder says of its seeds: nothing, or the sources of chance that are varied."""
    varied = [source for source in SOURCES for fields in seeds[:1] if f"{source}_seed" in fields]
    return [f"vary={','.join(varied)}"] if varied else []


def _list_seeds(seeds: int | str | Sequence[int], name: str = "seeds") -> list[int]:
    check_type(name, seeds, int | str | Iterable, "give a number of seeds, a text such as '3-7', or a list")
    if isinstance(seeds, int | str):
        return parse_seeds(str(seeds), name)
    numbers = list(seeds)
    _check_distinct(numbers, f"{name} = {numbers}")
    return numbers


def parse_seeds(text: str, name: str = "seeds") -> list[int]:
    """Return the seeds that a text names: `5` means 0 to 4, `3-7` is a range, `1,4` a list, which may hold ranges.

    >>> parse_seeds("3"), parse_seeds("3-5"), parse_seeds("1,4"), parse_seeds("0,8-10")
    ([0, 1, 2], [3, 4, 5], [1, 4], [0, 8, 9, 10])
    """
    try:
        is_number = "," not in text and "-" not in text
        ranges = [range(int(text))] if is_number else [_parse_range(item) for item in text.split(",")]
    except ValueError:
        ranges = []
    seeds = list(islice(chain.from_iterable(ranges), MAX_SEEDS + 1))
    if len(seeds) > MAX_SEEDS:
        raise ValueError(f"{name} = {text}: use at most {MAX_SEEDS:,} seeds")
    if text.strip() == "0":
        raise ValueError(
            f"{name} = 0: this is a number of seeds; use 1 (or 0-0) for seed 0 alone, 5 for the seeds 0 to 4"
        )
    for item, numbers in zip(text.split(","), ranges, strict=False):
        if "-" in item and not numbers:
            raise ValueError(
                f"{name} = {text}: the range {item.strip()} ends before it starts; write the smaller seed first, as in 3-7"
            )
    if not ranges or not all(ranges):
        raise ValueError(
            f"{name} = {text}: use a number of seeds such as 5, a range such as 3-7, or a list such as 1,4,8-12"
        )
    _check_distinct(seeds, f"{name} = {text}")
    return seeds


def _check_distinct(seeds: Sequence[int], given: str) -> None:
    """Raise ValueError if a seed is given twice."""
    seed, times = Counter(map(str, seeds)).most_common(1)[0] if seeds else ("", 0)
    if times > 1:
        raise ValueError(f"{given}: {seed} is given twice; name each seed once")


def _parse_range(item: str) -> range:
    """Return the seeds of one item of a list, `4` or `8-12`. Raise ValueError if it is neither."""
    first, dash, last = item.partition("-")
    return range(int(first), int(last if dash else first) + 1)
