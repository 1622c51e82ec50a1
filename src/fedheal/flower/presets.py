"""Named strategies: one function each. Every other setting is `FairStrategy`'s."""

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar

from fedheal import methods
from fedheal.aggregate import Aggregator, chain
from fedheal.aggregate.fedheal_stages import BETA, FAEL, FPHL, TAU, VARIANT, fael_weights
from fedheal.aggregate.weights.afl import AFL_FLOOR, AFL_GAMMA, AFL_RESET
from fedheal.aggregate.weights.qffl import QFFL_MODE, QFFL_Q
from fedheal.aggregate.whole.fedfv import FEDFV_ALPHA, FEDFV_TAU
from fedheal.core.checks import check_among
from fedheal.core.errors import suggest
from fedheal.flower.settings import PLACEMENTS
from fedheal.flower.strategy import FairStrategy
from fedheal.methods import Method

# Flower's older names -> ours.
OLDER_NAMES = {
    "fraction_fit": "fraction_train",
    "min_fit_clients": "min_train_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_available_clients": "min_available_nodes",
}

P = ParamSpec("P")
S = TypeVar("S", bound=FairStrategy)


def check_preset_arguments(preset: Callable[P, S], own: Collection[str] = ()) -> Callable[P, S]:
    """Decorate a preset so that it rejects unknown arguments, and those without a name.

    The first argument of Flower's `FedAvg` is a fraction of the nodes, not tau or gamma. `own` are settings of `FairStrategy`
    that the preset sets itself.
    """
    parameters = inspect.signature(preset).parameters | inspect.signature(FairStrategy).parameters
    known = {key: key for key in parameters if key not in {"settings", "method", *own}}

    @functools.wraps(preset)
    def make_strategy(*unnamed: P.args, **named: P.kwargs) -> S:
        if unnamed:
            call = f"{preset.__name__}({', '.join(map(repr, unnamed))})"
            raise TypeError(f"{call}: name each argument, as in {preset.__name__}(fraction_train=0.5)")
        for key in named:
            if key not in known:
                raise TypeError(f"{preset.__name__} has no parameter '{key}'{suggest(key, known | OLDER_NAMES)}")
        return preset(*unnamed, **named)

    return make_strategy


@check_preset_arguments
def FedHEAL(
    *,
    tau: float = TAU.default,
    beta: float = BETA.default,
    variant: str = VARIANT.default,
    fphl: bool = FPHL.default,
    fael: str | bool = FAEL.default,
    placement: str = "server",
    **settings: Any,
) -> FairStrategy:
    """FedHEAL (CVPR 2024) as a strategy.

    With `placement="client"` the clients (with `fedheal.flower.client`) keep their own sign counts and mask their own
    updates. The server then keeps four numbers per client instead of a byte per client and parameter. The results are
    the same.

    Args:
        tau: The least consistency of an entry that is kept.
        beta: How fast weights follow distances.
        variant: `"paper"` or `"released"`.
        fphl: Whether to mask updates.
        fael: `"momentum"`, `"exact"`, `"exact-reg"` or False, as for `fedheal.aggregate.fedheal`.
        placement: `"server"` or `"client"`: who masks.
        **settings: The settings of `FairStrategy`.

    Returns:
        The strategy.

    Raises:
        ValueError: If a parameter is out of range, or if the mask cannot be placed on the clients.

    >>> FedHEAL(tau=0.4).name
    'fedavg+fedheal:tau=0.4'
    """
    check_among("placement", placement, PLACEMENTS)
    method = methods.get("fedheal", tau=tau, beta=beta, variant=variant, fphl=fphl, fael=fael)
    if placement == "server":
        return FairStrategy(method, **settings)
    if variant != "paper" or not fphl or fael not in ("momentum", False):
        scope = "variant = 'paper' with fphl on and fael 'momentum' or False"
        raise ValueError(f"placement = 'client' is for {scope}: the others need more than a client's own history")
    weights = fael_weights(beta) if fael else chain()
    weights_only = Method(local=(), aggregator=Aggregator(weights), name=f"{method.name} (on clients)")
    return FairStrategy(weights_only, placement="client", tau=tau, **settings)


@check_preset_arguments
def AFL(
    *,
    gamma: float = AFL_GAMMA.default,
    floor: float = AFL_FLOOR.default,
    reset: bool = AFL_RESET.default,
    **settings: Any,
) -> FairStrategy:
    """AFL (Mohri et al. 2019) as a strategy.

    Clients must send the `loss` of the received model, as `fedheal.flower.client` does.

    Args:
        gamma: How fast weights climb; 0 is uniform averaging.
        floor: The least weight, as a share of 1/M, M the clients ever seen.
        reset: Start from equal weights every round.
        **settings: The settings of `FairStrategy`.

    Returns:
        The strategy.
    """
    return FairStrategy(methods.get("afl", gamma=gamma, floor=floor, reset=reset), **settings)


@check_preset_arguments
def QFFL(*, q: float = QFFL_Q.default, mode: str = QFFL_MODE.default, **settings: Any) -> FairStrategy:
    """q-FFL (Li et al. 2020) as a strategy.

    Clients must send the `loss` of the received model and, by default, `reach`, the effective step of their local
    steps. Without momentum it is the learning rate times their number (see `fedheal.local.term.effective_step`).
    `mode="qfedavg"` needs their learning rate as `lr` instead, `mode="reweight"` neither. `fedheal.flower.client.train`
    sends what is asked for.

    Args:
        q: The power of the loss; 0 is uniform averaging.
        mode: `"qfedavg_eff"`, `"qfedavg"` or `"reweight"`, as for `fedheal.aggregate.qffl`.
        **settings: The settings of `FairStrategy`.

    Returns:
        The strategy.
    """
    return FairStrategy(methods.get("qffl", q=q, mode=mode), **settings)


@check_preset_arguments
def FedFV(*, alpha: float = FEDFV_ALPHA.default, tau: int = FEDFV_TAU.default, **settings: Any) -> FairStrategy:
    """FedFV (Wang et al. 2021) as a strategy. Clients must send the `loss` of the received model.

    Args:
        alpha: Share of the clients with the largest losses whose updates stay as they are.
        tau: Rounds whose absent clients' conflicts count.
        **settings: The settings of `FairStrategy`.

    Returns:
        The strategy.
    """
    return FairStrategy(methods.get("fedfv", alpha=alpha, tau=tau), **settings)


@check_preset_arguments
def Uniform(**settings: Any) -> FairStrategy:
    """The plain mean over clients as a strategy, whatever their numbers of examples.

    Args:
        **settings: The settings of `FairStrategy`.

    Returns:
        The strategy.
    """
    return FairStrategy(methods.get("uniform"), **settings)
