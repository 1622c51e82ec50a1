"""From the rounds of runs to what figures show: per method, means and spreads over seeds by round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedheal.analysis.standard_error import fairness_errors, mean_error, sampling_error
from fedheal.core.arrays import Floats
from fedheal.core.clock import PHASES
from fedheal.core.errors import format_count
from fedheal.core.metrics import fairness
from fedheal.report.comparability import list_methods
from fedheal.report.rows import FAIRNESS_COLUMNS, UNSEEN, Row, rename_domain
from fedheal.report.seed_levels import count_independent
from fedheal.runs.folder import find_damaged_line, read_result, read_rounds
from fedheal.runs.schema import RoundRecord

Rounds = Sequence[RoundRecord]  # of one run


@dataclass(frozen=True)
class Band:
    """A mean over seeds by round, and its standard error: the spread over seeds and the drawing of the test images."""

    mean: Floats
    error: Floats


@dataclass(frozen=True)
class Series:
    """One method's rounds. What no run recorded is empty."""

    method: str
    rounds: Floats  # those with an evaluation
    curves: Mapping[str, Band]  # by domain, AVG, STD, worst
    all_rounds: Floats
    weights: Mapping[str, Floats]  # by domain: its clients' share of the weight, by round
    kept_by_tensor: Mapping[str, Floats]  # mean kept fraction of the clients' updates, by round
    consistency: Mapping[str, Floats] = field(default_factory=dict)  # by domain: fractions of entries, in equal bins
    seconds: Mapping[str, float] = field(default_factory=dict)  # per run, by phase
    by_class: Mapping[str, Floats] = field(default_factory=dict)  # by domain: correct and all test examples, per class


def read_complete_rounds(folder: Path) -> list[RoundRecord]:
    """Return the rounds of a run. Raise ValueError if a finished one lacks some, or if one comes again.

    A federation may have more rounds than its result.
    """
    path, records = folder / "rounds.jsonl", read_rounds(folder)
    for line, (before, record) in enumerate(pairwise(records), 2):
        if record.round <= before.round:
            raise ValueError(
                f"{path}: line {line} is round {record.round}, after round {before.round}: restore the file, or remove the line"
            )
    expected = read_result(folder, ["rounds"])["rounds"] if (folder / "result.json").is_file() else 0
    if len(records) < expected:
        damaged = find_damaged_line(folder)
        problem = f"has {format_count(len(records), 'round')}" if path.exists() else "is missing"
        problem += f" and is damaged in line {damaged}" if damaged else ""
        raise ValueError(
            f"{path} {problem}, but the run has {format_count(expected, 'round')}: restore the file, or report without "
            "figures (fedheal report FOLDER)"
        )
    return records


def build_series(rows: Sequence[Row]) -> list[Series]:
    """Return one series per method, in the order of the rows. Groups of runs have none: bounds and unseen domains."""
    rows = [row for row in rows if row.evaluation != UNSEEN]
    return [_build_method_series(name, [row for row in rows if row.method == name]) for name in list_methods(rows)]


def _build_method_series(method: str, rows: Sequence[Row]) -> Series:
    summaries = [row.summaries[0] for row in rows]
    runs = [read_complete_rounds(Path(row.folder)) for row in rows]
    domains = list(rows[0].domains)
    client_domains = [dict(summary.get("trained", {})) for summary in summaries]
    all_rounds = _select_common_rounds(runs)
    evaluated = _select_common_rounds([[record for record in run if record.domains] for run in runs])
    seconds = [summary.get("seconds", {}) for summary in summaries]
    independent = count_independent([row.seeds for row in rows])
    return Series(
        method=method,
        rounds=np.array([record.round for record in evaluated[0]], np.float64),
        curves=_build_curves(evaluated, summaries[0]["test_sizes"], domains, independent) if evaluated[0] else {},
        all_rounds=np.array([record.round for record in all_rounds[0]], np.float64),
        weights=_sum_weights(all_rounds, client_domains, domains),
        kept_by_tensor=_collect_kept_by_tensor(all_rounds),
        consistency=_average_consistency(summaries, client_domains, domains),
        by_class=sum_by_class([row.collect("by_class") for row in rows], domains),
        seconds={phase: float(np.mean([by_phase.get(phase, 0.0) for by_phase in seconds])) for phase in PHASES},
    )


def _select_common_rounds(runs: Sequence[Rounds]) -> list[Rounds]:
    """Return, for each run, the rounds that all runs have: a mean over seeds is of the same round."""
    common = set.intersection(*({record.round for record in run} for run in runs))
    return [[record for record in run if record.round in common] for run in runs]


