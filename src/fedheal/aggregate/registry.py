"""The stages by name, as they stand behind a `+` in a method's name. A new stage is one line here."""

from collections.abc import Callable

from fedheal.aggregate.fedheal_stages import fael_weights, fedheal_stage, fphl_mask
from fedheal.aggregate.masks.sign_agreement import sign_agreement_report
from fedheal.aggregate.running_statistics import total_variance
from fedheal.aggregate.stage import Stage
from fedheal.aggregate.weights.afl import afl_weights
from fedheal.aggregate.weights.exact import exact_weights
from fedheal.aggregate.weights.mix import mix_weights
from fedheal.aggregate.weights.qffl import qffl_weights
from fedheal.aggregate.weights.uniform import uniform_weights

STAGES: dict[str, Callable[..., Stage]] = {
    "uniform": uniform_weights,
    "afl": afl_weights,
    "qffl": qffl_weights,
    "fedheal": fedheal_stage,
    "fphl": fphl_mask,
    "fael": fael_weights,
    "fael-exact": exact_weights,
    "mix": mix_weights,
    "total-variance": total_variance,
    "directions": sign_agreement_report,
}
REPORTING = frozenset({"directions"})  # stages that change nothing
