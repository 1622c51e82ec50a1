"""Ditto: personal models, what the server makes of them, and what is evaluated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedheal.core.layout import Packed
from fedheal.engine import serial
from fedheal.local import ditto
from fedheal.local.ditto import Ditto
from fedheal.simulate.evaluation import select_evaluated_model
from fedheal.simulate.round import initial_state
from local.quadratic import absorb_updates, make_packed, make_term_context, vector
from local.rounds import make_federation, run_rounds
from tiny_runs import is_same


def test_server_by_hand() -> None:
    """W = 1, local models 1.4 and 2, personal ones 3 and 7, weights 1/4 and 3/4: V = 0.75 + 5.25 = 6; W+ = 1.85."""
    none = {"buffers": torch.empty(0), "counters": torch.empty(0, dtype=torch.int64)}
    messages = [{"params": vector(3.0), **none}, {"params": vector(7.0), **none}]
    locals_ = {"a": vector(1.4), "b": vector(2.0)}
    for feedback, broadcast in ((False, 1.85), (True, 6.0)):
        term = Ditto(feedback=feedback)
        model, shared = absorb_updates(term, make_packed(1.0), locals_, messages, {}, weights=[0.25, 0.75])
        assert model.params.tolist() == pytest.approx([broadcast], rel=1e-12)
        assert term.evaluated(model, shared, {}).params.tolist() == pytest.approx([6.0], rel=1e-12)


def test_a_personal_model_goes_on_from_where_it_was() -> None:
    """First from the received model, then from the client's own; always held to the received one with `lam`."""
    calls = []

    def fit(start: Packed, strength: float) -> Packed:
        calls.append((start.params.item(), strength))
        return make_packed(5.0)

    term = Ditto(lam=0.7)
    slot, message = term.finish(make_term_context(term, make_packed(1.0), fit=fit), make_packed(2.0))
    assert slot["params"].tolist() == message["params"].tolist() == [5.0]
    term.finish(make_term_context(term, make_packed(1.5), fit=fit, slot=slot), make_packed(2.0))
    assert calls == [(1.0, 0.7), (5.0, 0.7)]


def test_a_personal_models_first_round_is_fedproxs_local_model() -> None:
    """One batch an epoch, so that the order of examples does not matter; another client's stays its own."""
    keys: dict[str, Any] = {"batch_size": 100, "epochs": 3}
    ditto, fedprox = make_federation(method="ditto:lam=0.5", **keys), make_federation(method="fedprox:mu=0.5", **keys)
    state = run_rounds(ditto, 1)
    start = initial_state(fedprox)
    for client, slot in state.terms[0].slots.items():
        task = serial.Task(client, 1, ({},))
        reply = serial.train_client(fedprox.local_training, start.model, ({},), task).reply
        assert torch.allclose(slot["params"] - start.model.params, reply.delta, atol=1e-6)
        assert torch.allclose(slot["buffers"], reply.buffers, atol=1e-6)


@pytest.mark.parametrize("lam", [0.0, 5.0])
def test_reading_a_trains_the_global_model_as_fedavg_does(lam: float) -> None:
    first, second = (
        run_rounds(make_federation(method="fedavg"), 3),
        run_rounds(make_federation(method=f"ditto:lam={lam}"), 3),
    )
    assert is_same(first.model, second.model)


def test_the_evaluated_model_is_the_weighted_mean_of_the_personal_models() -> None:
    fed = make_federation(method="ditto")
    state = run_rounds(fed, 3)
    shares = {client: len(split) for client, split in fed.local_training.examples.items()}
    evaluated = select_evaluated_model(fed, state.model, state.terms)
    for name in ("params", "buffers"):
        mean = sum(shares[c] * slot[name].double() for c, slot in state.terms[0].slots.items()) / sum(shares.values())
        assert torch.allclose(getattr(evaluated, name).double(), mean, atol=1e-6)
        assert not torch.equal(getattr(evaluated, name), getattr(state.model, name))


@pytest.mark.parametrize("feedback", [False, True])
def test_absent_clients_personal_models_count_too(feedback: bool) -> None:
    """One of five a round: what is judged, or sent back, is the mean over all who have been there, by their examples."""
    fed = make_federation(method=f"ditto:feedback={str(feedback).lower()}", participation=0.2)
    state = run_rounds(fed, 6)
    slots = state.terms[0].slots
    assert len(slots) > 2, "take another seed"
    shares = {client: len(fed.local_training.examples[client]) for client in slots}
    evaluated = select_evaluated_model(fed, state.model, state.terms)
    for name in ("params", "buffers"):
        mean = sum(shares[c] * slots[c][name].double() for c in slots) / sum(shares.values())
        assert torch.allclose(getattr(evaluated, name).double(), mean, atol=1e-6)


@pytest.mark.parametrize("clients", [3, 20])
def test_a_sum_in_parts_has_the_bits_of_the_whole(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ditto, "COLUMNS", 1000)
    vectors = torch.randn(clients, 2345, generator=torch.Generator().manual_seed(0))
    u = np.random.default_rng(0).dirichlet(np.ones(clients))
    whole = (torch.from_numpy(u)[:, None] * vectors.double()).sum(dim=0).float()
    assert torch.equal(ditto._average(list(vectors), u), whole)


def test_reading_b_keeps_the_dtype_of_the_model() -> None:
    """A client may send its personal model in another dtype."""
    none = {"buffers": torch.empty(0, dtype=torch.float64)}
    before = Packed(torch.ones(1), torch.empty(0), torch.empty(0, dtype=torch.int64))
    messages = [{"params": torch.full((1,), 3.0, dtype=torch.float64), **none}]
    model, _ = absorb_updates(Ditto(feedback=True), before, {"a": torch.ones(1)}, messages, {}, weights=[1.0])
    assert (model.params.dtype, model.buffers.dtype) == (torch.float32, torch.float32)
    assert model.params.tolist() == [3.0]


def test_reading_b_sends_the_mean_of_the_personal_models_back() -> None:
    fed = make_federation(method="ditto:feedback=true")
    state = run_rounds(fed, 2)
    shares = {client: len(split) for client, split in fed.local_training.examples.items()}
    for name in ("params", "buffers"):
        mean = sum(shares[c] * slot[name].double() for c, slot in state.terms[0].slots.items()) / sum(shares.values())
        assert torch.allclose(getattr(state.model, name).double(), mean, atol=1e-6)
    assert is_same(select_evaluated_model(fed, state.model, state.terms), state.model)
    assert not is_same(state.model, run_rounds(make_federation(method="ditto"), 2).model)
