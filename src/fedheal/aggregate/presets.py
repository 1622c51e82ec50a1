"""Named aggregators: one call each, never a class."""

from __future__ import annotations

from fedheal.aggregate import reduce, stages
from fedheal.aggregate.stage import Aggregator, Reducer, chain


def fedavg(*, on_bad_update: str = "raise", kernel: str = "auto") -> Aggregator:
    """McMahan et al. 2017: the mean, weighted by this round's examples."""
    return Aggregator(chain(), on_bad_update=on_bad_update, kernel=kernel)


def uniform(*, on_bad_update: str = "raise", kernel: str = "auto") -> Aggregator:
    """The plain mean over clients."""
    return Aggregator(stages.uniform(), on_bad_update=on_bad_update, kernel=kernel)


def fedheal(
    tau: float = 0.3,
    beta: float = 0.4,
    variant: str = "paper",
    fphl: bool = True,
    fael: str | bool = "momentum",
    *,
    on_bad_update: str = "raise",
    kernel: str = "auto",
) -> Aggregator:
    """FedHEAL (CVPR 2024): FPHL's mask and FAEL's weights.

    `tau`: the least consistency of an entry that is kept. `beta`: how fast weights follow distances. `variant`: `"paper"`
    or `"released"` (the authors' code). `fphl=False`: everything is kept. `fael`: `"momentum"`, `"exact"` (the paper's
    objective itself, no momentum), `"exact-reg"` (the same held towards uniform weights) or `False` (example shares).

    >>> import torch
    >>> from fedheal import Layout, Updates
    >>> aggregator = fedheal(tau=0.3, beta=0.4)
    >>> updates = Updates(["a", "b"], torch.tensor([[1.0, 1.0], [-1.0, 3.0]]), num_examples=[30, 10])
    >>> out = aggregator.apply(torch.zeros(2), updates, aggregator.init(Layout.flat(2)))
    >>> [round(w, 4) for w in out.weights.tolist()]  # distances 2 and 10: 3/4 + 2/12 * 0.4 to 1/4 + 10/12 * 0.4, over 1.4
    [0.5833, 0.4167]
    """
    stage = stages.fedheal(tau, beta, variant, fphl, fael)
    return Aggregator(stage, reducer(variant), on_bad_update, kernel)


def reducer(variant: str) -> Reducer:
    """The released code moves buffers and counters like parameters; the paper speaks of parameters alone."""
    return reduce.mean_of_everything if variant == "released" else reduce.mean
