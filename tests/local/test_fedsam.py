"""FedSAM by hand and against numpy: the gradient at the worst point nearby, and nothing else of that point."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedheal.local.fedsam import FedSAM
from fedheal.local.term import Term
from local import softmax
from tiny_data import SIDE, conv_batchnorm

RNG = np.random.default_rng(0)
W, X, Y = RNG.normal(size=(3, 5)), RNG.normal(size=(7, 5)), RNG.integers(3, size=7)


def test_one_step_by_hand() -> None:
    """Logits w = (0, 0), x = 1, class 0: the gradient is (-1/2, 1/2), of length 1/sqrt 2.

    With rho = sqrt 2 / 4 the worst point nearby is (-1/4, 1/4). There p = 1 / (1 + e^0.5) = 0.377541 for class 0, and the
    gradient (p - 1, 1 - p) = (-0.622459, 0.622459). A step of 0.1 from (0, 0) goes to (0.0622459, -0.0622459).
    """
    module = softmax.make_linear(np.zeros((2, 1)))
    local_model, _ = softmax.train(FedSAM(math.sqrt(2) / 4), module, torch.ones(1, 1).double(), torch.tensor([0]))
    assert local_model.params.tolist() == pytest.approx([0.0622459, -0.0622459], abs=1e-7)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_equal_those_in_numpy(momentum: float) -> None:
    w, v = W.copy(), np.zeros_like(W)
    for _ in range(4):
        v = momentum * v + softmax.compute_sam_gradient(w, X, Y, 0.3)
        w -= 0.1 * v
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    local_model, _ = softmax.train(FedSAM(0.3), softmax.make_linear(W), x, y, steps=4, momentum=momentum)
    assert np.allclose(local_model.params.numpy(), w.ravel(), atol=1e-12)


def test_parameters_return_from_the_worst_point_bit_for_bit() -> None:
    local_model, ctx = softmax.train(
        FedSAM(0.3), softmax.make_linear(W), torch.from_numpy(X), torch.from_numpy(Y), lr=0.0
    )
    assert local_model.params.numpy().tobytes() == W.tobytes()
    assert "batch" not in ctx.scratch


def test_running_statistics_and_counters_follow_the_first_pass_only() -> None:
    """Those of a step of FedAvg. The parameters differ."""
    x, y = torch.rand(8, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    local_models = []
    for term in (Term(), FedSAM(0.5)):
        torch.manual_seed(0)
        local_models.append(softmax.train(term, conv_batchnorm(3), x, y)[0])
    assert torch.equal(local_models[0].buffers, local_models[1].buffers)
    assert local_models[1].counters.tolist() == [1]
    assert not torch.equal(local_models[0].params, local_models[1].params)


def test_a_gradient_of_zero_has_no_direction() -> None:
    local_model, _ = softmax.train(
        FedSAM(0.5), softmax.make_linear(W), torch.zeros(2, 5).double(), torch.tensor([0, 1])
    )
    assert local_model.params.numpy().tobytes() == W.tobytes()
