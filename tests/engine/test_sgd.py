"""Our SGD against torch's, bit for bit, and that it spares a process the compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedheal.engine.sgd import SGD
from fedheal.models import build


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_the_bits_are_those_of_torch(momentum: float, weight_decay: float) -> None:
    ours, theirs = (build("small_cnn", classes=10, width=2) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    pair = [
        (ours, SGD(ours.parameters(), 0.1, momentum, weight_decay)),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay)),
    ]
    for _ in range(4):
        x, y = torch.randn(8, 3, 32, 32), torch.arange(8)
        for module, optimiser in pair:
            optimiser.zero_grad()
            functional.cross_entropy(module(x), y).backward()
            optimiser.step()
    for one, two in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_two_steps_by_hand() -> None:
    """From 1 with gradient 1 each time, lr 1, momentum 1/2, decay 1/2: g = 3/2 -> -1/2; g = 3/4, v = 3/4 + 3/4 -> -2."""
    weight = nn.Parameter(torch.ones(1))
    optimiser = SGD([weight], lr=1.0, momentum=0.5, weight_decay=0.5)
    for after in (-0.5, -2.0):
        weight.grad = torch.ones(1)
        optimiser.step()
        assert weight.item() == after
        assert weight.grad.item() == 1, "a gradient is read, not changed"


def test_what_has_no_gradient_stays_and_does_not_decay() -> None:
    idle, held = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    optimiser = SGD([idle, held], lr=1.0, momentum=0.9, weight_decay=0.5)
    optimiser.zero_grad()
    optimiser.step()
    assert torch.equal(idle, torch.ones(2))
    assert torch.equal(held, torch.ones(2))


def test_a_short_run_does_not_load_the_compiler(tmp_path) -> None:
    code = (
        "import sys, fedheal; experiment = fedheal.Experiment(rounds=1, epochs=1, clients_per_domain=1, device='cpu');"
        f"fedheal.run(experiment, {str(tmp_path / 'run')!r}); sys.exit('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
