"""FedPW: by hand, and against the description written out on whole matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from aggregate.rounds import apply_rounds
from fedheal import Layout, Packed, Updates
from fedheal.aggregate import fedpw, uniform
from fedheal.aggregate.whole.fedpw import compute_drop_rates, mark_smallest

KERNELS = ["reference", "cpu"]


def make_updates(clients, rows, loss):
    return Updates(clients, np.array(rows, float), [1 + i for i in range(len(clients))], metrics={"train_loss": loss})


class ReferenceFedPW:
    """The paper's formulas on whole matrices, with all clients present."""

    def __init__(self, clients, beta, rho, tensors):
        self.beta, self.rho, self.tensors = beta, rho, tensors
        self.p = self.q = np.full(clients, 1 / clients)
        self.dp = self.dq = np.zeros(clients)
        self.t, self.loss, self.alignment = 0, None, None

    def round(self, rows, loss):
        aligned = (rows @ rows.T).sum(axis=1)
        self.loss, self.alignment = self.loss or loss.mean(), self.alignment or aligned.mean()
        b = np.minimum(1, [self.beta * loss.mean() / self.loss, self.beta * aligned.mean() / self.alignment])
        share = np.maximum(aligned, 0) / np.maximum(aligned, 0).sum()
        self.dp, self.dq = (1 - b[0]) * self.dp + b[0] * loss / loss.sum(), (1 - b[1]) * self.dq + b[1] * share
        self.p, self.q = (self.p + self.dp) / (self.p + self.dp).sum(), (self.q + self.dq) / (self.q + self.dq).sum()
        r = self.p.std(ddof=1) / (self.p.std(ddof=1) + self.q.std(ddof=1))
        u = r * self.p + (1 - r) * self.q
        rates = np.minimum(1, self.rho * len(loss) * (1 / loss) / (1 / loss).sum())
        step, start = [], 0
        for size in self.tensors:
            step.append(self.tensor(rows[:, start : start + size].copy(), u, rates))
            start += size
        self.t += 1
        return u, np.concatenate(step)

    def tensor(self, block, u, rates):
        if self.t == 0:
            return u @ block
        lost = []
        for row, rate in zip(block, rates, strict=True):
            drop = np.argsort(np.abs(row), kind="stable")[: math.floor(rate * len(row) + 1e-9)]
            if len(drop):
                lost.append(np.abs(row[drop]).mean())
            row[drop] = 0
        step = u @ block
        z = block / np.maximum(np.linalg.norm(block, axis=1, keepdims=True), 1e-300)
        with np.errstate(invalid="ignore"):
            spread = (z / np.linalg.norm(z, axis=0)).std(axis=0, ddof=1)
        consensus = np.argsort(spread, kind="stable")[: math.floor(self.rho * len(step) + 1e-9)]  # NaN comes last
        if lost and len(consensus) and np.mean(lost) < np.abs(step[consensus]).mean():
            step[consensus] *= 1 + np.mean(lost) / np.abs(step[consensus]).mean()
        return step


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_rounds_by_hand(kernel):
    # beta 0.5, rho 0.5. Round 1: a = (3, 1), b = (1, -1), losses 1 and 3.  Shares of the loss 1/4, 3/4: dp = 1/8, 3/8;
    #   p = (1/2 + dp) / (3/2) = 5/12, 7/12.   K = [[10, 2], [2, 2]]: K 1 = 12, 4: shares 3/4, 1/4: q = 7/12, 5/12.
    #   Equal spread: r = 1/2, u = 1/2, 1/2.  Nothing is dropped: W = (2, 0).
    first_round = make_updates("ab", [[3, 1], [1, -1]], [1, 3])
    # Round 2, one tensor: a = (4, 1), b = (4, -2), losses 1 and 1: mean 1 instead of 2, so b1 = 1/4.
    #   dp = 3/4 (1/8, 3/8) + 1/4 (1/2, 1/2) = 7/32, 13/32;  p = (5/12 + 7/32, 7/12 + 13/32) / (13/8) = 61/156, 95/156.
    #   K = [[17, 14], [14, 20]]: K 1 = 31, 34 against 12, 4: b2 = 1/2 * 65/16 > 1: 1.  dq = 31/65, 34/65, which sums to 1;
    #   q = (7/12 + 31/65, 5/12 + 34/65) / 2 = 827/1560, 733/1560.   |p - 1/2| = 17/156 = 170/1560, |q - 1/2| = 47/1560:
    #   r = 170/217.   u_b = 1/2 + (170 r - 47 (1 - r)) / 1560 = 1/2 + (170^2 - 47^2) / (217 * 1560) = 1/2 + 123/1560.
    #   Each drops half of its two entries: a = (4, 0), b = (4, 0).  The step is (4, 0).  Agreement: entry 1, by all.
    #   a = mean(1, 2) = 3/2, b = 4: entry 1 times 1 + 3/8: 5.5.
    second_round = make_updates("ab", [[4, 1], [4, -2]], [1, 1])
    first, second = apply_rounds(fedpw(beta=0.5, rho=0.5, kernel=kernel), [first_round, second_round], Layout.flat(2))
    assert first.weights.tolist() == pytest.approx([0.5, 0.5], abs=1e-9)
    assert first.model == pytest.approx([2, 0], abs=1e-8)
    assert first.report["dropped"] == {"a": 0, "b": 0}
    assert second.weights.tolist() == pytest.approx([0.5 - 123 / 1560, 0.5 + 123 / 1560], abs=1e-9)
    assert second.model - first.model == pytest.approx([5.5, 0], abs=1e-9)
    assert second.report["dropped"] == pytest.approx({"a": 0.5, "b": 0.5}, abs=1e-9)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("beta", "rho"), [(0.3, 0.3), (0.3, 0.9), (1.0, 0.05), (0.1, 1.0)])
