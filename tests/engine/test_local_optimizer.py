"""The clients' Adam and the learning rate of each round, against numbers by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedheal.engine import serial
from fedheal.engine.lanes import Lanes
from fedheal.engine.local_optimizer import LeanSGD, build_optimizer, compute_lr
from fedheal.engine.serial import SerialEngine, Task, Training
from fedheal.simulate.build import check_method
from fedheal.simulate.round import initial_state, run_round
from tiny_data import quick
from tiny_runs import make_federation

LR = 0.8


@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        ({}, [0.8, 0.8, 0.8, 0.8]),
        ({"schedule": "cosine"}, [0.8, 0.8 * 0.853553, 0.4, 0.8 * 0.146447]),  # (1 + cos(k pi / 4)) / 2
        ({"schedule": "step", "every": 2}, [0.8, 0.8, 0.08, 0.08]),
        ({"schedule": "step", "every": 1, "decay": 0.5}, [0.8, 0.4, 0.2, 0.1]),
        ({"schedule": "exponential"}, [0.8, 0.8 * 0.99, 0.8 * 0.9801, 0.8 * 0.970299]),
        ({"warmup": 3}, [0.2, 0.4, 0.6, 0.8]),
        ({"schedule": "cosine", "warmup": 2}, [0.8 / 3, 1.6 / 3, 0.8, 0.4]),  # half a cosine over the two rounds left
        ({"schedule": "exponential", "decay": 0.5, "warmup": 1}, [0.4, 0.8, 0.4, 0.2]),
    ],
    ids=str,
)
def test_the_rate_of_each_round_by_hand(keys: dict[str, Any], rates: list[float]) -> None:
    assert [compute_lr(LR, number, 4, **keys) for number in (1, 2, 3, 4)] == pytest.approx(rates, rel=1e-5)


def test_a_round_trains_with_its_rate_bit_for_bit() -> None:
    """A round with a schedule equals one with that constant rate: model, metrics and contexts."""
    fed = make_federation(method="scaffold", rounds=4, lr_schedule="step", lr_decay_every=2, lr_decay=0.5, lr=0.1)
    local_training = fed.local_training
    plain = replace(local_training, training=Training(lr=0.05, **_get_other_settings(local_training.training)))
    model, shared = initial_state(fed).model, tuple(term.shared for term in initial_state(fed).terms)
    task = Task(fed.clients[0], 3, ({},))
    ours, theirs = (serial.train_client(x, model, shared, task) for x in (local_training, plain))
    assert torch.equal(ours.reply.delta, theirs.reply.delta)
    assert ours.reply.metrics == theirs.reply.metrics
    assert ours.reply.metrics["lr"] == 0.05
    assert torch.equal(ours.slots[0]["c"], theirs.slots[0]["c"])  # divides by the effective step of this round
    first = serial.train_client(local_training, model, shared, replace(task, round=1))
    assert first.reply.metrics["lr"] == 0.1


def _get_other_settings(training: Training) -> dict[str, Any]:
    names = ("batch_size", "epochs", "steps", "momentum", "weight_decay", "augment")
    return {name: getattr(training, name) for name in names}


def _run_adam(gradients: list[float], decay: float, is_decoupled: bool) -> float:
    """Kingma and Ba 2015, with bias correction; w starts at 1, lr = 0.1, b1 = 0.9, b2 = 0.999."""
    w = 1.0
    m = v = 0.0
    for t, gradient in enumerate(gradients, start=1):
        g = gradient if is_decoupled else gradient + decay * w
        w -= 0.1 * decay * w if is_decoupled else 0.0
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w -= 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return w


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sgd_gives_the_bits_of_torch(momentum: float, weight_decay: float, dtype: torch.dtype) -> None:
    """Some gradients start later, are None for a step or always, or have other strides."""
    ours, theirs = ([nn.Parameter(_draw(shape, dtype)) for shape in SHAPES] for _ in range(2))
    lean = build_optimizer("sgd", ours, 0.03, momentum, weight_decay, fused=False)
    assert isinstance(lean, LeanSGD)
    torch_optimizer = torch.optim.SGD(theirs, lr=0.03, momentum=momentum, weight_decay=weight_decay)
    for number, present in enumerate([(0, 2), (0, 1, 2), (0, 1), (0, 1, 2)]):
        for params, optimiser in ((ours, lean), (theirs, torch_optimizer)):
            optimiser.zero_grad()
            assert all(param.grad is None for param in params)
            for i in present:
                params[i].grad = _draw(SHAPES[i], dtype, number)
            optimiser.step()
    assert all(torch.equal(first, second) for first, second in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[1], _draw(SHAPES[1], dtype))


SHAPES = [(8, 3, 3, 3), (37,), (10, 512), (5,)]


def _draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 9) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return drawn.contiguous(memory_format=torch.channels_last) if len(shape) == 4 and seed % 2 else drawn


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_against_its_formula(optimizer: str) -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    torch_optimizer = build_optimizer(optimizer, [weight], lr=0.1, momentum=0.9, weight_decay=0.5, fused=False)
    gradients = [2.0, -1.0, 0.5]
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient)
        torch_optimizer.step()
    assert float(weight.detach()) == pytest.approx(_run_adam(gradients, 0.5, optimizer == "adamw"), rel=1e-12)


def test_the_first_step_of_adam_moves_every_entry_by_the_rate() -> None:
    fed = make_federation(method="fedavg", optimizer="adam", lr=0.01, steps=1, weight_decay=0.0)
    state = initial_state(fed)
    reply = serial.train_client(fed.local_training, state.model, (), Task(fed.clients[0], 1)).reply
    moved = reply.delta[reply.delta.abs() > 1e-4].abs()  # entries whose gradient is far above Adam's eps
    assert len(moved) > 10
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=1e-2, atol=0)
    assert "reach" not in reply.metrics  # that of SGD says nothing about Adam


@pytest.mark.parametrize(
    ("keys", "word"),
    [({"optimizer": "adamw"}, "adamw"), ({"lr_schedule": "cosine"}, "lr_schedule"), ({"warmup_rounds": 2}, "warmup")],
    ids=str,
)
def test_lanes_fall_back_to_the_serial_engine(keys: dict[str, Any], word: str) -> None:
    """A captured step replays one learning rate and SGD's update."""
    fed = make_federation(method="fedavg", rounds=3, **keys)
    lanes, actual = Lanes(fed.local_training, 2), []
    for engine in (lanes, SerialEngine(fed.local_training)):
        actual.append(run_round(fed, replace(initial_state(fed), round=1), engine, evaluate=False)[0].model.params)
        fed.local_training.layout.load_into(
            fed.local_training.module, initial_state(make_federation(method="fedavg")).model
        )
    assert word in lanes.fallback_reason
    assert torch.equal(*actual)


@pytest.mark.parametrize("method", ["scaffold", "qffl", "fedheal:per_step=true"])
def test_methods_that_measure_steps_of_sgd_refuse_another_optimizer(method: str) -> None:
    with pytest.raises(ValueError, match=r"optimizer = 'adam' with method .*of SGD.*; use optimizer=sgd$"):
        check_method(quick(method=method, optimizer="adam"))
    check_method(quick(method="scaffold:option=1", optimizer="adam"))
    check_method(quick(method="qffl:mode=reweight", optimizer="adamw"))
