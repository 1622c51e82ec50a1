"""FedISM by hand and against numpy: GSAM's gradient, the sharpness that clients report, and the weights that follow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedheal.aggregate import Aggregator
from fedheal.aggregate.whole.fedism import fedism_stage
from fedheal.engine import serial
from fedheal.local.fedism import FedISM, subtract_orthogonal_part
from local import softmax
from local.quadratic import make_packed, make_term_context, vector
from local.rounds import AggregatorRounds, make_federation, run_rounds

RNG = np.random.default_rng(0)
W, X, Y = RNG.normal(size=(3, 5)), RNG.normal(size=(7, 5)), RNG.integers(3, size=7)


def test_the_orthogonal_part_by_hand() -> None:
    """g = (1, 1) and g' = (2, 0): along g' lies (1, 0), across it (0, 1). Less a tenth of that: (2, -0.1)."""
    (first, second) = subtract_orthogonal_part([vector(2.0), vector(0.0)], [vector(1.0), vector(1.0)], 0.1)
    assert (first.item(), second.item()) == pytest.approx((2.0, -0.1))


def test_steps_equal_those_in_numpy() -> None:
    w = W.copy()
    for _ in range(4):
        w -= 0.1 * softmax.compute_gsam_gradient(w, X, Y, 0.3, 0.2)
    local_model, _ = softmax.train(
        FedISM(0.3, 0.2), softmax.make_linear(W), torch.from_numpy(X), torch.from_numpy(Y), steps=4
    )
    assert np.allclose(local_model.params.numpy(), w.ravel(), atol=1e-12)


def test_the_sharpness_by_hand() -> None:
    """F = 1/2 |w|^2 at (3, 4): the gradient has length 5, and 0.5 along it is (3.3, 4.4). 5.5^2 / 2 - 5^2 / 2 = 2.625."""
    ctx = make_term_context(
        FedISM(),
        make_packed(3.0, 4.0),
        gradient=lambda at: at,
        evaluate=lambda at: (float(at.params @ at.params) / 2, 0.5),
    )
    assert FedISM(rho=0.5).metrics(ctx, make_packed(9.0, 9.0)) == {"sharpness": pytest.approx(2.625)}
    assert FedISM(rho=0.0).metrics(ctx, make_packed(9.0, 9.0)) == {"sharpness": 0.0}


def test_the_engine_evaluates_on_the_clients_training_examples() -> None:
    """And the sharpness of the received model does not depend on where training ended."""
    fed = make_federation(method="fedism:rho=0.2")
    local, model = fed.local_training, run_rounds(fed, 1).model
    (ctx,) = serial.make_contexts(local, model, ({},), serial.Task("dark-0", 2, ({},)), None)
    assert ctx.evaluate(model) == serial.evaluate_split(local, model, local.examples["dark-0"])
    result = serial.train_client(local, model, ({},), serial.Task("dark-0", 2, ({},)))
    sharpness = local.terms[0].metrics(ctx, model)["sharpness"]
    assert result.reply.metrics["sharpness"] == sharpness > 0


def test_weights_by_hand() -> None:
    """Sharpness 1 and 2 with q = 2: shares 1/5 and 4/5. Then equal, halfway: 0.35 and 0.65. Then 0 to 1: 0.175 and 0.825."""
    weights = AggregatorRounds(Aggregator(fedism_stage(2.0, 0.5)))
    assert weights("ab", sharpness=[1.0, 2.0]) == pytest.approx([0.2, 0.8])
    assert weights.report["sharpness"] == {"a": 1.0, "b": 2.0}
    assert weights("ab", sharpness=[3.0, 3.0]) == pytest.approx([0.35, 0.65])
    assert weights("ab", sharpness=[-1.0, 3.0]) == pytest.approx([0.175, 0.825])


def test_a_cohort_redistributes_the_weight_that_it_holds() -> None:
    """a, b and c have 0.1, 0.4 and 0.5. Of the 0.6 of a and c, a's part moves from 1/6 halfway to 1/2: 1/3 of 0.6 is 0.2.

    A newcomer starts with 1/4 and the others shrink to 3/4 of 0.2, 0.4 and 0.4; alone with c it moves from 5/11 halfway to 0.9.
    """
    weights = AggregatorRounds(Aggregator(fedism_stage(1.0, 0.5)))
    weights("abc", sharpness=[1.0, 4.0, 5.0])
    assert weights("ac", sharpness=[7.0, 7.0]) == pytest.approx([1 / 3, 2 / 3])
    assert weights("cd", sharpness=[1.0, 9.0]) == pytest.approx([(6 / 11 + 0.1) / 2, (5 / 11 + 0.9) / 2])
    assert weights("ab", sharpness=[1.0, 1.0]) == pytest.approx([(1 / 3 + 0.5) / 2, (2 / 3 + 0.5) / 2])


def test_extreme_sharpness_leaves_every_client_a_weight() -> None:
    weights = AggregatorRounds(Aggregator(fedism_stage(10.0, 1.0)))
    assert all(0 < weight <= 1 for weight in weights("ab", sharpness=[0.0, 1e300]))
    assert weights("a", sharpness=[0.0]) == [1.0]