def test_with_everyone_present_it_is_what_is_written(beta, rho, kernel):
    module = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.Linear(7, 3))
    layout = Layout.of(module)
    tensors = [length for _, length in layout.sizes().tensors]
    rng = np.random.default_rng(0)
    common = rng.normal(size=sum(tensors))
    written, cohorts, expected = ReferenceFedPW(5, beta, rho, tensors), [], []
    for t in range(8):
        rows = 0.5 * common + rng.normal(size=(5, len(common))) * rng.uniform(0.3, 2, (5, 1)) * (1.1 if t else 1.5)
        loss = rng.uniform(0.2, 2, 5) * 0.9**t
        cohorts.append(make_updates("abcde", rows, loss))
        expected.append(written.round(rows, loss))
    model = 0
    for (weights, step), out in zip(
        expected, apply_rounds(fedpw(beta, rho, kernel=kernel), cohorts, layout), strict=True
    ):
        model = model + step
        np.testing.assert_allclose(out.weights, weights, rtol=0, atol=1e-8)
        np.testing.assert_allclose(out.model, model, rtol=0, atol=1e-7)


def test_equal_clients_stay_equal_when_some_are_absent_and_some_come_late():
    rng = np.random.default_rng(1)
    aggregator = fedpw()
    state = aggregator.init(Layout.flat(2))
    for t in range(200):
        here = rng.choice(12 if t < 50 else 20, 5, replace=False)
        rows = np.tile(rng.normal(size=2), (5, 1))
        out = aggregator.apply(np.zeros(2), make_updates(here.tolist(), rows, [rng.uniform(0.1, 1)] * 5), state)
        state = out.state
        np.testing.assert_allclose(out.weights, 0.2, rtol=1e-6)


def test_absent_clients_keep_what_they_have():
    cohorts = [make_updates("abc", np.eye(3), [1, 2, 3]), make_updates("ab", np.eye(3)[:2], [3, 1])]
    first, second = (out.state.stage for out in apply_rounds(fedpw(), cohorts, Layout.flat(3)))
    for rule in ("by_loss", "by_alignment"):
        before, after = getattr(first, rule), getattr(second, rule)
        assert after.p[2] == before.p[2]
        assert after.dp[2] == before.dp[2]
        assert after.p.sum() == pytest.approx(1, abs=1e-12)
    assert second.by_loss.p[0] > first.by_loss.p[0]


