"""From the rounds of runs to what figures show: per method, means and spreads over seeds by round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedheal.core.metrics import fairness
from fedheal.report.rounds import rounds_of
from fedheal.report.rows import BOUNDS, EVENNESS, Row

Floats = NDArray[np.float64]
PHASES = ("train", "aggregate", "evaluate")


@dataclass(frozen=True)
class Band:
    """A mean over seeds by round, and the standard deviation (ddof=1; zeros for one seed)."""

    mean: Floats
    sd: Floats


@dataclass(frozen=True)
class Series:
    """One method's rounds. What no run recorded is empty."""

    method: str
    seeds: int
    rounds: Floats  # the evaluated ones
    curves: Mapping[str, Band]  # by domain, AVG, STD, worst
    all_rounds: Floats
    weights: Mapping[str, Floats]  # by domain: its clients' share of the weight, by round
    kept: Mapping[str, Floats]  # by domain: mean kept share of its clients' entries, by round
    kept_by_tensor: Mapping[str, Floats]
    consistency: Mapping[str, Floats] = field(default_factory=dict)  # by domain: shares of entries, in equal bins
    seconds: Mapping[str, float] = field(default_factory=dict)  # a run's, by phase


def series(rows: Sequence[Row]) -> list[Series]:
    """One a method, in the order of the rows; bounds, which are groups of runs, have none."""
    methods: dict[str, list[Row]] = {}
    for row in rows:
        if row.method not in BOUNDS:
            methods.setdefault(row.method, []).append(row)
    return [_series(method, group) for method, group in methods.items()]


def _series(method: str, group: Sequence[Row]) -> Series:
    runs = [(row.summaries[0], rounds_of(Path(str(row.summaries[0].get("folder", ""))))) for row in group]
    domains = list(group[0].domains)
    judged = _in_common([[record for record in rounds if record.get("domains")] for _, rounds in runs])
    client_domains = [dict(summary.get("trained", {})) for summary, _ in runs]
    every = _in_common([rounds for _, rounds in runs])
    return Series(
        method,
        len(runs),
        np.array([record["round"] for record in judged[0]], np.float64) if runs else np.zeros(0),
        _curves(judged, domains) if judged and judged[0] else {},
        np.array([record["round"] for record in every[0]], np.float64) if runs else np.zeros(0),
        _by_domain(every, client_domains, domains, lambda record: record.get("weights"), "sum"),
        _by_domain(every, client_domains, domains, lambda record: (record.get("report") or {}).get("kept"), "mean"),
        _by_tensor(every),
        _consistency([summary for summary, _ in runs], client_domains, domains),
        {
            phase: float(np.mean([summary.get("seconds", {}).get(phase, 0.0) for summary, _ in runs]))
            for phase in PHASES
        },
    )


def _in_common(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[Mapping[str, Any]]]:
    """Of each run, the rounds that all have: a mean over seeds is one of the same round."""
    shared = set.intersection(*({record["round"] for record in run} for run in runs)) if runs else set()
    return [[record for record in run if record["round"] in shared] for run in runs]


def _curves(judged: Sequence[Sequence[Mapping[str, Any]]], domains: Sequence[str]) -> dict[str, Band]:
    # In a federation not every domain is judged in every round.
    by_domain = np.array([[[record["domains"].get(d, np.nan) for d in domains] for record in run] for run in judged])
    found = {domain: _band(by_domain[:, :, i]) for i, domain in enumerate(domains)}
    measured = [[fairness(record["domains"]) for record in run] for run in judged]
    for name, key in EVENNESS.items():
        found[name] = _band(np.array([[one[key] for one in run] for run in measured]))
    return found


def _band(values: Floats) -> Band:
    return Band(values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1]))


def _by_domain(
    runs: Sequence[Sequence[Mapping[str, Any]]],
    client_domains: Sequence[Mapping[str, str]],
    domains: Sequence[str],
    get: Any,
    how: str,
) -> dict[str, Floats]:
    """Clients' numbers put together by domain, a line a domain; rounds in which none of its clients came are NaN."""
    found = np.full((len(runs), len(runs[0]) if runs else 0, len(domains)), np.nan)
    place = {domain: i for i, domain in enumerate(domains)}
    for r, (run, home) in enumerate(zip(runs, client_domains, strict=True)):
        for t, record in enumerate(run):
            groups: dict[int, list[float]] = {}
            for client, number in (get(record) or {}).items():
                if home.get(client) in place and number is not None:
                    groups.setdefault(place[home[client]], []).append(float(number))
            for i, numbers in groups.items():
                found[r, t, i] = np.sum(numbers) if how == "sum" else np.mean(numbers)
    return {d: mean_of(found[:, :, i]) for i, d in enumerate(domains) if np.isfinite(found[:, :, i]).any()}


def _by_tensor(runs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Floats]:
    told = [[(record.get("report") or {}).get("kept_by_tensor") or {} for record in run] for run in runs]
    names = list(dict.fromkeys(name for run in told for record in run for name in record))
    return {
        name: mean_of(np.array([[record.get(name, np.nan) for record in run] for run in told], np.float64))
        for name in names
    }


def mean_of(values: Floats) -> Floats:
    """Over seeds, of those that have a number; NaN where none has."""
    counted = np.isfinite(values).sum(axis=0)
    with np.errstate(invalid="ignore"):
        mean: Floats = np.where(counted > 0, np.nansum(values, axis=0) / np.maximum(counted, 1), np.nan)
    return mean


def _consistency(
    summaries: Iterable[Mapping[str, Any]], client_domains: Iterable[Mapping[str, str]], domains: Sequence[str]
) -> dict[str, Floats]:
    groups: dict[str, list[list[float]]] = {}
    for summary, home in zip(summaries, client_domains, strict=True):
        for client, shares in (summary.get("consistency") or {}).items():
            groups.setdefault(home.get(client, ""), []).append(shares)
    return {d: np.mean(np.array(groups[d]), axis=0) for d in domains if d in groups}


def thinned(length: int, most: int) -> list[int]:
    """At most so many positions of a sequence, evenly spread, the first and the last among them.

    >>> thinned(10, 4), thinned(3, 4)
    ([0, 3, 6, 9], [0, 1, 2])
    """
    if length <= most:
        return list(range(length))
    return [int(i) for i in np.unique(np.linspace(0, length - 1, most).round())]


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Those no other beats in both AVG (higher) and STD (lower), by rising STD.

    >>> pareto({"a": (80.0, 10.0), "b": (85.0, 12.0), "c": (79.0, 11.0)})
    ['a', 'b']
    """
    front = [
        name
        for name, (avg, std) in points.items()
        if not any(a >= avg and s <= std and (a, s) != (avg, std) for a, s in points.values())
    ]
    return sorted(front, key=lambda name: points[name][1])
