"""Named aggregators: one function each. Every parameter is declared beside its stage, with its bounds and default.

All of them also take two keywords of `Aggregator`: `on_bad_update` (`"raise"`, or `"skip"` to count the client as
absent) and `kernel` (`"auto"`, `"reference"`, `"cpu"` or `"cuda"`).
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, Unpack, cast

from fedheal.aggregate import fedheal_stages as stages
from fedheal.aggregate import reduce
from fedheal.aggregate.aggregator import Aggregator, Reducer
from fedheal.aggregate.registry import STAGES
from fedheal.aggregate.stage import chain
from fedheal.aggregate.weights.afl import AFL_FLOOR, AFL_GAMMA, AFL_RESET
from fedheal.aggregate.weights.qffl import QFFL_MODE, QFFL_Q
from fedheal.aggregate.whole.fedfv import FEDFV_ALPHA, FEDFV_TAU, fedfv_stage
from fedheal.aggregate.whole.fedpw import FEDPW_BETA, FEDPW_RHO, fedpw_stage
from fedheal.core.errors import suggest


class AggregatorOptions(TypedDict, total=False):
    """The keywords of `Aggregator` that every preset takes."""

    on_bad_update: str
    kernel: str


Preset = TypeVar("Preset", bound=Callable[..., Aggregator])


def _name_unknown(preset: Preset) -> Preset:
    """Return the preset; a keyword that it does not have is named, with one that may be meant."""
    known = [key for key in inspect.signature(preset).parameters if key != "options"]
    known += AggregatorOptions.__annotations__

    @functools.wraps(preset)
    def check_and_call(*args: Any, **keys: Any) -> Aggregator:
        for key in keys:
            if key not in known:
                name = preset.__name__
                raise TypeError(f"{name} has no parameter '{key}'{suggest(key, known)}; it has {', '.join(known)}")
        return preset(*args, **keys)

    return cast(Preset, check_and_call)


@_name_unknown
def fedavg(**options: Unpack[AggregatorOptions]) -> Aggregator:
    """FedAvg (McMahan et al. 2017): the mean, weighted by this round's examples.

    Args:
        **options: `on_bad_update` and `kernel`, as for `Aggregator`.

    Returns:
        The aggregator.

    >>> fedavg()
    Aggregator(...)
    """
    return Aggregator(chain(), **options)


@_name_unknown
def uniform(**options: Unpack[AggregatorOptions]) -> Aggregator:
    """The plain mean over clients, the control of every fair method.

    Args:
        **options: `on_bad_update` and `kernel`, as for `Aggregator`.

    Returns:
        The aggregator.
    """
    return Aggregator(STAGES["uniform"](), **options)


@_name_unknown
def afl(
    gamma: float = AFL_GAMMA.default,
    floor: float = AFL_FLOOR.default,
    reset: bool = AFL_RESET.default,
    **options: Unpack[AggregatorOptions],
) -> Aggregator:
    """AFL (Mohri et al. 2019): weights that climb towards the clients with the largest `loss`.

    Args:
        gamma: How fast weights climb; 0 is uniform averaging.
        floor: The least weight, as a share of `1/M`, M the clients ever seen.
        reset: Start from equal weights every round.
        **options: `on_bad_update` and `kernel`, as for `Aggregator`.

    Returns:
        The aggregator.

    >>> import torch
    >>> from fedheal import Layout, Updates
    >>> aggregator = afl(gamma=0.1)
    >>> updates = Updates(["a", "b"], torch.tensor([[1.0], [-1.0]]), [9, 9], metrics={"loss": [1.0, 2.0]})
    >>> out = aggregator.apply(torch.zeros(1), updates, aggregator.init(Layout.flat(1)))
    >>> [round(w, 4) for w in out.weights.tolist()]  # 1/2 + 0.1 and 1/2 + 0.2, less 0.15 each
    [0.45, 0.55]
    """
    return Aggregator(STAGES["afl"](gamma, floor, reset), **options)


@_name_unknown
def qffl(q: float = QFFL_Q.default, mode: str = QFFL_MODE.default, **options: Unpack[AggregatorOptions]) -> Aggregator:
    """q-FFL (Li et al. 2020): weights in proportion to `loss^q`, and a step shrunk by the curvature.

    Args:
        q: The power of the loss; 0 is uniform averaging.
        mode: `"qfedavg_eff"` is the published update with L the inverse of the effective step (the client metric
            `reach`). `"qfedavg"` has L = 1/lr (`lr`). `"reweight"` has the weights alone, and oscillates for large q.
        **options: `on_bad_update` and `kernel`, as for `Aggregator`.

    Returns:
        The aggregator.
    """
    return Aggregator(STAGES["qffl"](q, mode), **options)


@_name_unknown
def fedfv(
    alpha: float = FEDFV_ALPHA.default, tau: int = FEDFV_TAU.default, **options: Unpack[AggregatorOptions]
) -> Aggregator:
    """FedFV (Wang et al. 2021): conflicts between updates are projected away.

    Args:
        alpha: Share of the clients with the largest losses whose updates stay as they are.
        tau: Rounds whose absent clients' conflicts count.
        **options: `on_bad_update` and `kernel`, as for `Aggregator`.

    Returns:
        The aggregator.
    """
    return Aggregator(fedfv_stage(alpha, tau), **options)


@_name_unknown
def fedpw(
    beta: float = FEDPW_BETA.default, rho: float = FEDPW_RHO.default, **options: Unpack[AggregatorOptions]
) -> Aggregator:
    """FedPW (Guan et al. 2025): small entries dropped, agreement stressed, weights by loss and alignment.

    Args:
        beta: How fast weights follow loss and alignment.
        rho: Mean share of the entries that are dropped, and stressed.
        **options: `on_bad_update` and `kernel`, as for `Aggregator`.

    Returns:
        The aggregator.
    """
    return Aggregator(fedpw_stage(beta, rho), **options)


@_name_unknown
def fedheal(
    tau: float = stages.TAU.default,
    beta: float = stages.BETA.default,
    variant: str = stages.VARIANT.default,
    fphl: bool = stages.FPHL.default,
    fael: str | bool = stages.FAEL.default,
    per_step: bool = stages.PER_STEP.default,
    soft: bool = stages.SOFT.default,
    forget: float = stages.FORGET.default,
    per_domain: bool = stages.PER_DOMAIN.default,
    **options: Unpack[AggregatorOptions],
) -> Aggregator:
    """FedHEAL (CVPR 2024): FPHL's mask and FAEL's weights. The last four parameters are extensions, off by default.

    Args:
        tau: The least consistency of an entry that is kept.
        beta: How fast weights follow distances.
        variant: `"paper"`, or `"released"` for the rules of the authors' code.
        fphl: False keeps every entry.
        fael: `"momentum"`, `"exact"` (the objective itself), `"exact-reg"` (held towards uniform) or False (example shares).
        per_step: Measure distances per unit of `reach`.
        soft: Count what is kept by its consistency (`masks/soft.py`).
        forget: The share of a client's sign counts that fades with each of its rounds (`masks/forgetting.py`).
        per_domain: Move weight between domains instead of clients (`weights/per_domain.py`).
        **options: `on_bad_update` and `kernel`, as for `Aggregator`.

    Returns:
        The aggregator.

    Raises:
        ValueError: If a parameter is out of range, or contradicts another.

    >>> import torch
    >>> from fedheal import Layout, Updates
    >>> aggregator = fedheal(tau=0.3, beta=0.4)
    >>> updates = Updates(["a", "b"], torch.tensor([[1.0, 1.0], [-1.0, 3.0]]), num_examples=[30, 10])
    >>> out = aggregator.apply(torch.zeros(2), updates, aggregator.init(Layout.flat(2)))
    >>> [round(w, 4) for w in out.weights.tolist()]  # distances 2 and 10: 3/4 + 2/12 * 0.4 to 1/4 + 10/12 * 0.4, over 1.4
    [0.5833, 0.4167]
    """
    stage = STAGES["fedheal"](tau, beta, variant, fphl, fael, per_step, soft, forget, per_domain)
    return Aggregator(stage, get_reducer(variant), **options)


def get_reducer(variant: str) -> Reducer:
    """Return the reducer of a variant: the released code moves buffers and counters like parameters, the paper does not."""
    return reduce.mean_as_released if variant == "released" else reduce.mean
