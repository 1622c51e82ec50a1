"""From run folders to rows: one method (or bound) and one seed, with its accuracy per domain."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedheal.core.metrics import fairness
from fedheal.runs.folder import read_result, read_toml
from fedheal.runs.schema import FREE

BOUNDS = {
    "standalone": "a model per client, of its own data alone; judged on its own domain, mean over the domain's clients",
    "centralised": "one model of all clients' data in one place",
    "leave-one-domain-out": "each domain judged with a model of the other domains' clients (FedAvg)",
}
EVENNESS = {"AVG": "avg", "STD": "std", "worst": "worst"}  # columns after the domains, as `fairness` calls them
OF_BOUNDS = frozenset({"only", "without", "pool"})  # settings that make a run a part of a bound
OF_ALL = "fedavg"  # the method of every bound


@dataclass(frozen=True)
class Row:
    """One method and seed. `domains`: accuracy in percent; `evenness`: AVG, STD, worst and the like over them."""

    method: str
    seed: int
    domains: Mapping[str, float]
    evenness: Mapping[str, float]
    validation: Mapping[str, Any] | None = None
    summaries: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)


# Fields that a report needs, those of `validation` where it is there.
REPORT_FIELDS = (
    "method", "data", "seed", "rounds", "domains", "clients", "trained", "test_sizes", "only", "without", "pool",
    *(f"validation.{name}" for name in EVENNESS.values()),
)  # fmt: skip


def find(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The results of all finished runs in or under these folders, each once; each knows its `folder`."""
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            near = sorted(str(one) for one in path.parent.glob(f"{glob.escape(path.name)}*")) if path.name else []
            raise ValueError(f"{path} does not exist{f'; there is {near[0]}' if near else ''}")
        folders |= dict.fromkeys(sorted(found.parent for found in path.rglob("result.json")))
    return [load_summary(folder) for folder in folders]


def load_summary(folder: Path, required: Iterable[str] = ()) -> dict[str, Any]:
    """Return the result of a finished run, with its `folder`. Raise ValueError if a field that a report needs is missing."""
    return read_result(folder, {*REPORT_FIELDS, *required}) | {"folder": str(folder)}


def data_notes(summaries: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is special about the runs' data, such as a stand-in for a domain that cannot be had; each thing once."""
    return list(dict.fromkeys(note for summary in summaries for note in summary.get("data_notes", ())))


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
    """One row a method and seed, in the order they come; the runs of a bound become one row once all are there.

    Until then, and where a part of it comes twice, each of its runs is a row under a name of its own.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for summary in summaries:
        bound = bound_of(summary)
        groups.setdefault((bound, _shared(summary) if bound else ""), []).append(summary)
    return [row for (bound, _), group in groups.items() for row in _rows(bound, group)]


def bound_of(summary: Mapping[str, Any]) -> str:
    """The bound that a run is a part of; empty for a run of a method."""
    if summary["method"] != OF_ALL:
        return ""
    if summary["pool"]:
        return "" if summary["only"] or summary["without"] else "centralised"
    if not summary["only"] and len(summary["without"]) == 1 and summary["without"][0] in summary["domains"]:
        return "leave-one-domain-out"
    if not summary["without"] and len(summary["only"]) == 1 and summary["only"][0] in summary["trained"]:
        return "standalone"
    return ""


def called(summary: Mapping[str, Any]) -> str:
    """The name of a run's own row: its method, and who took part where that was not everyone."""
    words = [f"{key}={','.join(map(str, summary[key]))}" for key in ("only", "without") if summary[key]]
    return " ".join([str(summary["method"]), *words, *(["pool=true"] if summary["pool"] else [])])


def described(summary: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """A run's settings, and whether they are complete: what is not there is not set."""
    folder = Path(str(summary.get("folder", "")))
    for name, complete in (("experiment.toml", True), ("federation.toml", False)):
        if (folder / name).is_file():
            return read_toml(folder / name), complete
    return {key: summary[key] for key in ("method", "data", "seed", "rounds") if key in summary}, False


def _shared(summary: Mapping[str, Any]) -> str:
    """What the parts of one bound have in common: data, seed, rounds and all other settings that decide a result."""
    said = {key: summary[key] for key in ("data", "seed", "rounds")} | described(summary)[0]
    return json.dumps({k: v for k, v in said.items() if k not in FREE | OF_BOUNDS}, sort_keys=True, default=str)


def _rows(bound: str, group: Sequence[Mapping[str, Any]]) -> list[Row]:
    if bound == "leave-one-domain-out":
        whole = _left_out(group)
    elif bound == "standalone":
        whole = _standalone(group)
    else:
        whole = {}
    if not whole:
        return [
            Row(bound if bound == "centralised" else called(s), int(s["seed"]), s["domains"], fairness(s["domains"]),
                s.get("validation"), (s,))
            for s in group
        ]  # fmt: skip
    domains = {domain: whole[domain] for domain in group[0]["domains"]}
    return [Row(bound, int(group[0]["seed"]), domains, fairness(domains), None, tuple(group))]


def _left_out(group: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Each domain's accuracy in the run without it; nothing unless there is one run for each."""
    left_out = [s["without"][0] for s in group]
    if sorted(left_out) != sorted(group[0]["domains"]):
        return {}
    return {domain: float(s["domains"][domain]) for domain, s in zip(left_out, group, strict=True)}


def _standalone(group: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Each domain's accuracy, mean over its clients' own runs; nothing unless there is one run for each client."""
    alone = [s["only"][0] for s in group]
    client_domains = [s["trained"][client] for client, s in zip(alone, group, strict=True)]
    if sorted(alone) != sorted(group[0]["clients"]) or set(client_domains) != set(group[0]["domains"]):
        return {}
    by_home: dict[str, list[float]] = {}
    for home, s in zip(client_domains, group, strict=True):
        by_home.setdefault(home, []).append(float(s["domains"][home]))
    return {home: float(np.mean(values)) for home, values in by_home.items()}
