"""FedFV: by hand, and against the authors' loops written out on whole vectors."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from aggregate.rounds import apply_rounds
from fedheal import Layout, Packed, Updates
from fedheal.aggregate import chain, fedfv, gram, uniform
from fedheal.aggregate.registry import STAGES
from fedheal.aggregate.whole.fedfv import choose_unprojected, fedfv_stage

KERNELS = ["reference", "cpu"]


def make_updates(clients, rows, loss):
    return Updates(clients, np.array(rows, float), [1 + i for i in range(len(clients))], metrics={"loss": loss})


class ReferenceFedFV:
    """The authors' loops over whole gradient vectors, which keep every client's last gradient."""

    def __init__(self, alpha, tau, width):
        self.alpha, self.tau, self.t = alpha, tau, 0
        self.model, self.last, self.seen = np.zeros(width), {}, {}

    def round(self, cohort):
        names = sorted(cohort.clients)
        row = {client: i for i, client in enumerate(cohort.clients)}
        losses = [float(cohort.metrics["loss"][row[c]]) for c in names]
        grads = [-cohort.deltas[row[c]].double().numpy() for c in names]
        self.seen |= dict.fromkeys(names, self.t)
        self.last |= dict(zip(names, grads, strict=True))
        order = sorted(range(len(names)), key=lambda i: losses[i])
        keep = order[math.ceil((len(order) - 1) * (1 - self.alpha)) :] if self.alpha > 0 else []
        projected = [g.copy() for g in grads]
        for i in range(len(names)):
            for j in order:
                dot = grads[j] @ projected[i]
                if i not in keep and j != i and dot < 0:
                    projected[i] -= grads[j] * dot / (grads[j] @ grads[j])
        g = np.mean(projected, axis=0)
        if self.t >= self.tau:
            for k in range(self.tau - 1, -1, -1):
                against = [
                    self.last[c] for c in sorted(self.last) if self.seen[c] == self.t - k and g @ self.last[c] < 0
                ]
                if against:
                    total = np.sum(against, axis=0)
                    if g @ total < 0:
                        g = g - total * (g @ total) / (total @ total)
        g = g / np.linalg.norm(g) * np.linalg.norm(np.mean(grads, axis=0))
        self.model, self.t = self.model - g, self.t + 1


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_rounds_by_hand(kernel):
    # a = (1, 0) with loss 1, b = (-1, 1) with loss 2.  Kept as they are: from place ceil(1 * 0.9) = 1 on, that is b.
    # a off b: <a, b> = -1, |b|^2 = 2: a + b/2 = (1/2, 1/2).   g = ((1/2, 1/2) + (-1, 1)) / 2 = (-1/4, 3/4).
    # Round 0 < tau. The mean is (0, 1/2), of length 1/2; g has length sqrt(5/8).
    # Round 1, the same updates: <g, a> = -1/4, <g, b> = 1: g off a is (0, 3/4), brought to length 1/2: (0, 1/2).
    aggregator = fedfv(alpha=0.1, tau=1, kernel=kernel)
    first, second = apply_rounds(aggregator, [make_updates("ab", [[1, 0], [-1, 1]], [1, 2])] * 2, Layout.flat(2))
    assert first.model == pytest.approx(np.array([-0.25, 0.75]) * 0.5 / math.sqrt(5 / 8), rel=1e-14)
    assert first.report["conflicts"] == 1
    assert first.report["coefficients"] == pytest.approx({"a": 0.5, "b": 0.75}, rel=1e-14)
    assert second.model - first.model == pytest.approx([0, 0.5], abs=1e-15)
    assert second.weights.tolist() == [0.5, 0.5]


def test_the_order_is_that_of_the_losses():
    # c = (0, 1) conflicts with a = (-1, -1) and b = (1, -1); alpha 0 keeps nobody.  c off a first: <c, a> = -1:
    #   c + a/2 = (-1/2, 1/2), then off b: <., b> = -1: + b/2: (0, 0). The other way round: (1/2, 1/2), then (0, 0).
    # a off b: no conflict; off c: <a, c> = -1: a + c = (-1, 0).  b: (1, 0). The sum is 0 although the mean is (0, -1/3).
    (out,) = apply_rounds(
        fedfv(alpha=0.0), [make_updates("abc", [[-1, -1], [1, -1], [0, 1]], [1, 2, 3])], Layout.flat(2)
    )
    assert out.model.tolist() == [0, 0]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 1.0])
def test_it_is_the_authors_loops(alpha, tau, kernel):
    rng = np.random.default_rng(0)
    width = 9
    drift, twin, cohorts = rng.normal(size=width), ReferenceFedFV(alpha, tau, width), []
    for _ in range(12):
        here = [c for c in "abcdefgh" if rng.random() < 0.5] or ["a"]
        rng.shuffle(here)
        cohorts.append(
            make_updates(here, 0.3 * drift + rng.normal(size=(len(here), width)), rng.uniform(0, 3, len(here)))
        )
    for cohort, out in zip(
        cohorts, apply_rounds(fedfv(alpha, tau, kernel=kernel), cohorts, Layout.flat(width)), strict=True
    ):
        twin.round(cohort)
        np.testing.assert_allclose(out.model, twin.model, rtol=0, atol=1e-10)


def test_without_conflicts_it_is_the_plain_mean():
    """Updates at angles of at most 90 degrees are not projected."""
    rng = np.random.default_rng(1)
    turned, _ = np.linalg.qr(rng.normal(size=(40, 40)))
    for rows in (turned[:6] * rng.uniform(0.1, 5, (6, 1)), np.eye(6), rng.uniform(0, 1, (6, 40))):
        cohorts = [make_updates("abcdef", rows, rng.uniform(0, 2, 6))] * 3
        ours = apply_rounds(fedfv(tau=1), cohorts, Layout.flat(rows.shape[1]))[-1]
        theirs = apply_rounds(uniform(), cohorts, Layout.flat(rows.shape[1]))[-1]
        np.testing.assert_allclose(ours.model, theirs.model, rtol=0, atol=1e-14)
        assert ours.report["conflicts"] == 0


def test_opposite_updates_leave_the_model_where_it_is():
    for alpha in (0.0, 0.1, 1.0):
        outs = apply_rounds(fedfv(alpha=alpha), [make_updates("ab", [[1, 2], [-1, -2]], [1, 2])] * 3, Layout.flat(2))
        assert outs[-1].model.tolist() == [0, 0]


def test_updates_of_zero():
    out = apply_rounds(
        fedfv(tau=2),
        [make_updates("abc", [[0, 0], [1, 1], [0, 0]], [1, 1, 1]), make_updates("ab", [[0, 0], [0, 0]], [1, 1])],
        Layout.flat(2),
    )
    assert out[0].model == pytest.approx([1 / 3, 1 / 3], rel=1e-14)
    assert out[1].model.tolist() == out[0].model.tolist()


@pytest.mark.parametrize("alpha", ["0.1", "0.2", "1/3", "0.5", "2/3", "0.7", "1"])
def test_the_share_that_is_kept_is_that_of_exact_fractions(alpha):
    """The paper's grid and more: K - ceil((K - 1) (1 - alpha)) clients, without any rounding."""
    for clients in range(1, 200):
        kept = clients - math.ceil((clients - 1) * (1 - Fraction(alpha)))
        assert len(choose_unprojected(np.arange(clients), float(Fraction(alpha)))) == kept


