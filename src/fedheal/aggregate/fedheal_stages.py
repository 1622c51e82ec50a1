"""FedHEAL's stages and their parameters: FPHL gives the mask, FAEL the weights, and FedHEAL both.

Chen, Huang and Ye, CVPR 2024. The rules themselves are in `masks/consistency.py` and `weights/distance.py`.
"""

from fedheal.aggregate.masks.consistency import consistency_mask
from fedheal.aggregate.masks.forgetting import forgetting_mask
from fedheal.aggregate.masks.soft import soft_mask
from fedheal.aggregate.stage import Stage, chain
from fedheal.aggregate.weights.distance import cumulative_rule, distance_weights, momentum_rule
from fedheal.aggregate.weights.exact import exact_weights
from fedheal.aggregate.weights.per_domain import per_domain_weights
from fedheal.core.parameter import Parameter, declare_parameters

EXTENSION = "extension of ours, off"
TAU_SOURCE = "Chen et al. 2024 for Digits; 0.4 for Office-Caltech"
TAU = Parameter("tau", 0.3, "least consistency of an entry that is kept", TAU_SOURCE, ge=0, le=1)
BETA = Parameter("beta", 0.4, "how fast weights follow distances", "Chen et al. 2024 for both data sets", ge=0, le=1)
FAELS = ("momentum", "exact", "exact-reg", False)
VARIANTS = ("paper", "released")
VARIANT = Parameter(
    "variant", "paper", "paper or released", "ours: the equations rather than the authors' code", choices=VARIANTS
)
FPHL = Parameter("fphl", True, "whether entries are masked at all", "Chen et al. 2024")
FAEL_RULES = "momentum, exact, exact-reg or false (example shares)"
FAEL = Parameter("fael", "momentum", FAEL_RULES, "Chen et al. 2024: momentum", choices=FAELS)
PER_STEP = Parameter("per_step", False, "distances per unit of reach", EXTENSION)
SOFT = Parameter("soft", False, "what is kept counts by its consistency", EXTENSION)
FORGET = Parameter(
    "forget", 0.0, "share of a client's sign history that each of its rounds fades", EXTENSION, ge=0, lt=1
)
PER_DOMAIN = Parameter("per_domain", False, "weight moves between domains instead of clients", EXTENSION)


@declare_parameters(TAU, VARIANT, SOFT, FORGET)
def fphl_mask(
    tau: float = TAU.default, variant: str = VARIANT.default, soft: bool = SOFT.default, forget: float = FORGET.default
) -> Stage:
    """Leave out entries whose direction disagrees with the client's history; `tau=0` of the paper keeps everything."""
    if variant == "paper" and tau == 0 and not soft:
        return chain()
    if forget > 0:
        return forgetting_mask(forget, tau, variant, soft)
    return soft_mask(tau, variant) if soft else consistency_mask(tau, variant)


@declare_parameters(BETA, VARIANT, PER_STEP, PER_DOMAIN)
def fael_weights(
    beta: float = BETA.default,
    variant: str = VARIANT.default,
    per_step: bool = PER_STEP.default,
    per_domain: bool = PER_DOMAIN.default,
) -> Stage:
    """More weight to clients that must move further (`per_step`: for their steps); `beta=0` of the paper: example shares."""
    if variant == "paper" and beta == 0:
        return chain()
    rule = (cumulative_rule if variant == "released" else momentum_rule)(beta, per_step)
    return per_domain_weights(rule) if per_domain else distance_weights(rule)


@declare_parameters(TAU, BETA, VARIANT, FPHL, FAEL, PER_STEP, SOFT, FORGET, PER_DOMAIN)
def fedheal_stage(
    tau: float = TAU.default,
    beta: float = BETA.default,
    variant: str = VARIANT.default,
    fphl: bool = FPHL.default,
    fael: str | bool = FAEL.default,
    per_step: bool = PER_STEP.default,
    soft: bool = SOFT.default,
    forget: float = FORGET.default,
    per_domain: bool = PER_DOMAIN.default,
) -> Stage:
    """Chen, Huang and Ye 2024: FPHL's mask and FAEL's weights, with a switch for each."""
    if fael != "momentum" and per_step:
        raise ValueError(f"per_step = True with fael = {fael!r}: only fael = 'momentum' measures distances per step")
    if fael != "momentum" and per_domain:
        raise ValueError(f"per_domain = True with fael = {fael!r}: only fael = 'momentum' moves weight between domains")
    if not fphl and soft:
        raise ValueError("soft = True with fphl = False: there is no mask to soften")
    if not fphl and forget:
        raise ValueError(f"forget = {forget} with fphl = False: there are no sign counts to forget")
    stages = [fphl_mask(tau, variant, soft, forget)] if fphl else []
    if fael == "momentum":
        stages.append(fael_weights(beta, variant, per_step, per_domain))
    elif fael == "exact":
        stages.append(exact_weights())
    elif fael == "exact-reg":
        stages.append(exact_weights(ridge=1.0, towards="uniform", floor=0.2))
    return chain(*stages)
