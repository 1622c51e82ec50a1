"""Mixed weights: golden values by hand, what they reduce to, and what becomes of the moving average over time."""

from __future__ import annotations

import numpy as np
import pytest

from aggregate.rounds import apply_rounds
from fedheal import Layout, Updates, methods
from fedheal.aggregate import Aggregator, chain, uniform
from fedheal.aggregate.registry import STAGES

ONE = Layout.flat(1)


def make_updates(clients, examples, losses=None, rows=None):
    rows = [[1.0]] * len(clients) if rows is None else rows
    k = len(clients)
    metrics = {"loss": [1.0] * k if losses is None else losses, "reach": [1.0] * k}
    return Updates(clients, np.array(rows, float), examples, metrics=metrics)


def get_last_result(aggregator, cohorts):
    return apply_rounds(aggregator, cohorts, ONE)[-1]


def make_mix_aggregator(*stages, **parameters):
    return Aggregator(chain(*stages, STAGES["mix"](**parameters)))


def test_a_mixture_by_hand():
    """Examples 1 and 9: shares 0.1 and 0.9. A quarter of 1/2 each and three quarters of these are 0.2 and 0.8."""
    out = get_last_result(make_mix_aggregator(uniform=0.25), [make_updates("ab", [1, 9], rows=[[4.0], [0.0]])])
    np.testing.assert_allclose(out.weights, [0.2, 0.8], rtol=0, atol=1e-15)
    assert out.model == pytest.approx([0.8])


def test_a_root_by_hand():
    """The roots of 1 and 9 are 1 and 3: shares of 1/4 and 3/4, and with half of 1/2 each 3/8 and 5/8."""
    cohort = make_updates("ab", [1, 9])
    np.testing.assert_allclose(
        get_last_result(make_mix_aggregator(uniform=0, power=0.5), [cohort]).weights, [0.25, 0.75], rtol=0, atol=1e-15
    )
    np.testing.assert_allclose(
        get_last_result(make_mix_aggregator(power=0.5), [cohort]).weights, [0.375, 0.625], rtol=0, atol=1e-15
    )


def test_a_moving_average_by_hand():
    """From 1/2 each towards 0.1 and 0.9 by a quarter a round: 0.4 and 0.6, then 0.325 and 0.675."""
    aggregator, cohort = make_mix_aggregator(uniform=0, last=0.75), make_updates("ab", [1, 9])
    np.testing.assert_allclose(get_last_result(aggregator, [cohort]).weights, [0.4, 0.6], rtol=0, atol=1e-15)
    np.testing.assert_allclose(get_last_result(aggregator, 2 * [cohort]).weights, [0.325, 0.675], rtol=0, atol=1e-15)


def test_the_moving_average_of_absent_clients_stays():
    """After (0.4, 0.6), c joins with 1/3 and the others shrink by 2/3. It holds 1/3 alone, and nothing else moves."""
    aggregator = make_mix_aggregator(uniform=0, last=0.75)
    out = get_last_result(aggregator, [make_updates("ab", [1, 9]), make_updates("c", [5])])
    (state,) = out.state.stage.states
    assert state.clients == ("a", "b", "c")
    np.testing.assert_allclose(state.weights, [0.8 / 3, 1.2 / 3, 1 / 3], rtol=0, atol=1e-15)
    assert out.weights.tolist() == [1.0]


def test_the_moving_average_stays_while_no_client_has_weight():
    nobody = STAGES["afl"](gamma=1e9, floor=0.0)  # all weight to the largest loss
    aggregator = make_mix_aggregator(nobody, uniform=0, last=0.5)
    first = get_last_result(aggregator, [make_updates("abc", [1, 1, 1], [1.0, 2.0, 9.0])])
    second = aggregator.apply(first.model, make_updates("ab", [1, 1], [1.0, 2.0]), first.state)
    assert second.weights.tolist() == [0.5, 0.5]
    assert second.state.stage.states[1] == first.state.stage.states[1]


@pytest.mark.parametrize("name", ["fedavg", "afl:gamma=1", "qffl", "fael", "uniform", "fael-exact:floor=0.1"])
def test_no_equal_weights_is_the_method_itself_and_only_equal_ones_are_uniform(name):
    """Bit for bit, in every round, absent clients included."""
    rng = np.random.default_rng(3)
    cohorts = [
        make_updates(c, rng.integers(1, 99, len(c)), rng.uniform(0.1, 2, len(c)), rng.normal(size=(len(c), 1)))
        for c in ("abc", "bd", "abcd")
    ]
    mixed = methods.get(f"{name}+mix:uniform=0").aggregator
    plain, equal = methods.get(name).aggregator, methods.get(f"{name}+mix:uniform=1").aggregator
    for rounds in (1, 2, 3):
        ours, theirs = get_last_result(mixed, cohorts[:rounds]), get_last_result(plain, cohorts[:rounds])
        assert ours.weights.tolist() == theirs.weights.tolist()
        assert ours.unnormalised_weights.tolist() == theirs.unnormalised_weights.tolist()
        assert np.array_equal(ours.model, theirs.model)
        assert (
            get_last_result(equal, cohorts[:rounds]).weights.tolist()
            == get_last_result(uniform(), cohorts[:rounds]).weights.tolist()
        )


def test_power_zero_is_uniform():
    cohort = make_updates("abc", [1, 10, 100], [0.1, 1.0, 10.0])
    aggregator = make_mix_aggregator(
        STAGES["afl"](gamma=1e9, floor=0.0), uniform=0, power=0
    )  # also clients without weight
    assert (
        get_last_result(aggregator, [cohort]).weights.tolist() == get_last_result(uniform(), [cohort]).weights.tolist()
    )


def test_no_weight_falls_below_the_share_of_equal_ones():
    """AFL by a huge step gives c all weight; a mixture with 0.3 leaves a and b 0.1 each, and c 0.8."""
    cohort = make_updates("abc", [1, 1, 1], [1.0, 2.0, 9.0])
    out = get_last_result(make_mix_aggregator(STAGES["afl"](gamma=1e9, floor=0.0), uniform=0.3), [cohort])
    np.testing.assert_allclose(out.weights, [0.1, 0.1, 0.8], rtol=0, atol=1e-12)


def test_the_order_of_names_does_not_matter_and_two_mixtures_are_refused():
    cohort = make_updates("ab", [1, 9], [1.0, 3.0])
    ours, theirs = (methods.get(name).aggregator for name in ("afl:gamma=0.1+mix", "mix+afl:gamma=0.1"))
    assert get_last_result(ours, [cohort]).weights.tolist() == get_last_result(theirs, [cohort]).weights.tolist()
    with pytest.raises(ValueError, match="two of these stages give mixture"):
        chain(STAGES["mix"](), STAGES["mix"]())
    with pytest.raises(ValueError, match="fedfv is a whole method and takes no stage"):
        methods.get("fedfv+mix")