def _build_curves(
    runs: Sequence[Rounds], sizes: Mapping[str, float], domains: Sequence[str], independent: int
) -> dict[str, Band]:
    # In a federation not every domain is evaluated in every round.
    found = [[{rename_domain(d): x for d, x in (record.domains or {}).items()} for record in run] for run in runs]
    accuracy = np.array([[[by_domain.get(d, np.nan) for d in domains] for by_domain in run] for run in found])
    mean = accuracy.mean(axis=0).T  # by domain and round
    sampling = np.array([sampling_error(x, sizes.get(d, 0)) for d, x in zip(domains, mean, strict=True)])
    curves = {
        d: Band(mean[i], mean_error(accuracy[:, :, i], np.nan_to_num(sampling[i]), independent))
        for i, d in enumerate(domains)
    }
    metrics = [[fairness(record.domains or {}) for record in run] for run in runs]
    present = np.where(np.isfinite(mean), mean, mean_ignoring_nan(mean))
    errors = fairness_errors(present, np.nan_to_num(sampling))
    for column, key in FAIRNESS_COLUMNS.items():
        values = np.array([[x[key] for x in run] for run in metrics])
        curves[column] = Band(values.mean(axis=0), mean_error(values, errors[key], independent))
    return curves


def sum_by_class(runs: Sequence[Mapping[str, Any]], domains: Sequence[str]) -> dict[str, Floats]:
    """Return, by domain, the correct and all test examples of each class over the runs that counted them."""
    sums = {}
    for domain in domains:
        counts = [np.array(run[domain], np.float64) for run in runs if run.get(domain)]
        if counts:
            padded = [np.pad(x, ((0, max(map(len, counts)) - len(x)), (0, 0))) for x in counts]
            sums[domain] = np.sum(padded, axis=0)
    return sums


def _sum_weights(
    runs: Sequence[Rounds], client_domains: Sequence[Mapping[str, str]], domains: Sequence[str]
) -> dict[str, Floats]:
    """Sum the clients' weights by domain and round; NaN where none of its clients took part."""
    sums = np.full((len(domains), len(runs), len(runs[0])), np.nan)
    for r, (run, domain_of) in enumerate(zip(runs, client_domains, strict=True)):
        for t, record in enumerate(run):
            for i, domain in enumerate(domains):
                weights = [w for client, w in record.weights.items() if domain_of.get(client) == domain]
                sums[i, r, t] = np.sum(weights) if weights else np.nan
    return {domain: mean_ignoring_nan(sums[i]) for i, domain in enumerate(domains) if np.isfinite(sums[i]).any()}


def _collect_kept_by_tensor(runs: Sequence[Rounds]) -> dict[str, Floats]:
    kept = [[record.report.get("kept_by_tensor") or {} for record in run] for run in runs]
    names = dict.fromkeys(name for run in kept for record in run for name in record)
    return {
        name: mean_ignoring_nan(np.array([[record.get(name, np.nan) for record in run] for run in kept], np.float64))
        for name in names
    }


def mean_ignoring_nan(values: Floats) -> Floats:
    """Return the mean over the first axis, of those that have a number; NaN where none has."""
    count = np.isfinite(values).sum(axis=0)
    with np.errstate(invalid="ignore"):
        mean: Floats = np.where(count > 0, np.nansum(values, axis=0) / np.maximum(count, 1), np.nan)
    return mean


def _average_consistency(
    summaries: Iterable[Mapping[str, Any]], client_domains: Iterable[Mapping[str, str]], domains: Sequence[str]
) -> dict[str, Floats]:
    groups: dict[str, list[list[float]]] = {}
    for summary, domain_of in zip(summaries, client_domains, strict=True):
        for client, histogram in (summary.get("consistency") or {}).items():
            groups.setdefault(domain_of.get(client, ""), []).append(histogram)
    return {d: np.mean(np.array(groups[d]), axis=0) for d in domains if d in groups}


def pick_evenly(length: int, limit: int) -> list[int]:
    """Return at most `limit` evenly spaced positions of a sequence, including the first and the last.

    >>> pick_evenly(10, 4), pick_evenly(3, 4)
    ([0, 3, 6, 9], [0, 1, 2])
    """
    if length <= limit:
        return list(range(length))
    return [int(i) for i in np.unique(np.linspace(0, length - 1, limit).round())]


def find_pareto_front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the names that no other beats in both AVG (higher) and STD (lower), by rising STD.

    >>> find_pareto_front({"a": (80.0, 10.0), "b": (85.0, 12.0), "c": (79.0, 11.0)})
    ['a', 'b']
    """

    def is_beaten(avg: float, std: float) -> bool:
        return any(a >= avg and s <= std and (a, s) != (avg, std) for a, s in points.values())

    return sorted((name for name in points if not is_beaten(*points[name])), key=lambda name: points[name][1])