def test_without_beta_and_rho_it_is_uniform_averaging():
    rng = np.random.default_rng(2)
    cohorts = [
        make_updates("abcd"[: 2 + t % 3], rng.normal(size=(2 + t % 3, 30)), rng.random(2 + t % 3)) for t in range(6)
    ]
    ours = apply_rounds(fedpw(beta=0.0, rho=0.0), cohorts, Layout.flat(30))[-1]
    np.testing.assert_allclose(
        ours.model, apply_rounds(uniform(), cohorts, Layout.flat(30))[-1].model, rtol=0, atol=1e-12
    )


def test_the_traps():
    # A negative alignment (c against a and b), a loss of 0 (a loses everything), tensors too small to drop from, zeros.
    layout = Layout.of(torch.nn.Linear(3, 1))
    cohorts = [
        make_updates("abc", [[1, 1, 1, 1], [2, 1, 1, 1], [-1, -1, 0, 0]], [0.0, 1, 2]),
        make_updates("abc", [[1, 1, 1, 1], [2, 1, 1, 1], [-1, -1, 0, 0]], [0.0, 1, 2]),
        make_updates("abc", np.zeros((3, 4)), [0.0, 0.0, 0.0]),
        make_updates("c", [[1, 2, 3, 4]], [1]),
        make_updates("ab", [[1, 1, 1, 1], [-1, -1, -1, -1]], [1, 1]),
    ]
    outs = apply_rounds(fedpw(), cohorts, layout)
    for out in outs:
        assert np.isfinite(out.model).all()
        assert out.weights.sum().item() == pytest.approx(1, abs=1e-12)
        assert out.weights.min() > 0
    assert outs[1].report["dropped"]["a"] == pytest.approx(0.9, abs=1e-6)
    assert outs[2].model.tolist() == outs[1].model.tolist()
    # Alone, c loses 0.3 of its entries: none of one, none of three (0.9 rounds down), and nothing is stressed.
    assert (outs[3].model - outs[2].model).tolist() == pytest.approx([1, 2, 3, 4], rel=1e-12)


def test_no_updates_at_all_before_the_first_that_moves():
    cohorts = [make_updates("ab", np.zeros((2, 2)), [0.0, 0.0]), make_updates("ab", [[1, 0], [0, 1]], [1, 2])]
    out = apply_rounds(fedpw(), cohorts, Layout.flat(2))[-1]
    assert np.isfinite(out.model).all()
    assert out.state.stage.by_alignment.first > 0


def test_the_smallest_and_how_many():
    rng = np.random.default_rng(3)
    for _ in range(50):
        values = rng.integers(0, 6, 20).astype(float)
        for number in (0, 1, 7, 19, 20):
            mask = mark_smallest(values, number)
            assert set(np.flatnonzero(mask)) == set(np.argsort(values, kind="stable")[:number])
    # Equal losses: exactly rho, so that floor(0.3 * 10) is 3 for any number of clients.
    for k in range(1, 40):
        assert compute_drop_rates(np.full(k, 0.7), 0.3) == pytest.approx(0.3, abs=1e-12)
        rows = np.tile(np.arange(1.0, 11), (k, 1))
        out = apply_rounds(fedpw(), [make_updates(list(range(k)), rows, [0.7] * k)] * 2, Layout.flat(10))[-1]
        assert np.sum(np.abs(out.model - np.arange(1.0, 11)) < 1e-9) == 3


def test_buffers_follow_the_weights_and_are_not_dropped():
    layout = Layout.of(torch.nn.BatchNorm1d(1))
    model = Packed(torch.zeros(2), torch.zeros(2), torch.zeros(1, dtype=torch.int64))
    cohort = Updates("ab", [[1.0, 2], [3, 1]], [1, 9], [[4.0, 4.0], [8.0, 8.0]], [[3], [9]], {"train_loss": [1.0, 2.0]})
    aggregator = fedpw()
    state = aggregator.apply(model, cohort, aggregator.init(layout)).state
    out = aggregator.apply(model, cohort, state)
    assert out.model.buffers.tolist() == pytest.approx([4 + 4 * out.weights[1].item()] * 2, rel=1e-6)
    assert out.model.counters.tolist() == [9]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"beta": 1.5}, "beta = 1.5: use a number from 0 to 1"), ({"rho": -0.1}, "rho = -0.1: use a number from 0 to 1")],
)
def test_parameters_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        fedpw(**settings)
