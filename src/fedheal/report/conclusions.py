"""Conclusions from a comparison of runs on one data set, in plain sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedheal.analysis.domain_changes import compare_domains, is_supported
from fedheal.analysis.paired_tests import (
    HIGHER_IS_BETTER,
    Comparison,
    compare_metrics,
    seeds_needed,
    smallest_p,
    verdict,
)
from fedheal.analysis.standard_error import note_on_test_sets
from fedheal.core.errors import format_count
from fedheal.report.comparability import choose_reference, select_comparable
from fedheal.report.rows import BOUNDS, FAIRNESS_COLUMNS, Row, Seeds
from fedheal.report.seed_levels import share_levels

Accuracies = dict[Seeds, dict[str, float]]  # by seeds and domain
METRICS = ("avg", "std")  # that are tested
ALPHA = 0.05
UNITS = {"AVG": " %", "STD": " points", "worst": " %"}
LEADERS = {"STD": "the lowest STD", "AVG": "the highest AVG"}
MAX_CLAIMS = 3  # that the headline lists


@dataclass(frozen=True)
class Leader:
    """The method with the best mean in AVG, STD or worst, its mean, the reference's, and whether a test supports it."""

    column: str
    method: str
    mean: float
    reference: str
    reference_mean: float
    supported: bool


@dataclass(frozen=True)
class Findings:
    """The comparable methods on one data set, and their paired comparisons with the reference."""

    reference: str
    rows: Sequence[Row]  # those that are comparable, without bounds
    methods: dict[str, Accuracies]
    unpaired: list[str]  # methods that share no seed with the reference
    metrics: list[Comparison]  # in AVG and STD
    domains: list[Comparison]  # in the accuracy of each domain


def analyse_rows(rows: Sequence[Row], reference: str | None = None) -> Findings:
    """Compare every method with the reference (by default FedAvg or the first) in AVG, STD and every domain."""
    reference = choose_reference(rows, reference)
    rows = [row for row in select_comparable(rows, reference) if row.method not in BOUNDS]
    methods: dict[str, Accuracies] = {}
    for row in rows:
        methods.setdefault(row.method, {})[row.seeds] = dict(row.domains)
    if reference not in methods:  # its own runs of one split are on different data
        return Findings(reference, rows, {}, [], [], [])
    unpaired = [name for name, seeds in methods.items() if not seeds.keys() & methods[reference].keys()]
    paired = {name: seeds for name, seeds in methods.items() if name not in unpaired}
    if len(paired) < 2 or share_levels(rows):
        return Findings(reference, rows, methods, unpaired, [], [])
    tested = compare_metrics(paired, reference, choose_metrics(len(rows[0].domains)))
    metrics = [c for group in tested.values() for c in group]
    domains = compare_domains(paired, reference, rows[0].summaries[0]["test_sizes"])
    return Findings(reference, rows, methods, unpaired, metrics, domains)


def choose_metrics(domains: int) -> tuple[str, ...]:
    """Return the metrics that are tested: one domain has no spread."""
    return METRICS if domains > 1 else ("avg",)


def conclude(rows: Sequence[Row], reference: str | None = None) -> list[str]:
    """Say what may be concluded of every method in AVG and STD, and name small test sets."""
    return conclude_findings(analyse_rows(rows, reference), rows, list_observed=True)


def conclude_findings(found: Findings, rows: Sequence[Row], list_observed: bool = False) -> list[str]:
    """Do the same from findings; `list_observed` differences that no test could decide, where no figure shows them."""
    hopeless = [c for c in found.metrics if c.smallest_p_adjusted > ALPHA]
    sentences = [f"{name} and {found.reference} share no seed: they are not compared." for name in found.unpaired]
    if len(found.methods) > 1 and share_levels(found.rows):
        sentences.append(
            "Runs of one method share draws, initial models or orders of batches. They are not independent, so no difference "
            "between methods is tested: compare with --seeds for that."
        )
    sentences += _explain_too_few_seeds(hopeless)
    if hopeless and list_observed:
        observed = "; ".join(f"{c.a} {c.mean:+.2f} in {c.metric.upper()}" for c in hopeless)
        sentences.append(f"Observed against {found.reference}, in points: {observed}.")
    verdicts = [verdict(c, ALPHA) for c in found.metrics if c not in hopeless]
    return sentences + verdicts + _describe_test_sets(rows)


