"""Conclusions from a comparison of runs on one data set, in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedheal.analysis.paired_tests import Comparison, compare_metrics, seeds_needed, verdict
from fedheal.analysis.standard_error import note_on_test_sets
from fedheal.report.comparability import choose_reference, select_comparable
from fedheal.report.rows import BOUNDS, Row

Accuracies = dict[int, dict[str, float]]  # by seed and domain
METRICS = ("avg", "std")
ALPHA = 0.05
LEADERS: tuple[tuple[str, str, Any, str], ...] = (
    ("highest AVG", "avg", max, " %"), ("lowest STD", "std", min, " points"), ("best worst domain", "worst", max, " %")
)  # fmt: skip


def conclude(rows: Sequence[Row], reference: str | None = None) -> list[str]:
    """Compare every method with the reference (by default FedAvg or the first), and name small test sets."""
    reference = choose_reference(rows, reference)
    methods = _group_by_method(select_comparable(rows, reference))
    unpaired = [name for name, seeds in methods.items() if not seeds.keys() & methods[reference].keys()]
    sentences = [_describe_unpaired(name, reference) for name in unpaired]
    methods = {name: seeds for name, seeds in methods.items() if name not in unpaired}
    if len(methods) > 1:
        comparisons = [c for group in compare_metrics(methods, reference, METRICS).values() for c in group]
        hopeless = [c for c in comparisons if c.smallest_p_adjusted > ALPHA]
        sentences += _describe_too_few_seeds(hopeless) + [verdict(c, ALPHA) for c in comparisons if c not in hopeless]
    return [*sentences, *_describe_test_sets(rows)]


def describe_leaders(rows: Sequence[Row], reference: str | None = None) -> list[str]:
    """Name the reference's worst domain, and the method with the best mean in each metric; no claim beyond these runs."""
    reference = choose_reference(rows, reference)
    comparable = select_comparable(rows, reference)
    methods = _group_by_method(comparable)
    if not methods:
        return []
    seeds = list(methods[reference].values())
    by_domain = {domain: float(np.mean([accuracy[domain] for accuracy in seeds])) for domain in seeds[0]}
    worst = min(by_domain, key=by_domain.__getitem__)
    average = float(np.mean(list(by_domain.values())))
    sentences = [
        f"With {reference}, {worst} has the lowest accuracy: {by_domain[worst]:.1f} %, "
        f"{average - by_domain[worst]:.1f} points below the mean over domains."
    ]
    if len(methods) > 1:
        # Means over seeds, as in the table: the STD of mean accuracies is another number, and a smaller one.
        leaders = []
        for title, key, pick, unit in LEADERS:
            means = {m: float(np.mean([row.fairness[key] for row in comparable if row.method == m])) for m in methods}
            name = pick(means, key=means.__getitem__)
            leaders.append(f"{title} {name} ({means[name]:.1f}{unit})")
        sentences.append(f"Best in these runs: {', '.join(leaders)}.")
    return sentences


def describe_gains(rows: Sequence[Row], reference: str | None = None) -> list[str]:
    """Say for every method but the reference which domain gains and which loses most, and whether it is within noise."""
    reference = choose_reference(rows, reference)
    methods = _group_by_method(select_comparable(rows, reference))
    test_sizes = rows[0].summaries[0]["test_sizes"] if rows else {}
    sentences = []
    for name in [name for name in methods if name != reference]:
        seeds, base = methods[name], methods[reference]
        paired = sorted(set(seeds) & set(base))
        if not paired:
            sentences.append(_describe_unpaired(name, reference))
            continue
        changes = {d: np.array([seeds[s][d] - base[s][d] for s in paired]) for d in seeds[paired[0]]}
        extremes = [pick(changes, key=lambda d: float(changes[d].mean())) for pick in (max, min)]
        parts = []
        for domain in dict.fromkeys(extremes):
            if len(paired) > 1:
                error = float(changes[domain].std(ddof=1)) / len(paired) ** 0.5
            else:  # one seed: the error from sampling the test images alone
                shares = [accuracy[paired[0]][domain] / 100 for accuracy in (seeds, base)]
                error = 100 * float(sum(p * (1 - p) / max(test_sizes.get(domain, 0), 1) for p in shares)) ** 0.5
            parts.append(_describe_change(domain, float(changes[domain].mean()), error))
        sentences.append(f"{name} against {reference}: {'; '.join(parts)}.")
    return sentences


def _describe_change(domain: str, change: float, error: float) -> str:
    verb = "gains" if change > 0 else "loses" if change < 0 else "changes by"
    noise = "" if abs(change) > 2 * error else ", which is within noise"
    return f"{domain} {verb} {abs(change):.1f} points (standard error {error:.1f}{noise})"


def _describe_unpaired(name: str, reference: str) -> str:
    return f"{name} and {reference} share no seed: they are not compared."


def _group_by_method(rows: Sequence[Row]) -> dict[str, Accuracies]:
    methods: dict[str, Accuracies] = {}
    for row in rows:
        if row.method not in BOUNDS:
            methods.setdefault(row.method, {})[row.seed] = dict(row.domains)
    return methods


def _describe_too_few_seeds(comparisons: Sequence[Comparison]) -> list[str]:
    """Describe in one sentence all comparisons that no data could decide, then list what was observed."""
    if not comparisons:
        return []
    seeds, smallest_p = min(c.n for c in comparisons), max(c.smallest_p_adjusted for c in comparisons)
    family_size = max(c.comparisons for c in comparisons)
    observed = "; ".join(f"{c.a} {c.mean:+.2f} in {(c.metric or '').upper()}" for c in comparisons)
    return [
        f"{seeds} {'seed' if seeds == 1 else 'seeds'} cannot show a difference at {ALPHA} with a two-sided paired test "
        f"corrected for {family_size} comparisons, whatever the data (smallest possible p = {smallest_p:.2g}); "
        f"{seeds_needed(ALPHA, family_size)} or more can.",
        f"Observed against {comparisons[0].b}, in points: {observed}.",
    ]


def _describe_test_sets(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    sizes = rows[0].summaries[0]["test_sizes"]
    rows = [row for row in rows if row.method not in BOUNDS] or rows
    accuracy = {domain: float(np.mean([row.domains[domain] for row in rows])) for domain in sizes}
    return [note_on_test_sets(accuracy, sizes)]
