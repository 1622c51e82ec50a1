"""FedLESAM by hand and against numpy: where the gradient is taken, what is sent, and what the client keeps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedheal.engine.serial import SerialEngine
from fedheal.local.fedlesam import FedLESAM
from fedheal.simulate.round import run_round, sample_cohort
from local import softmax
from local.quadratic import make_gradient, make_packed, run_client, vector
from local.rounds import make_federation, run_rounds

RNG = np.random.default_rng(0)
W, X, Y = RNG.normal(size=(3, 5)), RNG.normal(size=(7, 5)), RNG.integers(3, size=7)


def test_one_step_by_hand() -> None:
    """F = 1/2 (w - 3)^2 at W = 1, and the client last received W_old = (1, 5): e = 0.5 (0, 1), since rho = 0.5.

    From (1, 1) the gradient is taken at (1, 1.5), which is (-2, -1.5): with lr 0.1 the client trains to (1.2, 1.65) and sends
    (1.2, 1.15).
    """
    term = FedLESAM(0.5)
    scratch: dict[str, object] = {}
    local, slot, message = run_client(
        term,
        make_packed(1.0, 1.0),
        make_gradient(vector(3.0, 3.0)),
        slot={"received": vector(1.0, 5.0)},
        scratch=scratch,
    )
    assert local.params.tolist() == pytest.approx([1.2, 1.65])
    assert (local.params - scratch["perturbation"]).tolist() == pytest.approx([1.2, 1.15])
    assert slot["received"].tolist() == [1.0, 1.0]
    assert message == {}


def test_steps_equal_those_in_numpy() -> None:
    old = W + RNG.normal(size=W.shape)
    e = 0.3 * (old - W) / math.sqrt(((old - W) ** 2).sum())
    w, v = W.copy(), np.zeros_like(W)
    for _ in range(4):
        v = 0.9 * v + softmax.compute_gradient(w + e, X, Y)
        w -= 0.1 * v
    x, y, slot = torch.from_numpy(X), torch.from_numpy(Y), {"received": torch.from_numpy(old.ravel())}
    local_model, _ = softmax.train(FedLESAM(0.3), softmax.make_linear(W), x, y, steps=4, momentum=0.9, slot=slot)
    assert np.allclose(local_model.params.numpy(), w.ravel(), atol=1e-12)


@pytest.mark.parametrize("slot", [{}, {"received": torch.from_numpy(W.ravel())}], ids=["first round", "same model"])
def test_without_a_difference_there_is_no_perturbation(slot: dict[str, torch.Tensor]) -> None:
    local_model, _ = softmax.train(
        FedLESAM(0.3), softmax.make_linear(W), torch.from_numpy(X), torch.from_numpy(Y), slot=slot
    )
    assert np.allclose(local_model.params.numpy(), (W - 0.1 * softmax.compute_gradient(W, X, Y)).ravel(), atol=1e-14)


def test_a_client_keeps_the_model_that_it_received_last() -> None:
    """Two of five clients take part in a round. Each has the model of its own last round, not that of the last round."""
    fed = make_federation(method="fedlesam", participation=0.4, rounds=4)
    state, models, latest = run_rounds(fed, 0), {}, {}
    for number in range(1, 5):
        models[number] = state.model.params.clone()
        latest |= dict.fromkeys(sample_cohort(fed, state.seed, number), number)
        state, _ = run_round(fed, state, SerialEngine(fed.local_training), evaluate=False)
    assert len(set(latest.values())) > 1
    for name, number in latest.items():
        assert torch.equal(state.terms[0].slots[name]["received"], models[number])
