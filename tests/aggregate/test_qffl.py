"""q-FFL: weights and shrinkage by hand, against the paper's own form, and at the ends of its parameters."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from fedheal import Layout, Packed, Updates
from fedheal.aggregate import Aggregator, chain, qffl, uniform
from fedheal.aggregate.reduce import mean, mean_as_released
from fedheal.aggregate.registry import STAGES

MODES = ["qfedavg_eff", "qfedavg", "reweight"]
KERNELS = ["reference", "cpu"]


def apply_one_round(aggregator, rows, loss, start=None, **metrics):
    rows = torch.as_tensor(rows, dtype=torch.float64)
    updates = Updates("abcdefgh"[: len(rows)], rows, [5, *range(1, len(rows))], metrics={"loss": loss, **metrics})
    model = torch.zeros(rows.shape[1], dtype=torch.float64) if start is None else start
    return aggregator.apply(model, updates, aggregator.init(Layout.flat(rows.shape[1])))


@pytest.mark.parametrize("kernel", KERNELS)
def test_weights_by_hand(kernel):
    # Losses 1 and 2. q = 1: 1/3, 2/3: W = 1/3 * 3 + 2/3 * 6 = 5.  q = 2: 1/5, 4/5: W = 0.6 + 4.8 = 5.4.
    for q, weights, model in ((1, [1 / 3, 2 / 3], 5), (2, [0.2, 0.8], 5.4)):
        out = apply_one_round(qffl(q=q, mode="reweight", kernel=kernel), [[3], [6]], [1, 2])
        assert out.weights.tolist() == pytest.approx(weights, rel=1e-9)
        assert out.model.tolist() == pytest.approx([model], rel=1e-9)
    assert out.report["loss"] == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize("kernel", KERNELS)
def test_shrinkage_by_hand(kernel):
    # q = 1, losses 1 and 2, updates (3, 0) and (0, 6): |D|^2 = 9, 36.  Numerator 1 * (3, 0) + 2 * (0, 6) = (3, 12).
    # lr 0.1, L = 10: denominator 1 (1 + 10*9/1) + 2 (1 + 10*36/2) = 91 + 362 = 453.   W = (3, 12) / 453.
    # reach 9 and 36, L = 1/9, 1/36:  1 (1 + 1) + 2 (1 + 1/2) = 5.  W = (0.6, 2.4), which is 3/5 of the mean (1, 4).
    rows = [[3, 0], [0, 6]]
    out = apply_one_round(qffl(mode="qfedavg", kernel=kernel), rows, [1, 2], lr=[0.1, 0.1])
    assert out.model.tolist() == pytest.approx([3 / 453, 12 / 453], rel=1e-8)
    assert out.weights.tolist() == pytest.approx([1 / 3, 2 / 3], rel=1e-9)
    out = apply_one_round(qffl(kernel=kernel), rows, [1, 2], reach=[9.0, 36.0])
    assert out.model.tolist() == pytest.approx([0.6, 2.4], rel=1e-8)
    assert out.report["scale"] == pytest.approx(0.6, rel=1e-8)


@pytest.mark.parametrize("q", [0.1, 1.0, 2.5])
def test_it_is_the_papers_update(q):
    """`Delta_m = F^q L (W - w_m)`, `h_m = q F^(q-1) |L (W - w_m)|^2 + L F^q`, `W - sum Delta / sum h`."""
    rng = np.random.default_rng(0)
    rows, loss, lr = rng.normal(size=(5, 7)), rng.uniform(0.2, 3, 5), 0.05
    start = torch.from_numpy(rng.normal(size=7))
    gradients = -rows / lr
    h = q * loss ** (q - 1) * (gradients**2).sum(axis=1) + loss**q / lr
    expected = start.numpy() - (loss[:, None] ** q * gradients).sum(axis=0) / h.sum()
    out = apply_one_round(qffl(q=q, mode="qfedavg"), rows, loss, start, lr=[lr] * 5)
    np.testing.assert_allclose(out.model, expected, rtol=1e-8)


def follow_quadratics(mode, q, h, steps, rounds):
    """Return how far the model is from 0 after each round, for clients `1/2 (w - o)^2` with o of 1 and -1.

    K steps of gradient descent with step h cover `a = 1 - (1 - h)^K` of the way from w to o; H is 1, so reach is `K h`.
    """
    w, a = torch.tensor([1e-3], dtype=torch.float64), 1 - (1 - h) ** steps
    metrics = {"lr": [h] * 2, "reach": [h * steps] * 2}
    errors = [float(w)]
    for _ in range(rounds):
        way = np.array([1.0, -1.0]) - float(w)
        w = apply_one_round(qffl(q=q, mode=mode), a * way[:, None], 0.5 * way**2, w, **metrics).model
        errors.append(float(w))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q", "h", "steps"), [(1.0, 0.2, 3), (1.0, 0.2, 8), (1.0, 0.3, 10), (0.5, 0.2, 5), (5.0, 0.1, 3)]
)
def test_reweighting_settles_only_where_the_way_covered_is_short_enough(q, h, steps):
    """Near 0 a round multiplies the error by `1 - a (1 + 2q)`, with the curvature term by `1 - a (1 + 2q) / (1 + 2q a^2 L)`."""
    a = 1 - (1 - h) ** steps
    for mode, inverse_step in (("reweight", 0.0), ("qfedavg_eff", 1 / (h * steps)), ("qfedavg", 1 / h)):
        factor = 1 - a * (1 + 2 * q) / (1 + 2 * q * a**2 * inverse_step)
        errors = follow_quadratics(mode, q, h, steps, 400)
        assert errors[1] == pytest.approx(factor * errors[0], rel=0.01, abs=1e-5)
        if mode == "reweight" and a * (1 + 2 * q) > 2:
            assert all(x * y < 0 for x, y in pairwise(errors[-20:]))  # it takes turns
            assert min(map(abs, errors[-20:])) > 0.1
        else:
            assert abs(factor) < 1
            assert max(map(abs, errors[-20:])) < 1e-6


def test_the_effective_step_does_not_settle_q_1_where_clients_train_far_beyond_their_optimum():
    assert abs(follow_quadratics("qfedavg_eff", 1.0, 0.5, 7, 400)[-1]) < 1e-6  # reach 3.5
    assert abs(follow_quadratics("qfedavg_eff", 1.0, 0.5, 10, 400)[-1]) > 0.1  # reach 5
    assert abs(follow_quadratics("qfedavg_eff", 0.5, 0.5, 100, 400)[-1]) < 1e-6


def test_the_paper_would_all_but_stop_after_many_steps_and_the_effective_constant_does_not():
    # |D| = 0.3, F = 1, lr 0.001: 1/(1 + 1000 * 0.09) = 1/91. 100 steps of momentum 0.9 reach 0.001 * 910: 1/(1 + 0.09/0.91).
    out = apply_one_round(qffl(mode="qfedavg"), [[0.3]], [1], lr=[0.001])
    assert out.report["scale"] == pytest.approx(1 / 91, rel=1e-6)
    out = apply_one_round(qffl(mode="qfedavg_eff"), [[0.3]], [1], reach=[0.91])
    assert out.report["scale"] == pytest.approx(0.91, abs=1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mode", MODES)
def test_q_0_is_uniform_averaging_to_the_bit(mode, kernel):
    rng = np.random.default_rng(1)
    rows, metrics = rng.normal(size=(6, 30)), {"lr": [0.1] * 6, "reach": rng.uniform(0.1, 1, 6)}
    loss = [0.0, *rng.uniform(0, 3, 5)]
    ours = apply_one_round(qffl(q=0.0, mode=mode, kernel=kernel), rows, loss, **metrics)
    theirs = apply_one_round(uniform(kernel=kernel), rows, loss)
    assert torch.equal(ours.model, theirs.model)
    assert torch.equal(ours.weights, theirs.weights)


@pytest.mark.parametrize("mode", MODES)
def test_extreme_losses(mode):
    metrics = {"lr": [1e-3] * 3, "reach": [1.0] * 3}
    for q, loss in ((1.0, [0, 0, 0]), (5.0, [0, 1e-8, 1e300]), (500.0, [1, 2, 3]), (0.1, [0, 1, 1e300])):
        out = apply_one_round(qffl(q=q, mode=mode), [[1.0], [2.0], [1e100]], loss, **metrics)
        assert torch.isfinite(out.model).all()
        assert out.weights.sum().item() == pytest.approx(1, abs=1e-12)
    assert apply_one_round(qffl(mode="reweight"), [[1.0], [2.0]], [0, 0]).model.tolist() == [1.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shrunk_step_is_rounded_once(dtype):
    """The exact result is rounded to the model's dtype, and not a mean that was rounded before."""
    rng = np.random.default_rng(2)
    rows, start = rng.normal(size=(3, 200)), torch.from_numpy(rng.normal(size=200)).to(dtype)
    out = apply_one_round(qffl(mode="qfedavg_eff"), rows, [1, 2, 3], start, reach=[1e4] * 3)
    exact = start.double() + out.report["scale"] * torch.from_numpy(out.weights.numpy() @ rows)
    assert 0 < out.report["scale"] < 1
    assert (out.model == exact.to(dtype)).double().mean() > 0.98  # the rest are ties of the sums above


