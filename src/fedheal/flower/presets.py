"""Named strategies: one call each, never a class. Every other setting is `FairStrategy`'s."""

from __future__ import annotations

from typing import Any

from fedheal import methods
from fedheal.aggregate import Aggregator
from fedheal.aggregate import registry as stages
from fedheal.core.checks import check_among
from fedheal.flower.settings import PLACEMENTS
from fedheal.flower.strategy import FairStrategy
from fedheal.methods import Method


def FedHEAL(
    tau: float = 0.3,
    beta: float = 0.4,
    variant: str = "paper",
    fphl: bool = True,
    fael: str | bool = "momentum",
    placement: str = "server",
    **settings: Any,
) -> FairStrategy:
    """FedHEAL (CVPR 2024); see `fedheal.aggregate.fedheal`.

    `placement="client"`: the clients (with `fedheal.flower.client`) keep their own sign counts and mask their own updates; the
    server keeps four numbers per client instead of a byte per client and parameter. The results are the same.

    >>> FedHEAL(tau=0.4).name
    'fedavg+fedheal:tau=0.4'
    """
    check_among("placement", placement, PLACEMENTS)
    whole = methods.get("fedheal", tau=tau, beta=beta, variant=variant, fphl=fphl, fael=fael)
    if placement == "server":
        return FairStrategy(whole, **settings)
    if variant != "paper" or not fphl or fael not in ("momentum", False):
        raise ValueError(
            "placement = 'client' is for variant = 'paper' with fphl on and fael 'momentum' or False: the others need "
            "more than a client's own history"
        )
    weights = stages.fael(beta) if fael else stages.chain()
    method = Method((), Aggregator(weights), f"{whole.name} (on clients)")
    return FairStrategy(method, placement="client", tau=tau, **settings)


def AFL(gamma: float = 0.01, floor: float = 1e-3, reset: bool = False, **settings: Any) -> FairStrategy:
    """AFL (Mohri et al. 2019); clients must send the `loss` of the received model, as `fedheal.flower.client` does."""
    return FairStrategy(methods.get("afl", gamma=gamma, floor=floor, reset=reset), **settings)


def QFFL(q: float = 1.0, mode: str = "reweight", **settings: Any) -> FairStrategy:
    """q-FFL (Li et al. 2020); clients must send the `loss` of the received model.

    `mode="qfedavg"` also needs their learning rate as `lr`, `mode="qfedavg_eff"` how far their steps reach as `reach`:
    `fedheal.flower.client.train` sends what is asked for.
    """
    return FairStrategy(methods.get("qffl", q=q, mode=mode), **settings)


def FedFV(alpha: float = 0.1, tau: int = 1, **settings: Any) -> FairStrategy:
    """FedFV (Wang et al. 2021); clients must send the `loss` of the received model."""
    return FairStrategy(methods.get("fedfv", alpha=alpha, tau=tau), **settings)


def Uniform(**settings: Any) -> FairStrategy:
    """The plain mean over clients, whatever their numbers of examples."""
    return FairStrategy(methods.get("uniform"), **settings)
