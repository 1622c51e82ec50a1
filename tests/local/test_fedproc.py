"""FedProc by hand."""

from __future__ import annotations

import math

import pytest

from fedheal.engine import serial
from fedheal.local.fedproc import FedProc
from fedheal.simulate.round import initial_state
from local.prototype_inputs import AXES, make_batch, make_context
from local.rounds import make_federation


@pytest.mark.parametrize(("number", "alpha"), [(1, 1.0), (2, 0.75), (3, 0.5), (4, 0.25), (5, 0.0)])
def test_fedproc_by_hand(number: int, alpha: float) -> None:
    """Cosines of (3, 0) to the axes: 1 and 0; of (0, 2): 0 and 1. Both of class 0, so L_con is the mean of
    log(1 + e^-1) = 0.313262 and log(1 + e) = 1.313262: 0.813262. In all alpha L_con + (1 - alpha) CE with CE = 2.
    """
    b = make_batch([[3.0, 0.0], [0.0, 2.0]], [0, 0])
    added = FedProc().prototype_loss(b, b.features, make_context(AXES, round=number, rounds=5))
    assert 2.0 + added.item() == pytest.approx(alpha * 0.813262 + (1 - alpha) * 2.0, rel=1e-5)


def test_fedprocs_temperature() -> None:
    """Halved, it doubles the cosines: log(1 + e^-2)."""
    b = make_batch([[3.0, 0.0]], [0])
    added = FedProc(temperature=0.5).prototype_loss(b, b.features, make_context(AXES))
    assert 2.0 + added.item() == pytest.approx(math.log1p(math.exp(-2)), rel=1e-5)


def test_fedproc_leaves_classes_without_a_prototype_out_of_the_contrast() -> None:
    """Class 2 is unknown: no part of the sum over classes, and its sample adds 0 to the mean over two."""
    b = make_batch([[3.0, 0.0], [1.0, 1.0]], [0, 2])
    added = FedProc().prototype_loss(b, b.features, make_context(AXES))
    assert 2.0 + added.item() == pytest.approx(0.313262 / 2, rel=1e-5)
    b = make_batch([[1.0, 1.0]], [2])
    assert FedProc().prototype_loss(b, b.features, make_context(AXES)).item() == -2.0


def test_fedprocs_first_round() -> None:
    """Without prototypes: CE alone or, as published, a loss of exactly 0, which falls to (1 - alpha) CE later."""
    b = make_batch([[3.0, 0.0]], [0])
    assert FedProc().prototype_loss(b, b.features, make_context({})) is None
    strict = FedProc(first_round_ce=False)
    assert 2.0 + strict.prototype_loss(b, b.features, make_context({})).item() == 0.0
    assert 2.0 + strict.prototype_loss(b, b.features, make_context({}, round=3, rounds=5)).item() == 1.0


def test_fedproc_without_first_round_ce_learns_nothing_at_first() -> None:
    """Only weight decay moves parameters, so without it nothing does."""
    keys = {"model": "tiny_data:feature_model", "weight_decay": 0.0}
    for first, moves in ((True, True), (False, False)):
        fed = make_federation(method=f"fedproc:first_round_ce={first}", **keys)
        state = initial_state(fed)
        done = serial.train_client(fed.local_training, state.model, ({},), serial.Task("plain-0", 1, ({},)))
        assert bool(done.reply.delta.any()) == moves


def test_a_run_of_one_round() -> None:
    b = make_batch([[3.0, 0.0]], [0])
    assert math.isfinite(FedProc().prototype_loss(b, b.features, make_context(AXES, round=1, rounds=1)).item())