@pytest.mark.parametrize(
    ("clients", "alpha", "kept"),
    [(4, 1 / 3, 2), (7, 2 / 3, 5), (1, 0.1, 1), (2, 0.1, 1), (11, 0.1, 2), (20, 0.1, 2), (20, 0.0, 0), (7, 1.0, 7)],
)
def test_how_many_are_kept(clients, alpha, kept):
    assert len(choose_unprojected(np.arange(clients), alpha)) == kept


def test_only_what_may_still_be_asked_for_is_remembered():
    rows = {c: [float(ord(c)), 1.0] for c in "abcd"}

    def make_cohort(clients):
        return make_updates(clients, [rows[c] for c in clients], [1] * len(clients))

    cohorts = [make_cohort("ab"), make_cohort("bc"), make_cohort("d"), make_cohort("a")]
    states = [out.state.stage for out in apply_rounds(fedfv(tau=3), cohorts, Layout.flat(2))]
    # After round t, the next one asks for clients last seen in rounds t and t - 1.
    assert [state.clients for state in states] == [("a", "b"), ("a", "b", "c"), ("b", "c", "d"), ("d", "a")]
    assert states[2].last.tolist() == [1, 1, 2]
    assert states[2].updates.tolist() == [rows["b"], rows["c"], rows["d"]]
    for tau in (0, 1):
        assert apply_rounds(fedfv(tau=tau), cohorts, Layout.flat(2))[-1].state.stage.updates.shape == (0, 2)


def test_the_memory_is_as_sent_and_its_own():
    aggregator = fedfv(tau=2)
    deltas = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    state = aggregator.apply(
        torch.zeros(2), Updates("a", deltas, [1], metrics={"loss": [1]}), aggregator.init(Layout.flat(2))
    ).state
    deltas.fill_(9)
    assert state.stage.updates.dtype == torch.bfloat16
    assert state.stage.updates.tolist() == [[1.0, 2.0]]


def test_several_blocks_of_columns(monkeypatch):
    rng = np.random.default_rng(2)
    cohorts = [
        make_updates("abc"[: 2 + t % 2], rng.normal(size=(2 + t % 2, 50)), [3, 2, 1][: 2 + t % 2]) for t in range(4)
    ]
    whole = apply_rounds(fedfv(tau=2), cohorts, Layout.flat(50))[-1].model
    monkeypatch.setattr(gram, "BLOCK", 16)
    np.testing.assert_allclose(
        apply_rounds(fedfv(tau=2), cohorts, Layout.flat(50))[-1].model, whole, rtol=0, atol=1e-13
    )


def test_buffers_are_averaged_evenly():
    layout = Layout.of(torch.nn.BatchNorm1d(1))
    model = Packed(torch.zeros(2), torch.zeros(2), torch.zeros(1, dtype=torch.int64))
    cohort = Updates("ab", [[1.0, 0], [-1, 1]], [1, 99], [[4.0, 4.0], [8.0, 8.0]], [[3], [9]], {"loss": [1.0, 2.0]})
    aggregator = fedfv()
    out = aggregator.apply(model, cohort, aggregator.init(layout))
    assert out.model.buffers.tolist() == [6, 6]
    assert out.model.counters.tolist() == [9]


def test_it_stands_alone():
    for other in ("fphl", "uniform"):
        with pytest.raises(ValueError, match="two of these stages give"):
            chain(fedfv_stage(), STAGES[other]())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 1.1}, "alpha = 1.1: use a number from 0 to 1"),
        ({"tau": -1}, "tau = -1: use a whole number that is not negative"),
        ({"tau": 1.5}, "tau = 1.5: use a whole number"),
        ({"tau": True}, "tau = True: use a whole number"),
    ],
)
def test_parameters_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        fedfv(**settings)
