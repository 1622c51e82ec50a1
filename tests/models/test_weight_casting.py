"""Weights cast together are weights cast one by one."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch

from fedheal import models
from fedheal.models import resnet, weight_casting


def trained(module, x):
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(x).float().square().mean()
    loss.backward()
    return loss.detach(), [p.grad for p in module.parameters()]


def test_losses_and_gradients_have_the_bits_of_plain_autocast(monkeypatch):
    torch.manual_seed(0)
    module = models.build("resnet10", classes=3, width=16)
    x = torch.randn(6, 3, 12, 12)
    counted = []
    monkeypatch.setattr(weight_casting.torch, "_foreach_copy_", counting(torch._foreach_copy_, counted))
    together = trained(copy.deepcopy(module), x)
    assert counted == [12, 12]  # there and back
    monkeypatch.setattr(resnet, "cast_weights", lambda *_: nullcontext())
    one_by_one = trained(copy.deepcopy(module), x)
    assert torch.equal(together[0], one_by_one[0])
    for a, b in zip(together[1], one_by_one[1], strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


def counting(function, counted):
    def counts(made, given):
        counted.append(len(made))
        return function(made, given)

    return counts


def test_parameters_are_left_as_they_were_even_by_an_error():
    module = models.build("resnet10", classes=3, width=16)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError):
        module(torch.randn(2, 5, 8, 8))  # five channels do not fit
    assert all(part.weight.dtype == torch.float32 for part in module.modules() if hasattr(part, "weight"))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_nothing_is_cast_without_autocast(monkeypatch):
    module = models.build("resnet10", classes=3, width=16)
    monkeypatch.setattr(weight_casting.torch, "_foreach_copy_", None)
    assert module(torch.randn(2, 3, 8, 8)).dtype == torch.float32