def write_headline(found: Findings) -> str:
    """Return the answer in one or two sentences that claim no more than the tests support."""
    if not found.methods:
        return ""
    if not found.metrics:
        return describe_worst(found)
    claims = [c for c in found.metrics if is_supported(c, ALPHA)]
    if claims:
        words = [_describe_claim(c) for c in claims[:MAX_CLAIMS]]
        more = f", and {len(claims) - MAX_CLAIMS} more differences" if len(claims) > MAX_CLAIMS else ""
        tested = " or ".join(dict.fromkeys(c.metric.upper() for c in found.metrics))
        rest = "" if len(claims) == len(found.metrics) else f" No other difference in {tested} can be concluded."
        return f"{'; '.join(words)}{more}.{rest}"
    seeds = " to ".join(map(str, sorted({f(c.n for c in found.metrics) for f in (min, max)})))
    if all(c.smallest_p_adjusted > ALPHA for c in found.metrics):
        start = f"{seeds} {'seed' if seeds == '1' else 'seeds'} cannot show a difference between methods."
    else:
        start = f"No difference to {found.reference} can be concluded from {seeds} seeds."
    return " ".join([start, *_describe_leaders(find_leaders(found)), *_describe_ties(found)])


def _describe_leaders(leaders: Sequence[Leader]) -> list[str]:
    """Return a sentence on who has the lowest STD and the highest AVG, if anyone has."""
    found = {x.column: x for x in leaders}
    words, named = [], ""
    for leader in (found[column] for column in LEADERS if column in found):
        other = "" if leader.method == leader.reference else f"; {leader.reference}: {leader.reference_mean:.1f}"
        claim = f"{LEADERS[leader.column]} ({leader.mean:.1f}{UNITS[leader.column]}{other})"
        words.append(claim if leader.method == named else f"{leader.method} has {claim}")
        named = leader.method
    return [f"In these runs {' and '.join(words)}."] if words else []


def _describe_ties(found: Findings) -> list[str]:
    """Return a sentence on AVG and STD if they do not differ between methods."""
    means = {column: x for column, x in _average_columns(found).items() if column in LEADERS}
    ties = [f"{column} ({x[found.reference]:.1f}{UNITS[column]})" for column, x in means.items() if _is_tied(x)]
    return [f"All methods have the same {' and '.join(ties)}."] if ties else []


def _describe_claim(c: Comparison) -> str:
    word = "better" if (c.mean > 0) == HIGHER_IS_BETTER[c.metric] else "worse"
    return f"{c.a} is {word} than {c.b} in {c.metric.upper()} by {abs(c.mean):.1f} points"


def describe_worst(found: Findings) -> str:
    """Name the domain that the reference serves worst."""
    seeds = list(found.methods[found.reference].values())
    by_domain = {domain: float(np.mean([accuracy[domain] for accuracy in seeds])) for domain in seeds[0]}
    worst = min(by_domain, key=by_domain.__getitem__)
    below = float(np.mean(list(by_domain.values()))) - by_domain[worst]
    return (
        f"With {found.reference}, {worst} has the lowest accuracy: {by_domain[worst]:.1f} %, "
        f"{below:.1f} points below the mean over domains."
    )


def find_leaders(found: Findings) -> list[Leader]:
    """Return the method with the best mean over seeds in AVG, STD and worst, which need not differ beyond noise.

    A column in which all methods have the same mean has no leader. With one domain, only AVG says something.
    """
    leaders = []
    for column, means in _average_columns(found).items():
        if _is_tied(means):
            continue
        key = FAIRNESS_COLUMNS[column]
        pick: Any = max if HIGHER_IS_BETTER[key] else min
        name = pick(means, key=means.__getitem__)
        supported = any(c.a == name and c.metric == key and is_supported(c, ALPHA) for c in found.metrics)
        leaders.append(Leader(column, name, means[name], found.reference, means[found.reference], supported))
    return leaders


def _average_columns(found: Findings) -> dict[str, dict[str, float]]:
    """Return each method's mean over seeds in AVG, STD and worst, as in the table; of one domain, in AVG alone."""
    if not found.methods:
        return {}
    # The STD of mean accuracies would be another number, and a smaller one.
    return {
        column: {m: float(np.mean([r.fairness[key] for r in found.rows if r.method == m])) for m in found.methods}
        for column, key in FAIRNESS_COLUMNS.items()
        if column == "AVG" or len(found.rows[0].domains) > 1
    }


def _is_tied(means: Mapping[str, float]) -> bool:
    return len(means) > 1 and len(set(means.values())) == 1


