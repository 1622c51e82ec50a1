"""FedHEAL on numbers small enough to check by hand; the arithmetic stands beside them."""

from __future__ import annotations

import pytest
import torch

from fedheal import Layout, Packed, Updates
from fedheal.aggregate import fedavg, fedheal, uniform

KERNELS = ["reference", "cpu"]
TWO = Layout.flat(2)


def make_updates(rows, examples, clients=("a", "b")):
    return Updates(clients, torch.tensor(rows, dtype=torch.float64), examples)


def apply_rounds(aggregator, layout, rounds, clients=("a", "b")):
    """Apply rounds of (rows, examples) to a model of zeros; return each round's result."""
    model, state, results = torch.zeros(layout.sizes().params, dtype=torch.float64), aggregator.init(layout), []
    for rows, examples in rounds:
        out = aggregator.apply(model, make_updates(rows, examples, clients), state)
        results.append(out)
        model, state = out.model, out.state
    return results


@pytest.mark.parametrize("kernel", KERNELS)
def test_fedavg_and_uniform(kernel):
    # 30 and 10 examples: 3/4 and 1/4.   3/4 * 1 + 1/4 * 5 = 2;  3/4 * 2 - 1/4 * 2 = 1.   uniform: 3 and 0.
    rows = [[1, 2], [5, -2]]
    assert apply_rounds(fedavg(kernel=kernel), TWO, [(rows, [30, 10])])[0].model.tolist() == [2, 1]
    assert apply_rounds(uniform(kernel=kernel), TWO, [(rows, [30, 10])])[0].model.tolist() == [3, 0]


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_rounds_of_the_paper(kernel):
    # Round 1. All kept (1 of 1). d = 1+1 = 2 and 1+9 = 10.  K d / sum d = 1/3 and 5/3.  beta 0.4: dp = 2/15 and 10/15.
    #   p starts at 3/4, 1/4;  b is the same for both, so g = dp;  v = p + dp/2 = 49/60 and 35/60, sum 84/60.
    #   p = 7/12, 5/12.  W = (7/12 - 5/12, 7/12 + 15/12) = (1/6, 11/6).
    # Round 2. a: signs + then -, 1 of 2 agree: kept at tau 0.3.  So with tau 0.6 entry 1 of a goes (1/2 < 0.6).
    #   Updates a = (-2, 1), b = (-1, 1).  Kept: a keeps entry 2 (2 of 2), b keeps both (2 of 2).
    #   d = 1 and 2.  r = 2/3 and 4/3.  dp = 0.6*2/15 + 0.4*2/3 = 0.08 + 4/15 = 26/75;  b: 0.6*2/3 + 0.4*4/3 = 14/15 = 70/75.
    #   v = 7/12 + 13/75 = 227/300;  5/12 + 35/75 = 265/300;  sum 492/300.  p = 227/492, 265/492.
    #   Entry 1: only b, so its update: -1.   Entry 2: both move by 1: +1.
    first, second = apply_rounds(
        fedheal(tau=0.6, beta=0.4, kernel=kernel), TWO, [([[1, 1], [-1, 3]], [30, 10]), ([[-2, 1], [-1, 1]], [30, 10])]
    )
    assert first.weights.tolist() == pytest.approx([7 / 12, 5 / 12], rel=1e-15)
    assert first.model.tolist() == pytest.approx([1 / 6, 11 / 6], rel=1e-15)
    assert first.report["distance"] == {"a": 2.0, "b": 10.0}
    assert second.report["distance"] == {"a": 1.0, "b": 2.0}
    assert second.report["kept"] == {"a": 0.5, "b": 1.0}
    assert second.weights.tolist() == pytest.approx([227 / 492, 265 / 492], rel=1e-15)
    assert second.model.tolist() == pytest.approx([1 / 6 - 1, 11 / 6 + 1], rel=1e-15)


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_rounds_of_the_released_code(kernel):
    # One tensor of two entries. Round 1: all kept. d = |(3, 4)| = 5 and |(0, 15)| = 15.  r = 2*5/20 = 1/2 and 3/2.
    #   beta 0.4: dp = 0.2, 0.6;  w = 1.2, 1.6;  average client after one round 1 + 0.4 = 1.4:  6/7 and 8/7 -> 3/7, 4/7.
    # Round 2, tau 0.3, history of one round, strictly more than 0.3 of it.  An increase is of global - local: D <= 0.
    #   a: (+, +) then (-, +): entry 1 was never down: dropped; entry 2 kept.  b: (0, +) then (-, -): the zero counts with
    #   the decreases of D: entry 1 kept, entry 2 (1 of 1 was up) dropped.
    #   a = (-1, 2): d = 2.  b = (-6, -1): d = 6.  r = 1/2, 3/2.  dp = 0.6*0.2 + 0.4/2 = 0.32;  0.6*0.6 + 0.6 = 0.96.
    #   w = 1.52, 2.56, over 1 + 0.4 + 0.64 = 2.04: weights 1.52/4.08 and 2.56/4.08.  Entry 1: b alone, -6. Entry 2: a alone, 2.
    first, second = apply_rounds(
        fedheal(tau=0.3, beta=0.4, variant="released", kernel=kernel),
        TWO,
        [([[3, 4], [0, 15]], [30, 10]), ([[-1, 2], [-6, -1]], [30, 10])],
    )
    assert first.weights.tolist() == pytest.approx([3 / 7, 4 / 7], rel=1e-15)
    assert first.model.tolist() == pytest.approx([9 / 7, 12 / 7 + 60 / 7], rel=1e-15)
    assert second.report["distance"] == {"a": 2.0, "b": 6.0}
    assert second.weights.tolist() == pytest.approx([1.52 / 4.08, 2.56 / 4.08], rel=1e-14)
    assert second.model.tolist() == pytest.approx([9 / 7 - 6, 72 / 7 + 2], rel=1e-15)


