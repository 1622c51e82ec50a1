"""The stages by name, as they stand behind a `+` in a method's name."""

from __future__ import annotations

from collections.abc import Callable

from fedheal.aggregate.consistency import consistency
from fedheal.aggregate.distance import cumulative, momentum
from fedheal.aggregate.equidistant import exact
from fedheal.aggregate.fedce import fedce
from fedheal.aggregate.fedga import fedga
from fedheal.aggregate.stage import Stage, chain
from fedheal.aggregate.weights import uniform

__all__ = ["STAGES", "Stage", "chain", "fael", "fael_exact", "fedce", "fedga", "fedheal", "fphl", "uniform"]

VARIANTS = ("paper", "released")
FAEL = ("momentum", "exact", "exact-reg", False)


def fphl(tau: float = 0.3, variant: str = "paper") -> Stage:
    """Leave out entries whose direction disagrees with the client's history; `tau=0` of the paper keeps everything."""
    check_share("tau", tau)
    check_variant(variant)
    return chain() if variant == "paper" and tau == 0 else consistency(tau, variant)


def fael(beta: float = 0.4, variant: str = "paper") -> Stage:
    """More weight to clients that must move further; `beta=0` of the paper leaves example shares."""
    check_share("beta", beta)
    check_variant(variant)
    if variant == "released":
        return cumulative(beta)
    return momentum(beta) if beta > 0 else chain()


def fael_exact(ridge: float = 1e-4, towards: str = "examples", floor: float = 0.0) -> Stage:
    """The weights that make the global model equally far from all clients; `floor` is a share of `1/K`."""
    if not ridge > 0:
        raise ValueError(f"ridge = {ridge!r}: use a number above 0, which makes the weights unique")
    if towards not in ("examples", "uniform"):
        raise ValueError(f"towards = {towards!r}: use 'examples' or 'uniform'")
    check_share("floor", floor)
    return exact(ridge, towards, floor)


def fedheal(
    tau: float = 0.3, beta: float = 0.4, variant: str = "paper", fphl: bool = True, fael: str | bool = "momentum"
) -> Stage:
    """Both, with switches for each: see `fedheal.aggregate.fedheal`."""
    if not (fael is False or (isinstance(fael, str) and fael in FAEL)):
        raise ValueError(f"fael = {fael!r}: use one of {FAEL}")
    if not isinstance(fphl, bool):
        raise ValueError(f"fphl = {fphl!r}: use True or False")
    mask, by_distance = STAGES["fphl"](tau, variant), STAGES["fael"](beta, variant)
    weights = {
        "momentum": by_distance,
        "exact": fael_exact(),
        "exact-reg": fael_exact(ridge=1.0, towards="uniform", floor=0.2),
        False: chain(),
    }[fael]
    return chain(*([mask] if fphl else []), weights)


STAGES: dict[str, Callable[..., Stage]] = {
    "uniform": uniform,
    "fedheal": fedheal,
    "fphl": fphl,
    "fael": fael,
    "fael-exact": fael_exact,
}


def check_share(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} = {value!r}: use a number from 0 to 1")


def check_variant(variant: str) -> None:
    if variant not in VARIANTS:
        raise ValueError(f"variant = {variant!r}: use one of {VARIANTS}")
