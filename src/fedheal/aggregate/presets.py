"""Named aggregators: one call each, never a class."""

from __future__ import annotations

from fedheal.aggregate import reduce
from fedheal.aggregate import registry as stages
from fedheal.aggregate.aggregator import Aggregator, Reducer
from fedheal.aggregate.stage import chain
from fedheal.aggregate.weights.afl import afl_weights
from fedheal.aggregate.weights.qffl import qffl_weights
from fedheal.aggregate.weights.uniform import uniform_weights
from fedheal.aggregate.whole.fedfv import fedfv_stage
from fedheal.aggregate.whole.fedpw import fedpw_stage


def fedavg(*, on_bad_update: str = "raise", kernel: str = "auto") -> Aggregator:
    """McMahan et al. 2017: the mean, weighted by this round's examples."""
    return Aggregator(chain(), on_bad_update=on_bad_update, kernel=kernel)


def uniform(*, on_bad_update: str = "raise", kernel: str = "auto") -> Aggregator:
    """The plain mean over clients."""
    return Aggregator(uniform_weights(), on_bad_update=on_bad_update, kernel=kernel)


def afl(
    gamma: float = 0.01,
    floor: float = 1e-3,
    reset: bool = False,
    *,
    on_bad_update: str = "raise",
    kernel: str = "auto",
) -> Aggregator:
    """AFL (Mohri et al. 2019): weights that climb towards the clients with the largest `loss`; see `aggregate/weights/afl.py`.

    >>> import torch
    >>> from fedheal import Layout, Updates
    >>> aggregator = afl(gamma=0.1)
    >>> updates = Updates(["a", "b"], torch.tensor([[1.0], [-1.0]]), [9, 9], metrics={"loss": [1.0, 2.0]})
    >>> out = aggregator.apply(torch.zeros(1), updates, aggregator.init(Layout.flat(1)))
    >>> [round(w, 4) for w in out.weights.tolist()]  # 1/2 + 0.1 and 1/2 + 0.2, less 0.15 each
    [0.45, 0.55]
    """
    return Aggregator(afl_weights(gamma, floor, reset), on_bad_update=on_bad_update, kernel=kernel)


def qffl(q: float = 1.0, mode: str = "reweight", *, on_bad_update: str = "raise", kernel: str = "auto") -> Aggregator:
    """q-FFL (Li et al. 2020): weights in proportion to `loss^q`; see `aggregate/weights/qffl.py` for the modes."""
    return Aggregator(qffl_weights(q, mode), on_bad_update=on_bad_update, kernel=kernel)


def fedfv(alpha: float = 0.1, tau: int = 1, *, on_bad_update: str = "raise", kernel: str = "auto") -> Aggregator:
    """FedFV (Wang et al. 2021): conflicts between updates are projected away; see `aggregate/whole/fedfv.py`."""
    return Aggregator(fedfv_stage(alpha, tau), on_bad_update=on_bad_update, kernel=kernel)


def fedpw(beta: float = 0.3, rho: float = 0.3, *, on_bad_update: str = "raise", kernel: str = "auto") -> Aggregator:
    """FedPW (Guan et al. 2025): small entries dropped, agreement stressed, weights by loss and alignment."""
    return Aggregator(fedpw_stage(beta, rho), on_bad_update=on_bad_update, kernel=kernel)


def fedheal(
    tau: float = 0.3,
    beta: float = 0.4,
    variant: str = "paper",
    fphl: bool = True,
    fael: str | bool = "momentum",
    per_step: bool = False,
    soft: bool = False,
    forget: float = 0.0,
    per_domain: bool = False,
    *,
    on_bad_update: str = "raise",
    kernel: str = "auto",
) -> Aggregator:
    """FedHEAL (CVPR 2024): FPHL's mask and FAEL's weights.

    `tau`: the least consistency of an entry that is kept. `beta`: how fast weights follow distances. `variant`: `"paper"`
    or `"released"` (the authors' code). `fphl=False`: everything is kept. `fael`: `"momentum"`, `"exact"` (the paper's
    objective itself, no momentum), `"exact-reg"` (the same held towards uniform weights) or `False` (example shares).

    Extensions, off by default. `per_step`: distances are taken per unit of `reach`, so that more local steps do not mean more
    weight. `soft`: what is kept counts by its consistency (`soft.py`). `forget`: sign counts fade by this share with each of
    a client's rounds (`forgetting.py`). `per_domain`: weight moves between domains instead of clients (`per_domain.py`).

    >>> import torch
    >>> from fedheal import Layout, Updates
    >>> aggregator = fedheal(tau=0.3, beta=0.4)
    >>> updates = Updates(["a", "b"], torch.tensor([[1.0, 1.0], [-1.0, 3.0]]), num_examples=[30, 10])
    >>> out = aggregator.apply(torch.zeros(2), updates, aggregator.init(Layout.flat(2)))
    >>> [round(w, 4) for w in out.weights.tolist()]  # distances 2 and 10: 3/4 + 2/12 * 0.4 to 1/4 + 10/12 * 0.4, over 1.4
    [0.5833, 0.4167]
    """
    stage = stages.fedheal(tau, beta, variant, fphl, fael, per_step, soft, forget, per_domain)
    return Aggregator(stage, reducer(variant), on_bad_update, kernel)


def reducer(variant: str) -> Reducer:
    """The released code moves buffers and counters like parameters; the paper speaks of parameters alone."""
    return reduce.mean_as_released if variant == "released" else reduce.mean