@pytest.mark.parametrize("kernel", KERNELS)
def test_released_distance_is_summed_over_tensors(kernel):
    # Tensors of two and one entries: a: |(3, 4)| + |12| = 17, where the whole vector's norm is 13.
    layout = Layout.of(torch.nn.Linear(2, 1))
    (out,) = apply_rounds(fedheal(variant="released", kernel=kernel), layout, [([[3, 4, 12], [0, 0, 1]], [1, 1])])
    assert out.report["distance"] == {"a": 17.0, "b": 1.0}


@pytest.mark.parametrize("kernel", KERNELS)
def test_three_of_ten_at_tau_0_3_is_kept_by_the_paper_and_not_by_the_released_code(kernel):
    # Ten rounds with three ups, the last of them in round 10: 3/10 >= 0.3 counts it (in floats 0.3 * 10 > 3).
    signs = [1, 1, -1, -1, -1, -1, -1, -1, -1, 1]
    *_, last = apply_rounds(fedheal(tau=0.3, kernel=kernel), Layout.flat(1), [([[s]], [5]) for s in signs], ("a",))
    assert last.report["kept"] == {"a": 1.0}
    assert (
        last.model.tolist() == apply_rounds(fedavg(), Layout.flat(1), [([[sum(signs)]], [5])], ("a",))[0].model.tolist()
    )
    # The released code asks of the rounds before: three of ten, then an eleventh up: 3/10 > 0.3 is false.
    signs = [-1 if s == 1 else 1 for s in signs] + [-1]
    *_, last = apply_rounds(
        fedheal(tau=0.3, variant="released", kernel=kernel), Layout.flat(1), [([[s]], [5]) for s in signs], ("a",)
    )
    assert last.report["kept"] == {"a": 0.0}
    assert last.report["unkept"] == 1.0


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_entry_nobody_keeps_does_not_move(kernel):
    # tau 1: two ups and a down; in round 3 nobody agrees with its whole history on entry 1.
    rounds = [([[1, 1], [1, 1]], [1, 1])] * 2 + [([[-5, 1], [-7, 1]], [1, 1])]
    _, second, third = apply_rounds(fedheal(tau=1.0, kernel=kernel), TWO, rounds)
    assert third.model[0] == second.model[0]
    assert third.model[1] > second.model[1]
    assert third.report["unkept"] == 0.5