@pytest.mark.parametrize("released", [False, True])
def test_buffers_are_not_shrunk(released):
    layout = Layout.of(torch.nn.BatchNorm1d(1))
    model = Packed(torch.zeros(2), torch.ones(2), torch.zeros(1, dtype=torch.int64))
    metrics = {"loss": [1.0, 3.0], "reach": [1.0, 1.0]}
    updates = Updates("ab", torch.ones(2, 2), [1, 1], [[4.0, 4.0], [8.0, 8.0]], [[10], [10]], metrics)
    aggregator = Aggregator(STAGES["qffl"](mode="qfedavg_eff"), mean_as_released if released else mean)
    out = aggregator.apply(model, updates, aggregator.init(layout))
    # Weights 1/4, 3/4: buffers 7. Scale: 4 / (1 * 3 + 3 * (1 + 2/3)) = 1/2: parameters 1/2.
    assert out.model.buffers.tolist() == pytest.approx([7, 7], rel=1e-6)
    assert out.model.params.tolist() == pytest.approx([0.5, 0.5], rel=1e-6)
    assert out.model.counters.tolist() == [10]


@pytest.mark.parametrize("kernel", KERNELS)
def test_with_fphl_weights_and_norms_are_those_of_what_is_kept(kernel):
    # Round 2 at tau 0.6: a's entry 1 has turned and is left out: b alone moves it, by 3. Kept |D|^2: 1 and 9 + 9.
    # Losses 1, 2, reach 1: scale 3 / (1 (1 + 1) + 2 (1 + 18/2)) = 3/22.  Mean: (3, 1/3 * 1 + 2/3 * 3) = (3, 7/3).
    stage = chain(STAGES["qffl"](mode="qfedavg_eff"), STAGES["fphl"](tau=0.6))
    aggregator = Aggregator(stage, kernel=kernel)
    state = aggregator.init(Layout.flat(2))
    metrics = {"loss": [1, 2], "reach": [1, 1]}
    start = torch.zeros(2, dtype=torch.float64)
    state = aggregator.apply(
        start, Updates("ab", torch.ones(2, 2, dtype=torch.float64), [1, 1], metrics=metrics), state
    ).state
    rows = torch.tensor([[-1, 1], [3, 3]], dtype=torch.float64)
    out = aggregator.apply(start, Updates("ab", rows, [1, 1], metrics=metrics), state)
    assert out.model.tolist() == pytest.approx([3 * 3 / 22, 7 / 3 * 3 / 22], rel=1e-8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"q": -1.0}, "q = -1.0: use a finite number that is not negative"),
        ({"q": float("nan")}, "q = nan: use"),
        ({"q": "1"}, "q = '1': use"),
        ({"mode": "exact"}, "mode = 'exact': use one of"),
        ({"mode": 1}, "mode = 1: use one of"),
    ],
)
def test_parameters_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        qffl(**settings)


def test_each_mode_says_which_metrics_it_needs():
    needs = [STAGES["qffl"](mode=mode).needs for mode in MODES]
    assert needs == [{"loss", "reach"}, {"loss", "lr"}, {"loss"}]
    with pytest.raises(ValueError, match="needs the client metric 'reach'"):
        apply_one_round(qffl(), [[1.0]], [1])
