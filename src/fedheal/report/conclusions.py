"""What may be concluded from a comparison, in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedheal.analysis.paired_tests import Comparison, compare_metrics, seeds_needed, verdict
from fedheal.analysis.standard_error import note_on_test_sets
from fedheal.report import comparability as alike
from fedheal.report.rows import BOUNDS, EVENNESS, Row

Floats = NDArray[np.float64]
METRICS = ("avg", "std")
ALPHA = 0.05


def sentences(found: Sequence[Row], reference: str | None = None) -> list[str]:
    """Every method against the reference (the first one if not named), then what the test sets' sizes allow."""
    first = chosen_reference(found, reference)
    methods = _compared(found, first)
    alone = [name for name, seeds in methods.items() if not seeds.keys() & methods[first].keys()]
    said = [_unpaired(name, first) for name in alone]
    methods = {name: seeds for name, seeds in methods.items() if name not in alone}
    if len(methods) > 1:
        compared = [c for group in compare_metrics(methods, first, METRICS).values() for c in group]
        hopeless = [c for c in compared if c.smallest_p_adjusted > ALPHA]
        said += _too_few(hopeless) + [verdict(c, ALPHA) for c in compared if c not in hopeless]
    return [*said, *_test_sets(found)]


def cautions(found: Sequence[Row], reference: str | None = None) -> list[str]:
    """What sets the runs apart beside method and seed: other settings, other data, another reference than was asked for."""
    first = chosen_reference(found, reference)
    said = alike.cautions(found, first)
    if reference is not None and reference != first:
        data = found[0].summaries[0]["data"]
        said.append(f"There is no run of {reference} on {data}: {first or 'no method'} is the reference there.")
    return said


def check_reference(found: Sequence[Row], reference: str | None) -> None:
    """A reference that was run on none of the data sets is refused."""
    methods = _by_method(found)
    if reference is not None and reference not in methods:
        raise ValueError(f"reference = {reference}: the methods are {', '.join(methods)}")


def chosen_reference(found: Sequence[Row], reference: str | None = None) -> str:
    """The method that the others on this data set are held against: the one named, else FedAvg, else the first; or none."""
    methods = _by_method(found)
    return next((name for name in (reference, "fedavg", *methods) if name in methods), "")


def headline(found: Sequence[Row], reference: str | None = None) -> list[str]:
    """The reference's worst-served domain, and which method is ahead in what; means over seeds, no claim beyond them."""
    first = chosen_reference(found, reference)
    same = alike.comparable(found, first)
    methods = _by_method(same)
    if not methods:
        return []
    by_domain = _means(methods[first])
    worst = min(by_domain, key=lambda d: by_domain[d])
    average = float(np.mean(list(by_domain.values())))
    said = [
        f"With {first}, {worst} is served worst: {by_domain[worst]:.1f} %, {average - by_domain[worst]:.1f} points below the "
        f"mean over domains."
    ]
    if len(methods) > 1:
        measured = {name: _evenness([row for row in same if row.method == name]) for name in methods}
        ahead = [
            (words, pick(measured, key=lambda name: measured[name][key]), key, unit)
            for words, key, pick, unit in (
                ("highest AVG", "avg", max, " %"),
                ("lowest STD", "std", min, " points"),
                ("best worst domain", "worst", max, " %"),
            )
        ]
        listed = ", ".join(f"{words} {name} ({measured[name][key]:.1f}{unit})" for words, name, key, unit in ahead)
        said.append(f"Ahead, as far as these runs show: {listed}.")
    return said


def _evenness(rows: Sequence[Row]) -> dict[str, float]:
    """Means over seeds, as a table has them: the spread of mean accuracies is another number, and a smaller one."""
    return {key: float(np.mean([row.evenness[key] for row in rows])) for key in EVENNESS.values()}


def _means(seeds: dict[int, dict[str, float]]) -> dict[str, float]:
    domains = next(iter(seeds.values()))
    return {domain: float(np.mean([accuracy[domain] for accuracy in seeds.values()])) for domain in domains}


def gains(found: Sequence[Row], reference: str | None = None) -> list[str]:
    """For every method but the reference, which domain gains most and which pays most, and whether that is beyond noise."""
    first = chosen_reference(found, reference)
    methods = _compared(found, first)
    return [_gain(name, seeds, first, methods[first], found) for name, seeds in methods.items() if name != first]


def _gain(
    name: str,
    seeds: dict[int, dict[str, float]],
    reference: str,
    base: dict[int, dict[str, float]],
    found: Sequence[Row],
) -> str:
    paired = sorted(set(seeds) & set(base))
    if not paired:
        return _unpaired(name, reference)
    moved = {
        domain: np.array([seeds[s][domain] - base[s][domain] for s in paired])
        for domain in seeds[paired[0]]
        if domain in base[paired[0]]
    }
    most, least = (pick(moved, key=lambda d: float(moved[d].mean())) for pick in (max, min))
    one = [seeds[paired[0]], base[paired[0]]] if len(paired) == 1 else None
    parts = [_moved(most, moved[most], one, found)]
    if least != most:
        parts.append(_moved(least, moved[least], one, found))
    return f"{name} against {reference}: {'; '.join(parts)}."


def _unpaired(name: str, reference: str) -> str:
    return f"{name} and {reference} share no seed: they are not compared."


def _moved(domain: str, by_seed: Floats, one: Sequence[dict[str, float]] | None, found: Sequence[Row]) -> str:
    """`one`: the two runs' accuracies, where there is no more than one pair."""
    change = float(by_seed.mean())
    if one is None:
        error = float(by_seed.std(ddof=1)) / len(by_seed) ** 0.5
    else:  # one seed: what drawing the test images alone would do to the two accuracies
        size = found[0].summaries[0]["test_sizes"].get(domain, 0)
        both = [accuracy[domain] / 100 for accuracy in one]
        error = 100 * float(sum(p * (1 - p) / max(size, 1) for p in both)) ** 0.5
    verb = "gains" if change > 0 else "pays" if change < 0 else "moves by"
    noise = "" if abs(change) > 2 * error else ", which is within noise"
    return f"{domain} {verb} {abs(change):.1f} points (standard error {error:.1f}{noise})"


def _compared(found: Sequence[Row], reference: str) -> dict[str, dict[int, dict[str, float]]]:
    """By method, without the runs that were on other data than the reference's."""
    return _by_method(alike.comparable(found, reference))


def _by_method(found: Sequence[Row]) -> dict[str, dict[int, dict[str, float]]]:
    methods: dict[str, dict[int, dict[str, float]]] = {}
    for row in found:
        if row.method not in BOUNDS:
            methods.setdefault(row.method, {})[row.seed] = dict(row.domains)
    return methods


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