def test_a_newcomer_takes_its_share_and_the_absent_keep_theirs():
    # a and b with 10 examples each: p = 1/2, 1/2 and, with equal distances, still so. c joins with 20: its share is
    # 20/40 = 1/2; a and b shrink to 1/4 each. Only a and c are here: mass 3/4, of which c holds 2/3.
    # Equal distances: r = 1 for both. beta 0.4: a's dp = 0.6*0.4 + 0.4 = 0.64 with b = 0.64; c's dp = 0.4 with b = 0.4.
    #   mean b = 0.52, so g = 0.52 for both;  v = 1/3 + 0.26, 2/3 + 0.26, sum 1.52.
    #   p_a = 3/4 * (1/3 + 0.26)/1.52,  p_c = 3/4 * (2/3 + 0.26)/1.52,  p_b stays 1/4.
    aggregator = fedheal(tau=0.3, beta=0.4)
    model, state = torch.zeros(1, dtype=torch.float64), aggregator.init(Layout.flat(1))
    state = aggregator.apply(model, make_updates([[1], [1]], [10, 10]), state).state
    out = aggregator.apply(model, make_updates([[1], [1]], [10, 20], ("a", "c")), state)
    stored = dict(zip(out.state.stage.states[1].clients, out.state.stage.states[1].p, strict=True))
    assert stored["b"] == 0.25
    assert stored["a"] == pytest.approx(0.75 * (1 / 3 + 0.26) / 1.52, rel=1e-15)
    assert stored["c"] == pytest.approx(0.75 * (2 / 3 + 0.26) / 1.52, rel=1e-15)


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_buffers_and_counters(variant):
    # Weights 3/4 and 1/4 (fael off). Buffers 4 and 8: 5. Counters 10 and 17: the larger; released: 11.75 truncated.
    layout = Layout.of(torch.nn.BatchNorm1d(1))
    aggregator = fedheal(variant=variant, fael=False)
    model = Packed(torch.zeros(2), torch.zeros(2), torch.zeros(1, dtype=torch.int64))
    updates = Updates(["a", "b"], torch.zeros(2, 2), [30, 10], [[4.0, 4.0], [8.0, 8.0]], [[10], [17]])
    out = aggregator.apply(model, updates, aggregator.init(layout))
    assert out.model.buffers.tolist() == [5.0, 5.0]
    assert out.model.counters.tolist() == [17 if variant == "paper" else 11]


@pytest.mark.parametrize(
    ("variant", "weights"),
    [
        # |D|^2 = 4 and 36, reach 1 and 3: per step 4 and 36/9 = 4, so r = 1 for both. With beta 1, v = p + 1/2, over 2:
        # from 3/4 and 1/4 to 5/8 and 3/8.
        ("paper", [5 / 8, 3 / 8]),
        # The released rule starts uniform and measures lengths: 2/1 and 6/3.
        ("released", [1 / 2, 1 / 2]),
    ],
)
def test_distances_per_step(variant, weights):
    aggregator = fedheal(fphl=False, beta=1.0, variant=variant, per_step=True)
    updates = Updates(["a", "b"], [[2.0], [6.0]], [30, 10], metrics={"reach": [1, 3]})
    out = aggregator.apply(torch.zeros(1), updates, aggregator.init(Layout.flat(1)))
    distances = {"paper": {"a": 4.0, "b": 4.0}, "released": {"a": 2.0, "b": 2.0}}[variant]
    assert out.report["distance"] == distances
    assert out.weights.tolist() == pytest.approx(weights, rel=1e-15)


def test_only_the_momentum_rule_measures_per_step():
    for fael in ("exact", "exact-reg", False):
        with pytest.raises(ValueError, match="per_step = True with fael"):
            fedheal(fael=fael, per_step=True)
    with pytest.raises(ValueError, match="per_step = 1: use True or False"):
        fedheal(per_step=1)
