"""SCAFFOLD by hand: corrected steps, both rules for the client's control, the server's control."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedheal
from fedheal.local.scaffold import Scaffold
from fedheal.local.term import effective_step
from fedheal.simulate.build import build_federation
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
from tiny_data import load, quick

SLOT, SHARED = {"c": vector(0.5)}, {"c": vector(0.25)}


def test_option_two_without_momentum_by_hand() -> None:
    """f = 1/2 (w - 3)^2, W = 1, c_m = 0.5, c = 0.25, lr 0.1, 2 steps of g - c_m + c = (w - 3) - 0.25.

    -2.25 -> w = 1.225; -1.775 - 0.25 = -2.025 -> w = 1.4275.
    c_m+ = c_m - c + (W - w) / (K lr) = 0.25 - 0.4275 / 0.2 = -1.8875, the mean of the gradients -2 and -1.775.
    """
    local, slot, message = run_client(
        Scaffold(), make_packed(1.0), make_gradient(vector(3.0)), steps=2, slot=SLOT, shared=SHARED
    )
    assert local.params.tolist() == pytest.approx([1.4275], rel=1e-12)
    assert slot["c"].tolist() == pytest.approx([-1.8875], rel=1e-12)
    assert message["change"].tolist() == pytest.approx([-1.8875 - 0.5], rel=1e-12)
    assert set(slot) == {"c"}
    assert set(message) == {"change"}


def test_option_two_with_momentum_divides_by_how_far_the_steps_reach() -> None:
    """Momentum 0.5: v = -2.25, w = 1.225; v = -1.125 - 2.025 = -3.15, w = 1.54.

    A_2 = (2 - 0.5 (1 - 0.5^2) / 0.5) / 0.5 = 2.5, so c_m+ = 0.25 - 0.54 / 0.25 = -1.91: still about a gradient.
    Dividing by K lr = 0.2 would give -2.45, larger than any gradient on the way.
    """
    keys = {"steps": 2, "momentum": 0.5, "slot": SLOT, "shared": SHARED}
    local, slot, _ = run_client(Scaffold(), make_packed(1.0), make_gradient(vector(3.0)), **keys)
    assert effective_step(0.1, 0.5, 2) == pytest.approx(0.25)
    assert local.params.tolist() == pytest.approx([1.54], rel=1e-12)
    assert slot["c"].tolist() == pytest.approx([-1.91], rel=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 10, 100])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_a_constant_gradient_is_found_whatever_the_momentum(steps: int, momentum: float) -> None:
    """f = 7 w has the gradient 7 everywhere; whatever c and c_m were, c_m+ is 7."""
    keys = {"steps": steps, "momentum": momentum, "slot": SLOT, "shared": SHARED}
    _, slot, _ = run_client(Scaffold(), make_packed(1.0), lambda w: torch.full_like(w, 7.0), **keys)
    assert slot["c"].tolist() == pytest.approx([7.0], rel=1e-9)


@pytest.mark.parametrize(
    ("steps", "a"), [(10, 41.4), (20, 120.9), (50, 410.5), (100, 910.0)], ids=["10", "20", "50", "100"]
)
def test_how_far_momentum_reaches(steps: int, a: float) -> None:
    assert effective_step(1.0, 0.9, steps) == pytest.approx(a, abs=0.05)
    assert effective_step(0.001, 0.0, steps) == pytest.approx(0.001 * steps)


def test_option_one_is_the_gradient_at_the_received_model() -> None:
    """f'(1) = 1 - 3 = -2, however the steps went; they are those of option II."""
    keys = {"steps": 2, "slot": SLOT, "shared": SHARED}
    local, slot, message = run_client(Scaffold(option=1), make_packed(1.0), make_gradient(vector(3.0)), **keys)
    assert local.params.tolist() == pytest.approx([1.4275], rel=1e-12)
    assert slot["c"].tolist() == [-2.0]
    assert message["change"].tolist() == [-2.5]


