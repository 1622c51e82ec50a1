"""The stages by name, as they stand behind a `+` in a method's name. A new stage is one line here."""

from __future__ import annotations

from collections.abc import Callable

from fedheal.aggregate.fedheal_stages import make_fael_stage, make_fedheal_stage, make_fphl_stage
from fedheal.aggregate.masks.directions import directions
from fedheal.aggregate.stage import Stage
from fedheal.aggregate.weights.afl import afl
from fedheal.aggregate.weights.exact import exact
from fedheal.aggregate.weights.qffl import qffl
from fedheal.aggregate.weights.uniform import uniform

STAGES: dict[str, Callable[..., Stage]] = {
    "uniform": uniform,
    "afl": afl,
    "qffl": qffl,
    "fedheal": make_fedheal_stage,
    "fphl": make_fphl_stage,
    "fael": make_fael_stage,
    "fael-exact": exact,
    "directions": directions,
}
REPORTING = frozenset({"directions"})  # stages that change nothing
