"""Which seeds runs share. Those of the split, the initial model and the batches (`Row.seeds`) are levels of three factors.

Ordinary runs of a method differ in all factors that vary, and are independent. Runs of a crossed design share levels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fedheal.core.rng import SOURCES
from fedheal.report.rows import BOUNDS, Row, Seeds

MEANINGS = {"split": "draw of the clients' examples", "init": "initial model", "batch": "order of batches"}


def count_levels(seeds: Collection[Seeds]) -> dict[str, int]:
    """Return how many seeds each source of chance has, for those that have several.

    >>> count_levels([(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)])
    {'split': 2, 'init': 2}
    """
    numbers = {source: len({levels[i] for levels in seeds}) for i, source in enumerate(SOURCES)}
    return {source: number for source, number in numbers.items() if number > 1}


def count_independent(seeds: Collection[Seeds]) -> int:
    """Return how many independent runs a mean over these is worth at worst: the fewest levels of a source that varies.

    Say one source has a levels and causes all the variance. Then a mean over a x b crossed runs is no surer than a mean
    over a runs.
    """
    return min(count_levels(seeds).values(), default=1)


def share_levels(rows: Iterable[Row]) -> bool:
    """Return whether runs of one method share a draw, an initial model or an order of batches in which others differ."""
    return any(count_independent(seeds) < len(seeds) for seeds in list_seeds(rows).values())


def list_fixed_sources(rows: Iterable[Row]) -> list[str]:
    """Return sentences on sources of chance that several runs have in common: nothing can be said of other levels."""
    seeds = [found for by_method in list_seeds(rows).values() for found in by_method]
    levels = count_levels(seeds)
    fixed = [i for i, source in enumerate(SOURCES) if levels and source not in levels]
    return [
        f"All runs have the same {MEANINGS[SOURCES[i]]} ({SOURCES[i]} seed {seeds[0][i]}): the numbers hold for that one alone."
        for i in fixed
    ]


def list_seeds(rows: Iterable[Row]) -> dict[str, list[Seeds]]:
    """Return the seeds of each method's runs, without bounds."""
    found: dict[str, list[Seeds]] = {}
    for row in rows:
        if row.method not in BOUNDS:
            found.setdefault(row.method, []).append(row.seeds)
    return found