def describe_gains(found: Findings) -> list[str]:
    """Say for every method which domains gain or lose against the reference, as far as the tests support it."""
    sentences = []
    for name in dict.fromkeys(c.a for c in found.domains):
        changes = sorted((c for c in found.domains if c.a == name), key=lambda c: -c.mean)
        supported = [c for c in changes if is_supported(c, ALPHA)]
        start = f"{name} against {found.reference}"
        if supported:
            verbs = [f"{c.metric} {'gains' if c.mean > 0 else 'loses'} {abs(c.mean):.1f} points" for c in supported]
            words = [verb + _format_interval(c) for verb, c in zip(verbs, supported, strict=True)]
            rest = [c.metric for c in changes if c not in supported]
            tail = f" No change can be concluded in {', '.join(rest)}." if rest else ""
            sentences.append(f"{start}: {'; '.join(words)}.{tail}")
        else:
            largest = [
                f"{c.metric} {c.mean:+.1f}{_format_interval(c)}" for c in dict.fromkeys((changes[0], changes[-1]))
            ]
            sentences.append(f"{start}: no gain or loss can be concluded. Observed: {'; '.join(largest)}.")
    return sentences


def explain_gains(found: Findings) -> str:
    """Say what the intervals of the domains' differences are."""
    if not found.domains:
        return ""
    count = len(found.domains)
    several = max(c.n for c in found.domains) > 1
    errors = "the spread over seeds and the drawing of the test images" if several else "the drawing of the test images"
    held = "" if count == 1 else f" and hold for all {count} differences together"
    sentence = f"Intervals (95 %) cover {errors}{held}. A gain or loss is stated where the paired test agrees"
    if min(c.smallest_p_adjusted for c in found.domains) > ALPHA:
        hopeless = [c.comparisons for c in found.metrics if c.smallest_p_adjusted > ALPHA]
        fewer = f" (a difference in AVG or STD takes {seeds_needed(ALPHA, max(hopeless))})" if hopeless else ""
        needed = seeds_needed(ALPHA, count)
        sentence += f": with {count} differences tested together, that takes {needed} or more seeds{fewer}"
    return f"{sentence}."


def _format_interval(c: Comparison) -> str:
    return "" if c.low is None or c.high is None else f" ({c.low:+.1f} to {c.high:+.1f})"


def _explain_too_few_seeds(comparisons: Sequence[Comparison]) -> list[str]:
    """Describe in one sentence all comparisons that no data could decide."""
    if not comparisons:
        return []
    seeds, lowest_p = min(c.n for c in comparisons), max(c.smallest_p_adjusted for c in comparisons)
    return [_describe_too_few(seeds, max(c.comparisons for c in comparisons), lowest_p)]


def foresee_too_few_seeds(seeds: int, methods: int, domains: int = 2) -> str:
    """Return the sentence of a report of so many methods and seeds if no data could show a difference, else "".

    Two domains stand for any more.

    >>> foresee_too_few_seeds(8, methods=4)
    ''
    >>> print(foresee_too_few_seeds(8, methods=5))
    8 seeds cannot show a difference at 0.05 with a two-sided paired test corrected for 8 comparisons, whatever the data
    (smallest possible p = 0.062); 9 or more can.
    """
    family_size = len(choose_metrics(domains)) * (methods - 1)
    lowest_p = min(1.0, family_size * smallest_p(seeds))
    return _describe_too_few(seeds, family_size, lowest_p) if lowest_p > ALPHA else ""


def _describe_too_few(seeds: int, family_size: int, lowest_p: float) -> str:
    return (
        f"{format_count(seeds, 'seed')} cannot show a difference at {ALPHA} with a two-sided paired test "
        f"corrected for {format_count(family_size, 'comparison')}, whatever the data (smallest possible p = {lowest_p:.2g}); "
        f"{seeds_needed(ALPHA, family_size)} or more can."
    )


def _describe_test_sets(rows: Sequence[Row]) -> list[str]:
    """Name small test sets, with the largest error that a row of the table has: that of the accuracy nearest 50 %."""
    sizes = {d: size for d, size in rows[0].summaries[0]["test_sizes"].items() if size >= 1} if rows else {}
    if not sizes:
        return []
    rows = [row for row in rows if row.method not in BOUNDS] or rows
    methods = dict.fromkeys(row.method for row in rows)
    means = {d: [float(np.mean([r.domains[d] for r in rows if r.method == m])) for m in methods] for d in sizes}
    accuracies = {d: min(x, key=lambda mean: abs(mean - 50)) for d, x in means.items()}
    fingerprints = {str(s.get("data_fingerprint") or "") for row in rows for s in row.summaries}  # "": of a federation
    return [note_on_test_sets(accuracies, sizes, are_shared=len(fingerprints) == 1 and "" not in fingerprints)]
