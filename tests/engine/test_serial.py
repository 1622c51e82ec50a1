"""One client's training, against SGD in numpy, and what it may not depend on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tiny_data
from fedheal.core.layout import Layout, Packed
from fedheal.core.rng import derive, generator
from fedheal.data.domains import Split
from fedheal.engine import serial
from fedheal.engine.serial import EVALUATE_BATCH, LocalTraining, Task, Training, find_correct, use_seed

CPU = torch.device("cpu")


def train(local_training, model, client, number):
    return serial.train_client(local_training, model, (), Task(client, number)).reply


def make_batches(*arguments):
    return ((x, y) for x, y, _ in serial.make_batches(*arguments))


def make_local_training(module: nn.Module, examples: Split, seed: int = 0, **keys: Any) -> LocalTraining:
    training = Training(**{"lr": 0.1, "batch_size": 8, "momentum": 0.9, "weight_decay": 0.01} | keys)
    return LocalTraining(module, Layout.of(module), training, seed, CPU, {"a": examples, "b": examples})


def pack_model(b: LocalTraining) -> Packed:
    return b.layout.pack(b.module.state_dict())


def make_pixels(number: int) -> Split:
    """Return one-pixel images of two classes."""
    chance = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (number, 3, 1, 1), dtype=torch.uint8, generator=chance)
    return Split(images, torch.arange(number) % 2)


def make_linear() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(3, 2, bias=False))
    with torch.no_grad():
        module[1].weight.copy_(torch.tensor([[0.1, -0.2, 0.3], [0.0, 0.5, -0.4]]))
    return module


def normalise_inputs(split: Split) -> np.ndarray[Any, Any]:
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    return (split.images.numpy().reshape(-1, 3) / 255 - mean) / std


def run_sgd(
    w: Any, batches_: list[tuple[Any, Any]], lr: float, momentum: float, decay: float
) -> tuple[Any, list[float]]:
    """Run SGD in numpy: velocity = momentum * velocity + gradient + decay * w; w -= lr * velocity."""
    velocity, losses = np.zeros_like(w), []
    for x, y in batches_:
        logits = x @ w.T
        p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        losses.append(-np.log(p[np.arange(len(y)), y]).mean())
        p[np.arange(len(y)), y] -= 1
        velocity = momentum * velocity + p.T @ x / len(y) + decay * w
        w = w - lr * velocity
    return w, losses


# Golden numbers


def test_one_step_by_hand() -> None:
    """White pixel, weights zero: p = 1/2 each, so class 0's row moves by lr/2 times the input and class 1's by minus that."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(3, 2, bias=False))
    nn.init.zeros_(module[1].weight)
    white = Split(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8), torch.tensor([0]))
    b = make_local_training(module, white, weight_decay=0.0)
    reply = train(b, pack_model(b), "a", 1)
    x = [(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225]
    assert reply.delta.tolist() == pytest.approx([0.05 * v for v in x] + [-0.05 * v for v in x], rel=1e-6)
    assert reply.metrics == {"train_loss": pytest.approx(math.log(2)), "steps": 1.0, "lr": 0.1, "reach": 0.1}
    assert (reply.client, reply.num_examples, reply.buffers, reply.counters) == ("a", 1, None, None)


def test_full_batches_with_momentum_and_decay_against_numpy() -> None:
    examples = make_pixels(6)
    b = make_local_training(make_linear(), examples, batch_size=6, epochs=5)
    before = pack_model(b)
    reply = train(b, before, "a", 1)
    w = before.params.double().numpy().reshape(2, 3)
    after, losses = run_sgd(w, [(normalise_inputs(examples), examples.labels.numpy())] * 5, 0.1, 0.9, 0.01)
    assert reply.delta.numpy() == pytest.approx((after - w).ravel(), rel=1e-4, abs=1e-6)
    assert reply.metrics["train_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert reply.metrics["steps"] == 5.0
    # momentum 0.9: A_5 = (5 - 0.9 (1 - 0.9^5) / 0.1) / 0.1 = 13.1441
    assert reply.metrics["reach"] == pytest.approx(0.1 * 13.1441)


def test_small_batches_in_the_order_of_their_generator_against_numpy() -> None:
    examples = make_pixels(7)
    b = make_local_training(make_linear(), examples, seed=3, batch_size=3, epochs=2)
    before = pack_model(b)
    reply = train(b, before, "b", 4)
    chance, batches = generator(3, "batches", 4, "b"), []
    for _ in range(2):
        order = torch.randperm(7, generator=chance).numpy()
        batches += [(normalise_inputs(examples)[i], examples.labels.numpy()[i]) for i in np.split(order, [3, 6])]
    w = before.params.double().numpy().reshape(2, 3)
    after, _ = run_sgd(w, batches, 0.1, 0.9, 0.01)
    assert reply.delta.numpy() == pytest.approx((after - w).ravel(), rel=1e-4, abs=1e-6)
    assert reply.metrics["steps"] == 6.0


# Batches


@pytest.mark.parametrize(
    ("number", "size", "epochs", "steps", "sizes"),
    [
        (10, 4, 1, None, [4, 4, 2]),
        (10, 4, 2, None, [4, 4, 2, 4, 4, 2]),
        (8, 4, 1, None, [4, 4]),
        (3, 8, 1, None, [3]),
        (1, 1, 3, None, [1, 1, 1]),
        (10, 4, 99, 2, [4, 4]),  # steps win over epochs
        (10, 4, 1, 3, [4, 4, 2]),
        (10, 4, 1, 5, [4, 4, 2, 4, 4]),
        (10, 4, 1, 7, [4, 4, 2, 4, 4, 2, 4]),
        (3, 8, 1, 4, [3, 3, 3, 3]),
    ],
)
def test_how_many_batches_of_what_size(
    number: int, size: int, epochs: int, steps: int | None, sizes: list[int]
) -> None:
    actual = make_batches(make_pixels(number), Training(0.1, size, epochs, steps), generator(0, "x"))
    assert [len(y) for _, y in actual] == sizes


def test_every_epoch_takes_every_example_once_in_another_order() -> None:
    examples = Split(torch.arange(9, dtype=torch.uint8).view(9, 1, 1, 1).expand(9, 3, 1, 1), torch.arange(9))
    labels = torch.cat([y for _, y in make_batches(examples, Training(0.1, 4, 3), generator(0, "x"))]).view(3, 9)
    assert all(sorted(row) == list(range(9)) for row in labels.tolist())
    assert len({tuple(row) for row in labels.tolist()}) == 3


def test_images_and_labels_stay_together() -> None:
    examples = Split(torch.arange(9, dtype=torch.uint8).view(9, 1, 1, 1).expand(9, 3, 1, 1), torch.arange(9))
    for x, y in make_batches(examples, Training(0.1, 4, 2, augment="flip"), generator(0, "x")):
        assert torch.allclose((x[:, 0, 0, 0] * 0.229 + 0.485) * 255, y.float(), atol=1e-3)


# What training may depend on


def test_the_optimiser_starts_afresh_each_round() -> None:
    """A second call from the same model gives the same update: no velocity is left over."""
    b = make_local_training(make_linear(), make_pixels(6), batch_size=6, epochs=3)
    before = pack_model(b)
    first = train(b, before, "a", 1)
    train(b, before, "b", 1)
    again = train(b, before, "a", 1)
    assert torch.equal(first.delta, again.delta)


def test_rounds_clients_and_seeds_draw_differently() -> None:
    b, other = (
        make_local_training(tiny_data.linear(3), tiny_data.make_split(20, 1.0, 0.5, 0), seed) for seed in (0, 1)
    )
    model = pack_model(b)
    deltas = [train(b, model, "a", 1), train(b, model, "a", 2), train(b, model, "b", 1), train(other, model, "a", 1)]
    assert len({reply.delta.numpy().tobytes() for reply in deltas}) == 4


def test_the_global_model_is_not_changed() -> None:
    b = make_local_training(tiny_data.conv_batchnorm(3), tiny_data.make_split(20, 1.0, 0.5, 0))
    model = pack_model(b)
    copies = [v.clone() for v in (model.params, model.buffers, model.counters)]
    train(b, model, "a", 1)
    assert all(torch.equal(v, k) for v, k in zip((model.params, model.buffers, model.counters), copies, strict=True))


def test_dropout_layers_are_reproducible_and_the_global_stream_is_left_alone() -> None:
    b = make_local_training(tiny_data.dropout(3), tiny_data.make_split(20, 1.0, 0.5, 0))
    model = pack_model(b)
    state = torch.random.get_rng_state()
    first = train(b, model, "a", 1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(123)
    assert torch.equal(train(b, model, "a", 1).delta, first.delta)
    torch.random.set_rng_state(state)


def test_dropout_layers_do_drop_in_training() -> None:
    split = tiny_data.make_split(20, 1.0, 0.5, 0)
    first, second = make_local_training(tiny_data.dropout(3), split), make_local_training(tiny_data.linear(3), split)
    model = pack_model(first)
    assert not torch.equal(train(first, model, "a", 1).delta, train(second, model, "a", 1).delta)


def test_the_global_stream_is_put_back_after_an_error() -> None:
    state = torch.random.get_rng_state()
    with pytest.raises(RuntimeError, match="size"), use_seed(derive(0, "x"), CPU):
        torch.rand(3) + torch.rand(4)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_frozen_parameter_does_not_move() -> None:
    module = tiny_data.conv_batchnorm(3)
    module[0].weight.requires_grad_(False)
    b = make_local_training(module, tiny_data.make_split(20, 1.0, 0.5, 0), weight_decay=0.1)
    delta = train(b, pack_model(b), "a", 1).delta
    frozen = module[0].weight.numel()
    assert not delta[:frozen].any()
    assert delta[frozen:].any()


# Kinds of modules


def test_batch_normalisation_sends_its_statistics_and_counts() -> None:
    b = make_local_training(tiny_data.conv_batchnorm(3), tiny_data.make_split(20, 1.0, 0.5, 0), epochs=2)
    reply = train(b, pack_model(b), "a", 1)
    assert reply.buffers.shape == (8,)
    assert reply.counters.tolist() == [6]  # 3 batches twice
    assert not torch.equal(reply.buffers, pack_model(b).buffers * 0)


def test_tied_weights_are_one_slice_and_stay_tied() -> None:
    b = make_local_training(tiny_data.tied_weights(3), tiny_data.make_split(20, 1.0, 0.5, 0))
    size = 3 * tiny_data.SIDE
    reply = train(b, pack_model(b), "a", 1)
    assert reply.delta.shape == (size * size + 3 * size + 3,)
    assert b.module.one.weight is b.module.two.weight


# Evaluation


def test_correct_is_per_example_in_evaluation_mode_and_in_any_number() -> None:
    module = tiny_data.dropout(3)
    whole = tiny_data.make_split(2 * EVALUATE_BATCH + 5, 1.0, 0.5, 0)
    right = find_correct(module.train(), whole)
    assert right.shape == (2 * EVALUATE_BATCH + 5,)
    assert right.dtype == torch.bool
    assert torch.equal(find_correct(module, Split(whole.images[-5:], whole.labels[-5:])), right[-5:])
    assert torch.equal(find_correct(module, whole), right)  # no dropout


def test_evaluation_does_not_touch_statistics() -> None:
    module = tiny_data.conv_batchnorm(3)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    find_correct(module, tiny_data.make_split(20, 1.0, 0.5, 0))
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


@pytest.mark.parametrize(("side", "size"), [(8, 512), (192, 113)])
def test_full_gradients_use_batches_of_one_size_on_every_device(side, size):
    """With batch normalisation the gradient depends on the size. The tensors are fake: they need no GPU and no memory."""
    with FakeTensorMode():
        for device in ("cpu", "cuda"):
            images = torch.empty(1300, 3, side, side, dtype=torch.uint8, device=device)
            split = Split(images, torch.empty(1300, dtype=torch.int64, device=device))
            assert {len(x) for x, _ in serial.gradient_batches(split)} == {size, 1300 % size}


def test_full_gradients_are_taken_in_these_batches(monkeypatch):
    b, seen = make_local_training(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3), nn.Linear(3, 2)), make_pixels(24)), []

    def split_by_twelve(split: Split) -> Any:
        seen.append(len(split))
        return zip(split.images.split(12), split.labels.split(12), strict=True)

    monkeypatch.setattr(serial, "gradient_batches", split_by_twelve)
    actual = serial._compute_gradient(b, pack_model(b), Task("a", 1))
    monkeypatch.undo()
    assert seen == [24]
    assert not torch.allclose(actual, serial._compute_gradient(b, pack_model(b), Task("a", 1)))
