"""Rounds of an aggregator, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedheal import Layout, Updates
from fedheal.aggregate.aggregator import Aggregated, Aggregator


def apply_rounds(aggregator: Aggregator, cohorts: Iterable[Updates], layout: Layout) -> list[Aggregated]:
    """Apply an aggregator to a model of zeros, one cohort a round; return each round's result."""
    model, state, results = np.zeros(layout.sizes().params), aggregator.init(layout), []
    for cohort in cohorts:
        out = aggregator.apply(model, cohort, state)
        results.append(out)
        model, state = out.model, out.state
    return results