def test_a_first_round_has_no_correction() -> None:
    """No slot and c = 0: plain SGD, -2 -> 1.2, -1.8 -> 1.38; c_m+ = (1 - 1.38) / 0.2 = -1.9."""
    local, slot, message = run_client(
        Scaffold(), make_packed(1.0), make_gradient(vector(3.0)), steps=2, shared={"c": torch.zeros(1)}
    )
    assert local.params.tolist() == pytest.approx([1.38], rel=1e-12)
    assert slot["c"].tolist() == pytest.approx([-1.9], rel=1e-12)
    assert torch.equal(slot["c"], message["change"])


def absorb_two_clients(term: Scaffold, shared=SHARED, **keys):
    """Absorb local models 1.4 and 2, with changes of the controls 1 and 3, into W = 1."""
    messages = [{"change": vector(1.0)}, {"change": vector(3.0)}]
    locals_ = {"a": vector(1.4), "b": vector(2.0)}
    return absorb_updates(term, make_packed(1.0), locals_, messages, shared, **{"weights": [0.5, 0.5]} | keys)


def test_the_servers_control_moves_by_the_mean_change_times_the_share_present() -> None:
    """Both of two: 0.25 + 2/2 * 2 = 2.25. Two of eight: 0.25 + 2/8 * 2 = 0.75."""
    model, shared = absorb_two_clients(Scaffold())
    assert shared["c"].tolist() == [2.25]
    assert model.params.tolist() == pytest.approx([1.7], rel=1e-12)  # 1 + (0.4 + 1) / 2
    assert absorb_two_clients(Scaffold(), everyone=8)[1]["c"].tolist() == [0.75]


def test_uniform_controls_do_not_see_the_averages_weights() -> None:
    """With weights 1/4 and 3/4 the model goes to 1 + 0.1 + 0.75 = 1.85; c is as before."""
    model, shared = absorb_two_clients(Scaffold(), weights=[0.25, 0.75])
    assert model.params.tolist() == pytest.approx([1.85], rel=1e-12)
    assert shared["c"].tolist() == [2.25]


def test_the_servers_step_is_scaled() -> None:
    """1 + 0.25 * 0.7 = 1.175; the control is not scaled."""
    model, shared = absorb_two_clients(Scaffold(eta_g=0.25))
    assert model.params.tolist() == pytest.approx([1.175], rel=1e-12)
    assert shared["c"].tolist() == [2.25]


def test_weighted_controls_are_recomputed_from_the_clients() -> None:
    """c = 1/4 * 10 + 3/4 * 20 = 17.5, whatever c was. Next round a comes alone and has all of that round's average, but still
    stands for 10 examples where the absent b has 30: c = 1/4 * 40 + 3/4 * 20 = 25. Then for 50: 5/8 * 40 + 3/8 * 20 = 32.5.
    """
    term = Scaffold(fair_controls="p")
    slots = {"a": {"c": vector(10.0)}, "b": {"c": vector(20.0)}}
    _, shared = absorb_two_clients(
        term, weights=[0.25, 0.75], unnormalised_weights=[10.0, 30.0], slots=slots, everyone=5
    )
    assert shared["c"].tolist() == pytest.approx([17.5], rel=1e-6)
    slots["a"] = {"c": vector(40.0)}
    for examples, c in ((10.0, 25.0), (50.0, 32.5)):
        alone = {"weights": [1.0], "unnormalised_weights": [examples], "slots": slots}
        _, shared = absorb_updates(
            term, make_packed(1.0), {"a": vector(2.0)}, [{"change": vector(30.0)}], shared, **alone
        )
        assert shared["c"].tolist() == pytest.approx([c], rel=1e-6)


def test_nobody_came() -> None:
    term, before = Scaffold(), make_packed(1.0)
    model, shared = absorb_updates(term, before, {"a": vector(1.5)}, [], SHARED, weights=[1.0])
    assert shared is SHARED
    assert model.params.tolist() == [1.5]


