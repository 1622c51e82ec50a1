"""Ditto and FedBN: what clients keep, what the server sees of it, what is judged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedheal import models
from fedheal.core.layout import Layout, Packed
from fedheal.core.state import RunState
from fedheal.engine import serial
from fedheal.local import personal
from fedheal.local.personal import Ditto, LocalNorm, norm_masks
from fedheal.simulate.build import build_federation
from fedheal.simulate.evaluation import select_evaluated_model
from fedheal.simulate.federation import Federation
from fedheal.simulate.round import initial_state, run_round
from local.quadratic import absorbed, context, packed, vector
from tiny_data import featured, load, normed, quick


def made(**keys: Any) -> Federation:
    return build_federation(quick(**{"model": "tiny_data:normed"} | keys), load(), torch.device("cpu"))


def after(fed: Federation, rounds: int) -> RunState:
    state = initial_state(fed)
    for _ in range(rounds):
        state, _ = run_round(
            fed, state, lambda m, s, tasks: (serial.train(fed.local_training, m, s, t) for t in tasks), evaluate=False
        )
    return state


def same(one: Packed, two: Packed) -> bool:
    return all(torch.equal(getattr(one, f), getattr(two, f)) for f in ("params", "buffers", "counters"))


# Ditto


def test_dittos_server_by_hand() -> None:
    """W = 1, local models 1.4 and 2, personal ones 3 and 7, weights 1/4 and 3/4: V = 0.75 + 5.25 = 6; W+ = 1.85."""
    none = {"buffers": torch.empty(0), "counters": torch.empty(0, dtype=torch.int64)}
    messages = [{"params": vector(3.0), **none}, {"params": vector(7.0), **none}]
    locals_ = {"a": vector(1.4), "b": vector(2.0)}
    for feedback, broadcast in ((False, 1.85), (True, 6.0)):
        term = Ditto(feedback=feedback)
        model, shared = absorbed(term, packed(1.0), locals_, messages, {}, weights=[0.25, 0.75])
        assert model.params.tolist() == pytest.approx([broadcast], rel=1e-12)
        assert term.evaluated(model, shared, {}).params.tolist() == pytest.approx([6.0], rel=1e-12)


def test_a_personal_model_goes_on_from_where_it_was() -> None:
    """First from the received model, then from the client's own; always held to the received one with `lam`."""
    asked = []

    def fit(start: Packed, strength: float) -> Packed:
        asked.append((start.params.item(), strength))
        return packed(5.0)

    term = Ditto(lam=0.7)
    slot, message = term.finish(context(term, packed(1.0), fit=fit), packed(2.0))
    assert slot["params"].tolist() == message["params"].tolist() == [5.0]
    term.finish(context(term, packed(1.5), fit=fit, slot=slot), packed(2.0))
    assert asked == [(1.0, 0.7), (5.0, 0.7)]


def test_a_personal_models_first_round_is_fedproxs_local_model() -> None:
    """One batch an epoch, so that the order of examples does not matter; another client's stays its own."""
    keys: dict[str, Any] = {"batch_size": 100, "epochs": 3}
    ditto, fedprox = made(method="ditto:lam=0.5", **keys), made(method="fedprox:mu=0.5", **keys)
    state = after(ditto, 1)
    start = initial_state(fedprox)
    for client, slot in state.terms[0].slots.items():
        task = serial.Task(client, 1, ({},))
        reply = serial.train(fedprox.local_training, start.model, ({},), task).reply
        assert torch.allclose(slot["params"] - start.model.params, reply.delta, atol=1e-6)
        assert torch.allclose(slot["buffers"], reply.buffers, atol=1e-6)


@pytest.mark.parametrize("lam", [0.0, 1.0, 5.0])
def test_reading_a_trains_the_global_model_as_fedavg_does(lam: float) -> None:
    one, two = after(made(method="fedavg"), 3), after(made(method=f"ditto:lam={lam}"), 3)
    assert same(one.model, two.model)


