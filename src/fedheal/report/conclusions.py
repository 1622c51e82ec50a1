"""What may be concluded from a comparison, in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedheal.report.rows import BOUNDS, Row
from fedheal.sampling import note_on_test_sets
from fedheal.statistics import Comparison, compare_metrics, seeds_needed, verdict

METRICS = ("avg", "std")
ALPHA = 0.05


def sentences(found: Sequence[Row], reference: str | None = None) -> list[str]:
    """Every method against the reference (the first one if not named), then what the test sets' sizes allow."""
    methods: dict[str, dict[int, dict[str, float]]] = {}
    for row in found:
        if row.method not in BOUNDS:
            methods.setdefault(row.method, {})[row.seed] = dict(row.domains)
    if reference is not None and reference not in methods:
        raise ValueError(f"reference = {reference}: the methods are {', '.join(methods)}")
    said = []
    if len(methods) > 1:
        first = reference or ("fedavg" if "fedavg" in methods else next(iter(methods)))
        compared = [c for group in compare_metrics(methods, first, METRICS).values() for c in group]
        hopeless = [c for c in compared if c.smallest_p_adjusted > ALPHA]
        said += _too_few(hopeless) + [verdict(c, ALPHA) for c in compared if c not in hopeless]
    return [*said, *_test_sets(found)]


def _too_few(compared: Sequence[Comparison]) -> list[str]:
    """One sentence for all comparisons that no data could decide, and what was observed."""
    if not compared:
        return []
    seeds, least = min(c.n for c in compared), max(c.smallest_p_adjusted for c in compared)
    many = max(c.comparisons for c in compared)
    observed = "; ".join(f"{c.a} {c.mean:+.2f} in {(c.metric or '').upper()}" for c in compared)
    return [
        f"{seeds} {'seed' if seeds == 1 else 'seeds'} cannot show a difference at {ALPHA} with a two-sided paired test "
        f"corrected for {many} comparisons, whatever the data (smallest possible p = {least:.2g}); "
        f"{seeds_needed(ALPHA, many)} or more can.",
        f"Observed against {compared[0].b}, in points: {observed}.",
    ]


def _test_sets(found: Sequence[Row]) -> list[str]:
    if not found:
        return []
    sizes = found[0].summaries[0]["test_sizes"]
    rows = [row for row in found if row.method not in BOUNDS] or list(found)
    accuracy = {domain: float(np.mean([row.domains[domain] for row in rows])) for domain in sizes}
    note = note_on_test_sets(accuracy, sizes)
    return [note] if note else []