def test_two_rounds_of_two_clients_by_hand() -> None:
    """Centres 0 and 4, W = 1, one step a round of lr 0.1, uniform weights.

    Round 1: gradients 1 and -3, w = 0.9 and 1.3, W = 1.1; c_a = 1, c_b = -3, c = -1.
    Round 2: both corrected gradients at 1.1 are 1.1 - 1 - 1 = -0.9 and -2.9 + 3 - 1 = -0.9: both go to 1.19, W = 1.19.
    c_a+ = 1 + 1 + (1.1 - 1.19) / 0.1 = 1.1 and c_b+ = -3 + 1 - 0.9 = -2.9, c = -1 + (0.1 + 0.1) / 2 = -0.9.
    """
    fed = make_quadratic_federation(Scaffold(), {"a": 0.5, "b": 0.5}, 1, steps=1)
    engine = make_engine(fed, {"a": make_gradient(vector(0.0)), "b": make_gradient(vector(4.0))})
    state = replace(initial_state(fed), model=make_packed(1.0))
    state, _ = run_round(fed, state, engine, evaluate=False)
    assert state.model.params.tolist() == pytest.approx([1.1], rel=1e-9)
    assert {c: s["c"].item() for c, s in state.terms[0].slots.items()} == pytest.approx({"a": 1.0, "b": -3.0})
    assert state.terms[0].shared["c"].item() == pytest.approx(-1.0)
    state, _ = run_round(fed, state, engine, evaluate=False)
    assert state.model.params.tolist() == pytest.approx([1.19], rel=1e-9)
    assert {c: s["c"].item() for c, s in state.terms[0].slots.items()} == pytest.approx({"a": 1.1, "b": -2.9})
    assert state.terms[0].shared["c"].item() == pytest.approx(-0.9)


def test_the_servers_control_stays_the_mean_of_all_clients_controls() -> None:
    """Controls start at 0, so c is the mean over the whole federation, absent clients' old ones included."""
    centres = {"a": 0.0, "b": 1.0, "c": 5.0, "d": -2.0}
    fed = make_quadratic_federation(Scaffold(), dict.fromkeys(centres, 0.25), 1, participation=0.5)
    state = initial_state(fed)
    engine = make_engine(fed, {name: make_gradient(vector(a)) for name, a in centres.items()})
    for _ in range(12):
        state, record = run_round(fed, state, engine, evaluate=False)
        assert record.replied == 2
        total = sum(slot["c"].item() for slot in state.terms[0].slots.values())
        assert state.terms[0].shared["c"].item() == pytest.approx(total / 4, abs=1e-12)


def test_clipping_bounds_the_corrected_gradient() -> None:
    """|-2.25| is cut to 0.5: one step goes 0.05."""
    local, _, _ = run_client(Scaffold(clip=0.5), make_packed(1.0), make_gradient(vector(3.0)), slot=SLOT, shared=SHARED)
    assert local.params.tolist() == pytest.approx([1.05], rel=1e-4)


def test_the_groups_preset_asks_for_plain_sgd() -> None:
    fed = build_federation(quick(method="scaffold:preset=group", momentum=0.9), load(), torch.device("cpu"))
    assert (fed.local_training.training.momentum, fed.local_training.training.weight_decay) == (0.0, 0.0)
    assert fed.local_training.terms == (Scaffold(2, 0.25, "uniform", 100.0),)


def test_controls_cover_parameters_only() -> None:
    fed = build_federation(quick(method="scaffold", model="tiny_data:conv_batchnorm"), load(), torch.device("cpu"))
    assert initial_state(fed).terms[0].shared["c"].shape == (fed.local_training.layout.sizes().params,)


def test_option_one_draws_nothing_from_the_global_stream() -> None:
    """The full pass is in training mode, so layers that draw at random must be seeded there as well."""

    def train_weights(seed: int) -> list[float]:
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        result = fedheal.run(
            quick(method="scaffold:option=1", model="tiny_data:dropout", lr=0.5, rounds=2), progress=False
        )
        assert torch.equal(torch.random.get_rng_state(), before)
        return result.model.state_dict()["2.weight"].flatten().tolist()

    assert train_weights(0) == train_weights(1)
