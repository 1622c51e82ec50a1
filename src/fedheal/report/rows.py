"""From run folders to rows: one method (or bound) and one seed, with its accuracy per domain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedheal.metrics import fairness
from fedheal.records import read_json

BOUNDS = {
    "standalone": "a model per client, of its own data alone; judged on its own domain, mean over the domain's clients",
    "centralised": "one model of all clients' data in one place",
    "leave-one-domain-out": "each domain judged with a model of the other domains' clients (FedAvg)",
}


@dataclass(frozen=True)
class Row:
    """One method and seed. `domains`: accuracy in percent; `evenness`: AVG, STD, worst and the like over them."""

    method: str
    seed: int
    domains: Mapping[str, float]
    evenness: Mapping[str, float]
    validation: Mapping[str, Any] | None = None
    summaries: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)


NUMBER = (int, float)
# What a report reads of a run's result.json, and what each is.
NEEDED: Mapping[str, type | tuple[type, ...]] = {
    "method": str,
    "data": str,
    "seed": int,
    "rounds": int,
    "domains": dict,
    "clients": dict,
    "trained": dict,
    "test_sizes": dict,
    "only": list,
    "without": list,
    "pool": bool,
}


def find(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The results of all finished runs in or under these folders, each once; each knows its `folder`."""
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        folders |= dict.fromkeys(sorted(found.parent for found in path.rglob("result.json")))
    return [read_result(folder) for folder in folders]


def read_result(folder: Path, needed: Mapping[str, type | tuple[type, ...]] = NEEDED) -> dict[str, Any]:
    """The result of a finished run, which knows its `folder`; one that lacks what is needed is refused by name."""
    path = folder / "result.json"
    try:
        summary = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    for key, kind in needed.items():
        if key not in summary:
            raise ValueError(f"{path}: there is no {key}")
        if not isinstance(summary[key], kind):
            raise ValueError(f"{path}: {key} = {summary[key]!r} is of the wrong kind")
    if not summary["domains"] or not numbers(summary["domains"]):
        raise ValueError(f"{path}: domains = {summary['domains']!r} are no accuracies")
    if not numbers(summary["test_sizes"]) or summary["test_sizes"].keys() != summary["domains"].keys():
        raise ValueError(f"{path}: test_sizes = {summary['test_sizes']!r} are not those of its domains")
    return summary | {"folder": str(folder)}


def numbers(value: object) -> bool:
    """Whether it is a number for each of several names."""
    return isinstance(value, dict) and all(isinstance(number, NUMBER) for number in value.values())


def by_data(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each data set, which must all have its domains: what has others does not compare."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        group = groups.setdefault(str(row.summaries[0]["data"]), [])
        group.append(row)
        if set(row.domains) != set(group[0].domains):
            places = [f"{r.summaries[0].get('folder', '?')} has {', '.join(r.domains)}" for r in (group[0], row)]
            raise ValueError(
                f"the runs on '{row.summaries[0]['data']}' are not over the same domains: {' and '.join(places)}; "
                "report them apart"
            )
    return groups


def rows(summaries: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One row a method and seed, in the order they come; the runs of a bound become one row once all are there."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for summary in summaries:
        groups.setdefault((label(summary), int(summary["seed"])), []).append(summary)
    return [row for (name, seed), group in groups.items() for row in _row(name, seed, group)]


def label(summary: Mapping[str, Any]) -> str:
    """The row a run belongs to: its method's name, or the bound it is a part of."""
    if summary["pool"] and not summary["only"] and not summary["without"]:
        return "centralised"
    if len(summary["without"]) == 1 and summary["without"][0] in summary["domains"]:
        return "leave-one-domain-out"
    if len(summary["only"]) == 1 and summary["only"][0] in summary["trained"]:
        return "standalone"
    return str(summary["method"])


def _row(name: str, seed: int, group: list[Mapping[str, Any]]) -> list[Row]:
    if name == "leave-one-domain-out":
        domains = {s["without"][0]: float(s["domains"][s["without"][0]]) for s in group}
    elif name == "standalone":
        homes = {client: home for s in group for client, home in s["trained"].items()}
        by_home: dict[str, list[float]] = {}
        for s in group:
            home = homes[s["only"][0]]
            by_home.setdefault(home, []).append(float(s["domains"][home]))
        if any(client not in homes for s in group for client in s["clients"]):
            return []  # some clients' runs are still to come
        domains = {home: float(np.mean(values)) for home, values in by_home.items()}
    else:
        return [Row(name, seed, s["domains"], fairness(s["domains"]), s.get("validation"), (s,)) for s in group]
    order = list(group[0]["domains"])
    if set(domains) != set(order):
        return []
    domains = {domain: domains[domain] for domain in order}
    return [Row(name, seed, domains, fairness(domains), None, tuple(group))]
