"""The stages by name, as they stand behind a `+` in a method's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fedheal.aggregate.masks.consistency import consistency_mask
from fedheal.aggregate.masks.forgetting import forgetting_mask
from fedheal.aggregate.masks.sign_agreement import sign_agreement_report
from fedheal.aggregate.masks.soft import soft_mask
from fedheal.aggregate.stage import Stage, chain
from fedheal.aggregate.weights.afl import afl_weights
from fedheal.aggregate.weights.distance import cumulative_rule, distance_weights, momentum_rule
from fedheal.aggregate.weights.exact import exact_weights
from fedheal.aggregate.weights.per_domain import per_domain_weights
from fedheal.aggregate.weights.qffl import qffl_weights
from fedheal.aggregate.weights.uniform import uniform_weights
from fedheal.core.checks import check_among, check_part, check_positive, check_share, check_switch
from fedheal.core.parameter import Parameter

__all__ = [
    "REPORTING",
    "STAGES",
    "Stage",
    "chain",
    "fael",
    "fael_exact",
    "fedheal",
    "fphl",
]

VARIANTS = ("paper", "released")
FAEL = ("momentum", "exact", "exact-reg", False)


Tau = Annotated[
    float,
    Parameter("least consistency of an entry that is kept", "Chen et al. 2024 for Digits; 0.4 for Office-Caltech"),
]
Beta = Annotated[float, Parameter("how fast weights follow distances", "Chen et al. 2024 for both data sets")]
Variant = Annotated[str, Parameter("paper or released", "ours: the equations rather than the authors' code")]
PerStep = Annotated[bool, Parameter("distances per unit of reach", "extension of ours, off")]
Soft = Annotated[bool, Parameter("what is kept counts by its consistency", "extension of ours, off")]
Forget = Annotated[
    float, Parameter("share of a client's sign history that each of its rounds fades", "extension of ours, off")
]
PerDomain = Annotated[bool, Parameter("weight moves between domains instead of clients", "extension of ours, off")]


def fphl(tau: Tau = 0.3, variant: Variant = "paper", soft: Soft = False, forget: Forget = 0.0) -> Stage:
    """Leave out entries whose direction disagrees with the client's history; `tau=0` of the paper keeps everything.

    `soft`: what is kept counts by its consistency. `forget`: the share of a client's history that each of its rounds fades.
    """
    check_share("tau", tau)
    check_variant(variant)
    check_switch("soft", soft)
    check_part("forget", forget)
    if variant == "paper" and tau == 0 and not soft:
        return chain()
    if forget > 0:
        return forgetting_mask(forget, tau, variant, soft)
    return soft_mask(tau, variant) if soft else consistency_mask(tau, variant)


def fael(
    beta: Beta = 0.4, variant: Variant = "paper", per_step: PerStep = False, per_domain: PerDomain = False
) -> Stage:
    """More weight to clients that must move further (`per_step`: for their steps); `beta=0` of the paper: example shares.

    `per_domain`: more weight to domains whose clients must move further on average.
    """
    check_share("beta", beta)
    check_switch("per_step", per_step)
    check_switch("per_domain", per_domain)
    check_variant(variant)
    if variant == "paper" and beta == 0:
        return chain()
    rule = (cumulative_rule if variant == "released" else momentum_rule)(beta, per_step)
    return per_domain_weights(rule) if per_domain else distance_weights(rule)


def fael_exact(
    ridge: Annotated[float, Parameter("pull towards the reference weights, which makes them unique", "ours")] = 1e-4,
    towards: Annotated[str, Parameter("the reference: examples or uniform", "ours: FedAvg's weights")] = "examples",
    floor: Annotated[float, Parameter("least weight, as a share of 1/K", "ours: none")] = 0.0,
) -> Stage:
    """The weights that make the global model equally far from all clients; `floor` is a share of `1/K`."""
    check_positive("ridge", ridge)  # which makes the weights unique
    if towards not in ("examples", "uniform"):
        raise ValueError(f"towards = {towards!r}: use 'examples' or 'uniform'")
    check_share("floor", floor)
    return exact_weights(ridge, towards, floor)


def fedheal(
    tau: Tau = 0.3,
    beta: Beta = 0.4,
    variant: Variant = "paper",
    fphl: Annotated[bool, Parameter("whether entries are masked at all", "Chen et al. 2024")] = True,
    fael: Annotated[
        str | bool, Parameter("momentum, exact, exact-reg or false (example shares)", "Chen et al. 2024: momentum")
    ] = "momentum",
    per_step: PerStep = False,
    soft: Soft = False,
    forget: Forget = 0.0,
    per_domain: PerDomain = False,
) -> Stage:
    """Both, with switches for each: see `fedheal.aggregate.fedheal`."""
    check_among("fael", fael, FAEL)
    check_switch("fphl", fphl)
    mask = STAGES["fphl"](tau, variant, soft, forget)
    by_distance = STAGES["fael"](beta, variant, per_step, per_domain)
    if fael != "momentum":
        if per_step:
            raise ValueError(
                f"per_step = True with fael = {fael!r}: only fael = 'momentum' measures distances per step"
            )
        if per_domain:
            raise ValueError(
                f"per_domain = True with fael = {fael!r}: only fael = 'momentum' moves weight between domains"
            )
    if not fphl:
        if soft:
            raise ValueError("soft = True with fphl = False: there is no mask to soften")
        if forget:
            raise ValueError(f"forget = {forget} with fphl = False: there are no sign counts to forget")
    weights = {
        "momentum": by_distance,
        "exact": fael_exact(),
        "exact-reg": fael_exact(ridge=1.0, towards="uniform", floor=0.2),
        False: chain(),
    }[fael]
    return chain(*([mask] if fphl else []), weights)


STAGES: dict[str, Callable[..., Stage]] = {
    "uniform": uniform_weights,
    "afl": afl_weights,
    "qffl": qffl_weights,
    "fedheal": fedheal,
    "fphl": fphl,
    "fael": fael,
    "fael-exact": fael_exact,
    "directions": sign_agreement_report,
}


def check_variant(variant: str) -> None:
    check_among("variant", variant, VARIANTS)


REPORTING = frozenset({"directions"})  # stages that change nothing
