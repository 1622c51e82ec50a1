"""The same clients and seeds give the same model in Flower as in the project's own simulator."""

from __future__ import annotations

import pytest
import torch

from fedheal.engine.serial import SerialEngine
from fedheal.flower import FedHEAL
from fedheal.simulate.round import initial_state, run_rounds
from flower.sites import Sites

pytestmark = pytest.mark.slow


def run_simulation(sites: Sites):
    """Return the simulator's last state and its records."""
    federation, last = sites.federation, sites.experiment.rounds
    federation.local_training.module.load_state_dict({k: torch.from_numpy(v.numpy()) for k, v in sites.initial.items()})
    engine = SerialEngine(federation.local_training)
    done = list(run_rounds(federation, initial_state(federation), engine, last))
    return done[-1][0], [record for _, record in done]


QUICK = ("fedheal",)
SLOW = (
    "uniform",
    "scaffold+fedheal",
    "fedproto",
    "fedheal:variant=released",
    "fedheal:fael=exact",
    "fedprox+afl+fedadam",
    "fedavg+qffl",
    "fedfv",
    "feddyn",
    "moon",
    "fedproc+fphl",
    "fcclplus+fedheal",
    "ditto",
    "fedbn",
    "fpl",
    "feddg",
    "fedheal:per_domain=true",
    "fedheal:soft=true",
    "fphl:forget=0.1",
)


@pytest.mark.parametrize("method", [*QUICK, *(pytest.param(method, marks=pytest.mark.slow) for method in SLOW)])
def test_the_model_matches_the_simulator(method):
    sites = Sites(method=method)
    state, records = run_simulation(sites)
    strategy = sites.run()
    for name in ("params", "buffers", "counters"):
        ours, theirs = getattr(strategy.state.model, name), getattr(state.model, name)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    for ours, theirs in zip(strategy.history, records, strict=True):
        assert ours.weights == pytest.approx(theirs.weights, abs=1e-6)
        assert ours.train_loss == pytest.approx(theirs.train_loss, abs=1e-6)
        if method != "fedbn":  # personalised: the simulator judges one model a domain, here each client its own
            assert ours.domains == pytest.approx(theirs.domains)
            assert ours.clients == pytest.approx(theirs.clients)


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("tiny_data:bfloat16", "scaffold+fedheal"),
        ("tiny_data:bfloat16", "fedproto"),
        ("tiny_data:bfloat16", "ditto"),
        ("tiny_data:float16", "scaffold+fedheal"),
    ],
)
def test_half_precision_models_match_the_simulator(model, method):
    sites = Sites(method=method, model=model)
    state, _ = run_simulation(sites)
    assert state.model.params.dtype.itemsize == 2
    for budget in (None, 0):
        strategy = sites.run(budget=budget)
        for name in ("params", "buffers", "counters"):
            # A client sends its model, not its update: the difference may be rounded once more. Here it hardly ever is.
            ours, theirs = getattr(strategy.state.model, name), getattr(state.model, name)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
        assert len(strategy.history[-1].weights) == len(sites.names)


def test_masks_on_the_clients_give_the_same_model_with_a_handful_of_numbers_on_the_server():
    sites = Sites(method="fedheal:tau=0.6", rounds=6)
    state, _ = run_simulation(sites)
    strategy = FedHEAL(tau=0.6, placement="client", model=sites.federation.local_training.layout)
    strategy.start(sites.grid(), sites.initial, num_rounds=6)
    torch.testing.assert_close(strategy.state.model.params, state.model.params, rtol=0, atol=1e-6)
    torch.testing.assert_close(strategy.state.model.buffers, state.model.buffers, rtol=0, atol=1e-6)
    arrays, _ = strategy.state.aggregator.to_arrays()
    assert sum(array.numel() for array in arrays.values()) == 4 * len(sites.names)
    assert all(0 < share < 1 for share in strategy.history[-1].report["kept"].values())
    by_server = sites.run()
    assert strategy.history[-1].report["kept"] == pytest.approx(by_server.history[-1].report["kept"])
    assert strategy.history[-1].report["unkept"] == pytest.approx(by_server.history[-1].report["unkept"])


def test_a_method_with_personal_state_needs_its_slots_back():
    """Without their slots the clients would give other results, so the tests above do check them."""
    sites = Sites(method="scaffold")
    state, _ = run_simulation(sites)
    strategy = sites.strategy()
    grid = sites.grid()

    def forget_state(node, reply):
        grid.contexts[node].state.clear()
        return [reply]

    grid.spoil = forget_state
    strategy.start(grid, sites.initial, num_rounds=3)
    assert float((strategy.state.model.params - state.model.params).abs().max()) > 1e-4
