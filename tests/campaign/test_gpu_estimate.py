"""What a run needs of a GPU, against numbers that can be worked out by hand or measured here."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedheal import data, models
from fedheal.campaign.gpu_estimate import ACTIVATIONS, COPIES, WHOLE, Demand, demand, outline, traced
from fedheal.campaign.placement import FILLS
from fedheal.simulate.build import load_domains, partition_clients
from fedheal.simulate.experiment import Experiment
from tiny_data import quick

GIB = 2**30


def test_a_linear_layer_by_hand():
    """8 images of 192 numbers to 3 classes: a product forward and one for the gradient, none for that of the images."""
    step = traced("tiny_data:linear", None, 3, (8, 3, 8, 8))
    assert step.parameters == 192 * 3 + 3
    assert step.flops == 2 * (2 * 8 * 192 * 3)
    assert step.activations == step.widest == 8 * 192 * 4  # the images, which the gradient is made of


@pytest.mark.parametrize(("batch", "side", "tera"), [(64, 32, 0.0973), (16, 192, 16 / 64 * 36 * 0.0973)])
def test_the_resnet_of_the_paper(batch, side, tera):
    step = traced("resnet10", None, 10, (batch, 3, side, side))
    assert step.parameters == 4_903_242
    assert step.flops == pytest.approx(tera * 1e12, rel=0.05)
    assert step.flops == _flops_by_layers(models.build("resnet10", classes=10), batch, side)


def _flops_by_layers(module: nn.Module, batch: int, side: int) -> int:
    """A multiplication and an addition each for the layer, its weights' gradient, and, but for the first, its input's."""
    outputs: dict[nn.Module, Tensor] = {}
    for layer in module.modules():
        layer.register_forward_hook(lambda layer, _, out: outputs.update({layer: out}))
    with torch.no_grad():
        module(torch.zeros(1, 3, side, side))
    total = 0
    for layer, out in outputs.items():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            first = isinstance(layer, nn.Conv2d) and layer.in_channels == 3
            total += (2 if first else 3) * 2 * batch * out.numel() * layer.weight[0].numel()
    return total


@pytest.mark.parametrize("name", ["small_cnn", "resnet10"])
def test_traced_activations_are_those_of_a_real_step(name):
    module, found = models.build(name, classes=10, width=8).train(), {}
    own = {t.data_ptr() for t in (*module.parameters(), *module.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            found[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(torch.zeros(4, 3, 32, 32)).sum().backward()
    real = sum(tensor.untyped_storage().nbytes() for tensor in found.values())
    assert traced(name, 8, 10, (4, 3, 32, 32)).activations == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("name", data.SPECS)
def test_every_described_data_set_has_an_outline_without_a_file(name):
    need = demand(Experiment(data=name, data_root="/nowhere"))
    assert FILLS < need.flops_per_step < math.inf
    assert 2 * GIB < need.bytes < 64 * GIB


def test_the_outline_of_digits_has_the_papers_clients():
    experiment = Experiment(data="digits")
    held = [len(client.indices) for client in partition_clients(experiment, outline("digits", data.DataRequest()))]
    assert held == [600] * 5 + [72] * 5 + [732] * 5 + [100] * 5


def test_the_outline_of_own_data_is_that_of_what_is_read():
    experiment = quick()
    real, found = load_domains(experiment), outline(experiment.data, data.DataRequest())
    assert [d.train.images.shape for d in found.domains] == [d.train.images.shape for d in real.domains]
    assert {d.test.images.device.type for d in found.domains} == {"meta"}


def test_the_parts_of_a_demand_add_up():
    """Every lane and every client more costs what it holds, and nothing else changes."""
    keys = {"data": "digits", "model": "small_cnn", "batch_size": 32}
    step = traced("small_cnn", None, 10, (32, 3, 32, 32))
    lane = ACTIVATIONS * step.activations + COPIES * 4 * step.parameters
    one, two = (demand(Experiment(**keys, lanes=n)) for n in (1, 2))
    assert two.bytes - one.bytes == lane
    assert demand(Experiment(**keys, engine="serial")) == one
    four, five = (demand(Experiment(**keys, lanes=1, clients_per_domain=n, samples_per_client=50)) for n in (4, 5))
    images = 50 * 3 * (32 * 32 + 40 * 40)  # as they are, and with room for crops
    assert five.bytes - four.bytes == 4 * (images + (4 + 2) * step.parameters)
    moon = demand(Experiment(**keys, lanes=1, method="moon"))
    assert moon.bytes - one.bytes == 20 * 4 * step.parameters  # a model that every client keeps


def test_small_runs_do_not_fill_a_gpu_and_the_papers_do():
    assert demand(Experiment(data="embedded")).flops_per_step < FILLS / 10
    assert demand(Experiment(data="embedded")).bytes < 3 * GIB
    assert demand(Experiment(data="digits")).flops_per_step > FILLS


def test_who_trains_counts():
    everyone, alone, pooled = (
        demand(Experiment(data="digits", **keys)) for keys in ({}, {"only": ["usps-0"]}, {"pool": True})
    )
    assert alone.bytes < pooled.bytes < everyone.bytes


@pytest.mark.parametrize(
    "keys", [{"model": "tiny_data:looking"}, {"data": "tiny_data:absent"}, {"clients_per_domain": 999}], ids=str
)
def test_what_cannot_be_told_needs_a_whole_gpu(keys):
    assert demand(quick(**keys)) == WHOLE == Demand(math.inf, math.inf)


def test_looking_at_a_model_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    traced.cache_clear()
    demand(quick())
    assert torch.equal(torch.get_rng_state(), before)
