"""Named aggregators: one call each, never a class."""

from __future__ import annotations

from fedheal.aggregate import reduce
from fedheal.aggregate.stage import Aggregator, Stage, chain
from fedheal.aggregate.stages import by_examples, consistency, cumulative, exact, momentum
from fedheal.aggregate.stages import uniform as uniform_stage

FAEL = ("momentum", "exact", "exact-reg", False)
VARIANTS = ("paper", "released")


def fedavg(*, on_bad_update: str = "raise", kernel: str = "auto") -> Aggregator:
    """McMahan et al. 2017: the mean, weighted by this round's examples."""
    return Aggregator(chain(by_examples()), on_bad_update=on_bad_update, kernel=kernel)


def uniform(*, on_bad_update: str = "raise", kernel: str = "auto") -> Aggregator:
    """The plain mean over clients."""
    return Aggregator(chain(uniform_stage()), on_bad_update=on_bad_update, kernel=kernel)


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
    _check_share("tau", tau)
    _check_share("beta", beta)
    if variant not in VARIANTS:
        raise ValueError(f"variant = {variant!r}: use one of {VARIANTS}")
    if not any(fael is choice or fael == choice for choice in FAEL):
        raise ValueError(f"fael = {fael!r}: use one of {FAEL}")
    if not isinstance(fphl, bool):
        raise ValueError(f"fphl = {fphl!r}: use True or False")
    stages = [_weights(fael, beta, variant)]
    if fphl and not (variant == "paper" and tau == 0):
        stages.append(consistency(tau, variant))
    reducer = reduce.mean if variant == "paper" else reduce.mean_of_everything
    return Aggregator(chain(*stages), reducer, on_bad_update, kernel)


def _weights(fael: str | bool, beta: float, variant: str) -> Stage:
    if fael == "exact":
        return exact()
    if fael == "exact-reg":
        return exact(ridge=1.0, towards="uniform", floor=0.2)
    if fael is False:
        return by_examples()
    if variant == "released":
        return cumulative(beta)
    return momentum(beta) if beta > 0 else by_examples()


def _check_share(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} = {value!r}: use a number from 0 to 1")
