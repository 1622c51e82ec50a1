"""The stages by name, as they stand behind a `+` in a method's name."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedheal.aggregate.afl import afl
from fedheal.aggregate.checks import check_among, check_share, check_switch
from fedheal.aggregate.consistency import consistency
from fedheal.aggregate.directions import directions
from fedheal.aggregate.distance import cumulative, momentum
from fedheal.aggregate.equidistant import exact
from fedheal.aggregate.qffl import qffl
from fedheal.aggregate.stage import Stage, chain
from fedheal.aggregate.weights import uniform

__all__ = ["STAGES", "Stage", "afl", "chain", "directions", "fael", "fael_exact", "fedheal", "fphl", "qffl", "uniform"]

VARIANTS = ("paper", "released")
FAEL = ("momentum", "exact", "exact-reg", False)


def fphl(tau: float = 0.3, variant: str = "paper") -> Stage:
    """Leave out entries whose direction disagrees with the client's history; `tau=0` of the paper keeps everything."""
    check_share("tau", tau)
    check_variant(variant)
    return chain() if variant == "paper" and tau == 0 else consistency(tau, variant)


def fael(beta: float = 0.4, variant: str = "paper", per_step: bool = False) -> Stage:
    """More weight to clients that must move further (`per_step`: for their steps); `beta=0` of the paper: example shares."""
    check_share("beta", beta)
    check_switch("per_step", per_step)
    check_variant(variant)
    if variant == "released":
        return cumulative(beta, per_step)
    return momentum(beta, per_step) if beta > 0 else chain()


def fael_exact(ridge: float = 1e-4, towards: str = "examples", floor: float = 0.0) -> Stage:
    """The weights that make the global model equally far from all clients; `floor` is a share of `1/K`."""
    if isinstance(ridge, bool) or not 0 < ridge < math.inf:
        raise ValueError(f"ridge = {ridge!r}: use a finite number above 0, which makes the weights unique")
    if towards not in ("examples", "uniform"):
        raise ValueError(f"towards = {towards!r}: use 'examples' or 'uniform'")
    check_share("floor", floor)
    return exact(ridge, towards, floor)


def fedheal(
    tau: float = 0.3,
    beta: float = 0.4,
    variant: str = "paper",
    fphl: bool = True,
    fael: str | bool = "momentum",
    per_step: bool = False,
) -> Stage:
    """Both, with switches for each: see `fedheal.aggregate.fedheal`."""
    check_among("fael", fael, FAEL)
    check_switch("fphl", fphl)
    mask, by_distance = STAGES["fphl"](tau, variant), STAGES["fael"](beta, variant, per_step)
    if per_step and fael != "momentum":
        raise ValueError(f"per_step = True with fael = {fael!r}: only fael = 'momentum' measures distances per step")
    weights = {
        "momentum": by_distance,
        "exact": fael_exact(),
        "exact-reg": fael_exact(ridge=1.0, towards="uniform", floor=0.2),
        False: chain(),
    }[fael]
    return chain(*([mask] if fphl else []), weights)


STAGES: dict[str, Callable[..., Stage]] = {
    "uniform": uniform,
    "afl": afl,
    "qffl": qffl,
    "fedheal": fedheal,
    "fphl": fphl,
    "fael": fael,
    "fael-exact": fael_exact,
    "directions": directions,
}


def check_variant(variant: str) -> None:
    check_among("variant", variant, VARIANTS)
