"""FedBN: which layers stay with the client, and with which a domain is evaluated."""

from __future__ import annotations

import torch
from torch import nn

from fedheal import models
from fedheal.core.layout import Layout, Packed
from fedheal.local.ditto import Ditto
from fedheal.local.fedbn import FedBN, find_norm_entries
from fedheal.simulate.evaluation import select_evaluated_model
from fedheal.simulate.round import initial_state
from local.quadratic import make_term_context
from local.rounds import make_federation, run_rounds
from tiny_data import conv_batchnorm, feature_model
from tiny_runs import is_same


class Block(nn.Module):
    """Several kinds of normalisation, under names that do not show it."""

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
    masks = find_norm_entries(module, layout)
    local_names = {e.name for e in layout.entries if bool(masks[f"{e.kind}s"][e.start : e.stop].all())}
    expected = {"group.weight", "group.bias", "layer.weight", "layer.bias", "root.weight"}
    expected |= {"shortcut.1.num_batches_tracked"}
    expected |= {f"shortcut.1.{name}" for name in ("weight", "bias", "running_mean", "running_var")}
    assert local_names == expected
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {"params": 3 * 8 + 4, "buffers": 8, "counters": 1}


def test_a_resnets_shortcut_layers_are_among_them() -> None:
    module = models.build("resnet10", 10, width=4)
    layout = Layout.of(module)
    params, buffers, _ = find_norm_entries(module, layout).values()
    kinds = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
    unnamed = [n for n, part in module.named_modules() if isinstance(part, nn.BatchNorm2d) and "bn" not in n]
    assert unnamed  # else this test would show nothing
    assert int(params.sum()) == sum(2 * part.num_features for part in kinds)
    assert bool(buffers.all())


def test_fedbn_by_hand() -> None:
    """Own layers go in at the start, the received ones go back out, the local ones stay."""
    module = conv_batchnorm(3)
    layout = Layout.of(module)
    received = layout.pack(module.state_dict())
    params, buffers, counters = find_norm_entries(module, layout).values()
    mine = {"params": torch.full((8,), 7.0), "buffers": torch.full((8,), 9.0), "counters": torch.tensor([40])}
    term = FedBN()
    ctx = make_term_context(term, received, module=module, slot=mine)
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
    local_model = term.upload(ctx, local)
    assert torch.equal(local_model.params[params], received.params[params])
    assert torch.equal(local_model.buffers, received.buffers)
    assert torch.equal(local_model.counters, received.counters)
    assert torch.equal(local_model.params[~params], local.params[~params])
    assert term.prepare(make_term_context(term, received, module=module), received) is received


def test_a_client_keeps_its_layers_and_their_places_and_nothing_as_long_as_the_model() -> None:
    """Beside each number of 4 bytes its place, of 8; a counter has 8 and 8."""
    module = models.build("resnet10", 10)
    layout = Layout.of(module)
    received = layout.pack(module.state_dict())
    slot, _ = FedBN().finish(make_term_context(FedBN(), received, module=module), received)
    sizes = {name: int(mask.sum()) for name, mask in find_norm_entries(module, layout).items()}
    slot_bytes = sum(value.nbytes for value in slot.values())
    assert slot_bytes == 12 * (sizes["params"] + sizes["buffers"]) + 16 * sizes["counters"]
    assert slot_bytes < 0.01 * received.params.nbytes


def test_the_global_models_normalisation_never_moves() -> None:
    fed = make_federation(method="fedbn")
    state = run_rounds(fed, 4)
    first = initial_state(make_federation(method="fedbn")).model
    params, buffers, _ = find_norm_entries(fed.local_training.module, fed.local_training.layout).values()
    assert torch.equal(state.model.params[params], first.params[params])
    assert torch.equal(state.model.buffers[buffers], first.buffers[buffers])
    assert not torch.equal(state.model.params[~params], first.params[~params])
    for slot in state.terms[0].slots.values():
        assert not torch.equal(slot["params"], first.params[params])
        assert not torch.equal(slot["buffers"], first.buffers[buffers])


def test_a_domain_is_judged_with_the_mean_of_its_clients_layers() -> None:
    fed = make_federation(method="fedbn")
    state = run_rounds(fed, 3)
    params, buffers, _ = find_norm_entries(fed.local_training.module, fed.local_training.layout).values()
    slots = state.terms[0].slots
    for residents in (["plain-0", "plain-1"], ["dark-0"]):
        evaluated = select_evaluated_model(fed, state.model, state.terms, residents)
        for name, mask in (("params", params), ("buffers", buffers)):
            mean = torch.stack([slots[c][name] for c in residents]).mean(dim=0)
            assert torch.allclose(getattr(evaluated, name)[mask], mean, atol=1e-6)
        assert torch.equal(evaluated.params[~params], state.model.params[~params])


def test_a_domain_whose_clients_never_trained_is_judged_with_the_global_model() -> None:
    fed = make_federation(method="fedbn", without=["dark"])
    state = run_rounds(fed, 2)
    assert "dark-0" not in state.terms[0].slots
    assert is_same(select_evaluated_model(fed, state.model, state.terms, ["dark-0"]), state.model)


def test_fedbn_is_a_personalised_row_and_the_others_are_not() -> None:
    assert FedBN().personalised
    assert not Ditto().personalised


def test_a_model_without_normalisation_is_fedavg() -> None:
    first, second = (
        run_rounds(make_federation(method=method, model="tiny_data:linear"), 3) for method in ("fedavg", "fedbn")
    )
    assert is_same(first.model, second.model)


def test_features_and_norms_together() -> None:
    """The body's layer is found where it is nested."""
    module = feature_model(3)
    params = find_norm_entries(module, Layout.of(module))["params"]
    assert int(params.sum()) == 8
