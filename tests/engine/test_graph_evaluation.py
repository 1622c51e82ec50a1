"""A narrow network as a cohort of one client; what needs a GPU is in tests/gpu."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedheal import Layout
from fedheal.data.domains import Split
from fedheal.engine.graph_evaluation import GraphEvaluation, is_near, stack_narrow_network
from fedheal.models.small_cnn import SmallCNN
from fedheal.simulate.build import build_federation
from tiny_data import load, quick


def make_local_training(module, precision="bf16"):
    fed = build_federation(quick(), load(), torch.device("cpu"))
    return replace(fed.local_training, module=module, layout=Layout.of(module), precision=precision)


def test_a_narrow_network_has_the_logits_of_the_module():
    local_training = make_local_training(SmallCNN(classes=10))
    model = local_training.layout.pack(local_training.module.state_dict())
    model = replace(model, buffers=model.buffers + torch.rand_like(model.buffers))
    load_narrow = stack_narrow_network(local_training)
    x = torch.randn(7, 3, 32, 32)
    with torch.no_grad():
        for factor in (1.0, 1.5):  # the second model replaces the first
            scaled = replace(model, params=factor * model.params)
            expected = local_training.load_model(scaled, training=False)(x)
            torch.testing.assert_close(load_narrow(scaled)(x), expected)


@pytest.mark.parametrize(
    ("module", "precision"),
    [
        (SmallCNN(classes=10), "tf32"),
        (SmallCNN(classes=10, width=16), "bf16"),  # 64 channels
        (nn.Sequential(nn.Flatten(), nn.Linear(192, 5)), "bf16"),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True)), "bf16"),  # cannot be stacked
    ],
)
def test_other_networks_are_evaluated_as_they_are(module, precision):
    assert stack_narrow_network(make_local_training(module, precision)) is None


class UsesWeight(nn.Module):
    """Applies the weight of a layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)

    def forward(self, x):
        return functional.conv2d(x, self.conv.weight).mean(dim=(2, 3))


@pytest.mark.parametrize(("module", "expected"), [(SmallCNN(classes=10), True), (UsesWeight(), False)])
def test_a_network_is_used_only_if_it_can_be_stacked(module, expected):
    local_training = make_local_training(module)
    evaluation, narrow = GraphEvaluation(local_training), stack_narrow_network(local_training)
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    model = local_training.layout.pack(module.state_dict())
    assert evaluation._check_narrow(narrow, Split(images, torch.arange(6)), model) is expected


def test_a_network_that_disagrees_with_the_module_is_not_used():
    local_training = make_local_training(SmallCNN(classes=10))
    other = SmallCNN(classes=10)
    model = local_training.layout.pack(local_training.module.state_dict())
    split = Split(torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8), torch.arange(6))
    assert not GraphEvaluation(local_training)._check_narrow(lambda model: other.eval(), split, model)


def test_logits_within_rounding_errors_are_near():
    logits = torch.randn(50, 10)
    assert is_near(logits.bfloat16(), logits)
    assert not is_near(logits.roll(1, 0), logits)
    assert not is_near(torch.full_like(logits, torch.nan), logits)
