"""FedDyn by hand: the dual on the client, h on the server, what is broadcast and what is judged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedheal.local.feddyn import FedDyn
from fedheal.simulate.evaluation import select_evaluated_model
from fedheal.simulate.round import initial_state, run_round
from local.quadratic import (
    absorb_updates,
    make_engine,
    make_gradient,
    make_packed,
    make_quadratic_federation,
    run_client,
    vector,
)


def test_two_steps_by_hand() -> None:
    """f = 1/2 (w - 3)^2, W = 1, g = 0.5, alpha = 2, lr 0.1: the gradient is (w - 3) - 0.5 + 2 (w - 1).

    Step 1: -2.5 -> w = 1.25. Step 2: -1.75 - 0.5 + 0.5 = -1.75 -> w = 1.425. Then g = 0.5 - 2 * 0.425 = -0.35.
    """
    local, slot, message = run_client(
        FedDyn(alpha=2.0), make_packed(1.0), make_gradient(vector(3.0)), steps=2, slot={"g": vector(0.5)}
    )
    assert local.params.tolist() == pytest.approx([1.425], rel=1e-12)
    assert slot["g"].tolist() == pytest.approx([-0.35], rel=1e-12)
    assert message == {}


def test_a_first_round_starts_from_a_zero_dual() -> None:
    """(w - 3) + 2 (w - 1): -2 -> 1.2; g = -2 * 0.2 = -0.4."""
    local, slot, _ = run_client(FedDyn(alpha=2.0), make_packed(1.0), make_gradient(vector(3.0)))
    assert local.params.tolist() == pytest.approx([1.2], rel=1e-12)
    assert slot["g"].tolist() == pytest.approx([-0.4], rel=1e-12)


def test_trained_to_the_end_the_dual_is_the_clients_gradient() -> None:
    """At the minimum f'(w) - g + alpha (w - W) = 0, so the new g = g - alpha (w - W) is f'(w).

    w = (3 + 0.5 + 2) / 3 = 5.5/3, f'(w) = -3.5/3.
    """
    local, slot, _ = run_client(
        FedDyn(alpha=2.0), make_packed(1.0), make_gradient(vector(3.0)), steps=300, slot={"g": vector(0.5)}
    )
    assert local.params.tolist() == pytest.approx([5.5 / 3], abs=1e-9)
    assert slot["g"].tolist() == pytest.approx([-3.5 / 3], abs=1e-9)


def absorb_two_clients(term: FedDyn, **keys):
    """Absorb local models 1.4 and 2 into W = 1 with h = 0.1."""
    locals_ = {"a": vector(1.4), "b": vector(2.0)}
    return absorb_updates(
        term, make_packed(1.0), locals_, [{}, {}], {"h": vector(0.1)}, **{"weights": [0.5, 0.5]} | keys
    )


def test_the_server_by_hand() -> None:
    """alpha = 2: h = 0.1 - 2/2 * (0.4 + 1) = -1.3; the mean is 1.7 and W+ = 1.7 + 1.3/2 = 2.35."""
    model, shared = absorb_two_clients(FedDyn(alpha=2.0))
    assert shared["h"].tolist() == pytest.approx([-1.3], rel=1e-12)
    assert model.params.tolist() == pytest.approx([2.35], rel=1e-12)
    assert shared["average"].tolist() == pytest.approx([1.7], rel=1e-12)


def test_two_of_eight_clients_move_h_by_their_share_of_the_federation() -> None:
    """h = 0.1 - 2/8 * 1.4 = -0.25; W+ = 1.7 + 0.125: the mean is over those present, h over all."""
    model, shared = absorb_two_clients(FedDyn(alpha=2.0), everyone=8)
    assert shared["h"].tolist() == pytest.approx([-0.25], rel=1e-12)
    assert model.params.tolist() == pytest.approx([1.825], rel=1e-12)


def test_uniform_controls_do_not_see_the_averages_weights() -> None:
    """With 1/4 and 3/4 the average is 1 + 0.1 + 0.75 = 1.85; h is as before and W+ = 1.85 + 0.65."""
    model, shared = absorb_two_clients(FedDyn(alpha=2.0), weights=[0.25, 0.75])
    assert shared["h"].tolist() == pytest.approx([-1.3], rel=1e-12)
    assert model.params.tolist() == pytest.approx([2.5], rel=1e-12)


def test_weighted_controls_do() -> None:
    """h = 0 - 2 * 0.85 = -1.7; W+ = 1.85 + 0.85. Then a alone, at 2, which stands for 10 of 40 examples: -1.7 - 2 * 1/4 = -2.2.

    c joins with 40 more at 3: the others keep half of h, and c's half goes into it: -1.1 - 2 * 1/2 * 2 = -3.1.
    """
    term = FedDyn(alpha=2.0, fair_controls="p")
    both_clients = {"weights": [0.25, 0.75], "unnormalised_weights": [10.0, 30.0], "everyone": 8}
    model, shared = absorb_updates(
        term, make_packed(1.0), {"a": vector(1.4), "b": vector(2.0)}, [{}, {}], {"h": vector(0.0)}, **both_clients
    )
    assert shared["h"].tolist() == pytest.approx([-1.7], rel=1e-12)
    assert model.params.tolist() == pytest.approx([2.7], rel=1e-12)
    for client_, at, unnormalised_weights, h in (("a", 2.0, 10.0, -2.2), ("c", 3.0, 40.0, -3.1)):
        alone = {"weights": [1.0], "unnormalised_weights": [unnormalised_weights], "everyone": 8}
        _, shared = absorb_updates(term, make_packed(1.0), {client_: vector(at)}, [{}], shared, **alone)
        assert shared["h"].tolist() == pytest.approx([h], rel=1e-12)


def test_the_average_is_judged_and_the_corrected_model_broadcast() -> None:
    model, shared = absorb_two_clients(FedDyn(alpha=2.0))
    assert FedDyn(alpha=2.0).evaluated(model, shared, {}).params.tolist() == pytest.approx([1.7], rel=1e-12)
    assert FedDyn(alpha=2.0, eval_model="broadcast").evaluated(model, shared, {}) is model
    assert FedDyn().evaluated(model, {"h": vector(0.0)}, {}) is model  # before the first round


def test_clipping_at_ten_as_the_authors_do() -> None:
    """The gradient -100 is cut to -10, with the regulariser in it: one step of lr 0.1 goes 1, not 10."""
    local, _, _ = run_client(FedDyn(), make_packed(0.0), make_gradient(vector(100.0)))
    assert local.params.tolist() == pytest.approx([1.0], rel=1e-6)
    local, _, _ = run_client(FedDyn(clip=0.0), make_packed(0.0), make_gradient(vector(100.0)))
    assert local.params.tolist() == pytest.approx([10.0], rel=1e-6)


def test_two_rounds_of_two_clients_by_hand() -> None:
    """Centres 0 and 4, W = 1, alpha = 1, one step a round of lr 0.1.

    Round 1: gradients 1 and -3, w = 0.9 and 1.3; g_a = 0.1, g_b = -0.3; h = -(-0.1 + 0.3)/2 = -0.1; W = 1.1 + 0.1 = 1.2.
    Round 2, at W: 1.2 - 0.1 = 1.1 and -2.8 + 0.3 = -2.5, so w = 1.09 and 1.45;
    g_a = 0.1 + 0.11 = 0.21, g_b = -0.3 - 0.25 = -0.55; h = -0.1 - (-0.11 + 0.25)/2 = -0.17; W = 1.27 + 0.17 = 1.44.
    """
    fed = make_quadratic_federation(FedDyn(alpha=1.0), {"a": 0.5, "b": 0.5}, 1, steps=1)
    engine = make_engine(fed, {"a": make_gradient(vector(0.0)), "b": make_gradient(vector(4.0))})
    state = replace(initial_state(fed), model=make_packed(1.0))
    expected = [(1.2, 1.1, -0.1, {"a": 0.1, "b": -0.3}), (1.44, 1.27, -0.17, {"a": 0.21, "b": -0.55})]
    for broadcast, average, h, g in expected:
        state, _ = run_round(fed, state, engine, evaluate=False)
        (term_state,) = state.terms
        assert state.model.params.item() == pytest.approx(broadcast)
        assert select_evaluated_model(fed, state.model, state.terms).params.item() == pytest.approx(average)
        assert term_state.shared["h"].item() == pytest.approx(h)
        assert {c: s["g"].item() for c, s in term_state.slots.items()} == pytest.approx(g)


def test_h_stays_the_mean_of_all_clients_duals() -> None:
    """Both start at 0, so h is the mean over the whole federation, absent clients' duals included."""
    centres = {"a": 0.0, "b": 1.0, "c": 5.0, "d": -2.0}
    fed = make_quadratic_federation(FedDyn(alpha=1.0), dict.fromkeys(centres, 0.25), 1, participation=0.5)
    state = initial_state(fed)
    engine = make_engine(fed, {name: make_gradient(vector(a)) for name, a in centres.items()})
    for _ in range(12):
        state, _ = run_round(fed, state, engine, evaluate=False)
        total = sum(slot["g"].item() for slot in state.terms[0].slots.values())
        assert state.terms[0].shared["h"].item() == pytest.approx(total / 4, abs=1e-12)


def test_nothing_that_came_in_is_changed() -> None:
    before, shared, mine = make_packed(1.0), {"h": vector(0.1)}, {"g": vector(0.5)}
    run_client(FedDyn(), before, make_gradient(vector(3.0)), slot=mine, shared=shared, steps=3)
    absorb_updates(FedDyn(), before, {"a": vector(1.4)}, [{}], shared, weights=[1.0])
    assert torch.equal(torch.cat([before.params, shared["h"], mine["g"]]), vector(1.0, 0.1, 0.5))
