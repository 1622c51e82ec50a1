"""The stages by name, as they stand behind a `+` in a method's name."""

from __future__ import annotations

from collections.abc import Callable

from fedheal.aggregate.consistency import consistency
from fedheal.aggregate.distance import cumulative, momentum
from fedheal.aggregate.equidistant import exact
from fedheal.aggregate.stage import Stage, chain
from fedheal.aggregate.weights import by_examples, uniform

__all__ = ["STAGES", "Stage", "by_examples", "chain", "consistency", "cumulative", "exact", "momentum", "uniform"]

STAGES: dict[str, Callable[..., Stage]] = {
    "uniform": uniform,
    "fphl": consistency,
    "fael": momentum,
    "fael-exact": exact,
}