def test_what_is_judged_is_the_weighted_mean_of_the_personal_models() -> None:
    fed = made(method="ditto")
    state = after(fed, 3)
    shares = {client: len(split) for client, split in fed.local_training.examples.items()}
    judged = select_evaluated_model(fed, state.model, state.terms)
    for name in ("params", "buffers"):
        mean = sum(shares[c] * slot[name].double() for c, slot in state.terms[0].slots.items()) / sum(shares.values())
        assert torch.allclose(getattr(judged, name).double(), mean, atol=1e-6)
        assert not torch.equal(getattr(judged, name), getattr(state.model, name))


@pytest.mark.parametrize("feedback", [False, True])
def test_absent_clients_personal_models_count_too(feedback: bool) -> None:
    """One of five a round: what is judged, or sent back, is the mean over all who have been there, by their examples."""
    fed = made(method=f"ditto:feedback={str(feedback).lower()}", participation=0.2)
    state = after(fed, 6)
    slots = state.terms[0].slots
    assert len(slots) > 2, "take another seed"
    shares = {client: len(fed.local_training.examples[client]) for client in slots}
    judged = select_evaluated_model(fed, state.model, state.terms)
    for name in ("params", "buffers"):
        mean = sum(shares[c] * slots[c][name].double() for c in slots) / sum(shares.values())
        assert torch.allclose(getattr(judged, name).double(), mean, atol=1e-6)


@pytest.mark.parametrize("clients", [3, 20])
def test_a_sum_in_parts_has_the_bits_of_the_whole(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(personal, "COLUMNS", 1000)
    vectors = torch.randn(clients, 2345, generator=torch.Generator().manual_seed(0))
    u = np.random.default_rng(0).dirichlet(np.ones(clients))
    whole = (torch.from_numpy(u)[:, None] * vectors.double()).sum(dim=0).float()
    assert torch.equal(personal._mean(list(vectors), u), whole)


def test_reading_b_sends_the_mean_of_the_personal_models_back() -> None:
    fed = made(method="ditto:feedback=true")
    state = after(fed, 2)
    shares = {client: len(split) for client, split in fed.local_training.examples.items()}
    for name in ("params", "buffers"):
        mean = sum(shares[c] * slot[name].double() for c, slot in state.terms[0].slots.items()) / sum(shares.values())
        assert torch.allclose(getattr(state.model, name).double(), mean, atol=1e-6)
    assert same(select_evaluated_model(fed, state.model, state.terms), state.model)
    assert not same(state.model, after(made(method="ditto"), 2).model)


# FedBN


class Block(nn.Module):
    """Normalisation of several kinds under names that do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.shortcut = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.group = nn.GroupNorm(2, 4)
        self.layer = nn.LayerNorm(4)
        self.root = nn.RMSNorm(4)
        self.bn_like_name = nn.Linear(4, 2)


def test_layers_are_chosen_by_type() -> None:
    module = Block()
    layout = Layout.of(module)
    masks = norm_masks(module, layout)
    held = {e.name for e in layout.entries if bool(masks[f"{e.kind}s"][e.start : e.stop].all())}
    wanted = {"group.weight", "group.bias", "layer.weight", "layer.bias", "root.weight"}
    wanted |= {"shortcut.1.num_batches_tracked"}
    wanted |= {f"shortcut.1.{name}" for name in ("weight", "bias", "running_mean", "running_var")}
    assert held == wanted
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {"params": 3 * 8 + 4, "buffers": 8, "counters": 1}


def test_a_resnets_shortcut_layers_are_among_them() -> None:
    module = models.build("resnet10", 10, width=4)
    layout = Layout.of(module)
    params, buffers, _ = norm_masks(module, layout).values()
    kinds = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
    unnamed = [n for n, part in module.named_modules() if isinstance(part, nn.BatchNorm2d) and "bn" not in n]
    assert unnamed  # else this test would show nothing
    assert int(params.sum()) == sum(2 * part.num_features for part in kinds)
    assert bool(buffers.all())


def test_fedbn_by_hand() -> None:
    """Own layers go in at the start, the received ones go back out, the local ones stay."""
    module = normed(3)
    layout = Layout.of(module)
    received = layout.pack(module.state_dict())
    params, buffers, counters = norm_masks(module, layout).values()
    mine = {"params": torch.full((8,), 7.0), "buffers": torch.full((8,), 9.0), "counters": torch.tensor([40])}
    term = LocalNorm()
    ctx = context(term, received, module=module, slot=mine)
    start = term.prepare(ctx, received)
    assert start.params[params].tolist() == [7.0] * 8
    assert start.buffers[buffers].tolist() == [9.0] * 8
    assert start.counters[counters].tolist() == [40]
    assert torch.equal(start.params[~params], received.params[~params])
    local = Packed(start.params + 1, start.buffers + 1, start.counters + 3)
    slot, message = term.finish(ctx, local)
    assert slot["params"].tolist() == [8.0] * 8
    assert slot["buffers"].tolist() == [10.0] * 8
    assert slot["counters"].tolist() == [43]
    assert message == {}
    sent = term.upload(ctx, local)
    assert torch.equal(sent.params[params], received.params[params])
    assert torch.equal(sent.buffers, received.buffers)
    assert torch.equal(sent.counters, received.counters)
    assert torch.equal(sent.params[~params], local.params[~params])
    assert term.prepare(context(term, received, module=module), received) is received


def test_a_client_keeps_its_layers_and_their_places_and_nothing_as_long_as_the_model() -> None:
    """Beside each number of 4 bytes its place, of 8; a counter has 8 and 8."""
    module = models.build("resnet10", 10)
    layout = Layout.of(module)
    received = layout.pack(module.state_dict())
    slot, _ = LocalNorm().finish(context(LocalNorm(), received, module=module), received)
    sizes = {name: int(mask.sum()) for name, mask in norm_masks(module, layout).items()}
    kept = sum(value.nbytes for value in slot.values())
    assert kept == 12 * (sizes["params"] + sizes["buffers"]) + 16 * sizes["counters"]
    assert kept < 0.01 * received.params.nbytes


def test_the_global_models_normalisation_never_moves() -> None:
    fed = made(method="fedbn")
    state = after(fed, 4)
    first = initial_state(made(method="fedbn")).model
    params, buffers, _ = norm_masks(fed.local_training.module, fed.local_training.layout).values()
    assert torch.equal(state.model.params[params], first.params[params])
    assert torch.equal(state.model.buffers[buffers], first.buffers[buffers])
    assert not torch.equal(state.model.params[~params], first.params[~params])
    for slot in state.terms[0].slots.values():
        assert not torch.equal(slot["params"], first.params[params])
        assert not torch.equal(slot["buffers"], first.buffers[buffers])


def test_a_domain_is_judged_with_the_mean_of_its_clients_layers() -> None:
    fed = made(method="fedbn")
    state = after(fed, 3)
    params, buffers, _ = norm_masks(fed.local_training.module, fed.local_training.layout).values()
    slots = state.terms[0].slots
    for residents in (["plain-0", "plain-1"], ["dark-0"]):
        judged = select_evaluated_model(fed, state.model, state.terms, residents)
        for name, mask in (("params", params), ("buffers", buffers)):
            mean = torch.stack([slots[c][name] for c in residents]).mean(dim=0)
            assert torch.allclose(getattr(judged, name)[mask], mean, atol=1e-6)
        assert torch.equal(judged.params[~params], state.model.params[~params])


def test_a_domain_whose_clients_never_trained_is_judged_with_the_global_model() -> None:
    fed = made(method="fedbn", without=["dark"])
    state = after(fed, 2)
    assert "dark-0" not in state.terms[0].slots
    assert same(select_evaluated_model(fed, state.model, state.terms, ["dark-0"]), state.model)


def test_fedbn_is_a_personalised_row_and_the_others_are_not() -> None:
    assert LocalNorm().personalised
    assert not Ditto().personalised


def test_a_model_without_normalisation_is_fedavg() -> None:
    one, two = (after(made(method=method, model="tiny_data:linear"), 3) for method in ("fedavg", "fedbn"))
    assert same(one.model, two.model)


def test_features_and_norms_together() -> None:
    """The body's layer is found where it is nested."""
    module = featured(3)
    params = norm_masks(module, Layout.of(module))["params"]
    assert int(params.sum()) == 8
