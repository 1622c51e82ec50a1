"""Batches that are planned for a GPU are those of the serial engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedheal.core.rng import generator
from fedheal.data.augment import normalise_images
from fedheal.data.domains import Split
from fedheal.engine import device_data, serial
from fedheal.engine.device_data import DeviceData, plan_epochs
from fedheal.engine.serial import Task


def lay_out(examples: int, training: serial.Training, rng: torch.Generator, offset: int = 0) -> Tensor:
    """Return the serial engine's batches as a plan, `[steps, 4, batch_size]`."""
    plan = torch.zeros(serial.count_steps(examples, training), 4, training.batch_size, dtype=torch.int64)
    for row, (order, choices, _) in zip(plan, serial.plan_batches(examples, training, rng), strict=True):
        for channel, part in zip(row, (order + offset, *choices), strict=True):
            if part is not None:
                channel[: len(part)] = part
    return plan


@pytest.mark.parametrize("augment", ["none", "crop", "flip", "crop-flip"])
@pytest.mark.parametrize(
    ("examples", "batch_size", "epochs", "steps"),
    [(732, 64, 2, None), (64, 64, 3, None), (7, 64, 2, None), (130, 64, 1, 5), (130, 64, 1, 1), (1, 2, 2, None)],
)
def test_epochs_planned_at_once_equal_batches_planned_one_by_one(augment, examples, batch_size, epochs, steps):
    training = serial.Training(lr=0.1, batch_size=batch_size, epochs=epochs, steps=steps, augment=augment)
    first, second = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    expected = lay_out(examples, training, first, offset=5)
    actual = [torch.from_numpy(planned) for planned in plan_epochs(examples, training, second, offset=5)]
    assert torch.equal(torch.cat(actual), expected)
    assert torch.equal(first.get_state(), second.get_state())


def make_data(sizes: dict[str, int], training: serial.Training) -> tuple[Any, DeviceData]:
    splits = {
        client: Split(torch.zeros(n, 3, 4, 4, dtype=torch.uint8), torch.zeros(n, dtype=torch.int64))
        for client, n in sizes.items()
    }
    local_training = SimpleNamespace(examples=splits, training=training, device=torch.device("cpu"), seed=9)
    return local_training, DeviceData(local_training)


@pytest.mark.parametrize("most", [1, 3, 64])
@pytest.mark.parametrize("augment", ["none", "crop", "flip", "crop-flip"])
@pytest.mark.parametrize(("epochs", "steps"), [(1, None), (3, None), (1, 1), (1, 7)])
def test_a_cohort_is_planned_as_each_of_its_clients(monkeypatch, augment, epochs, steps, most):
    monkeypatch.setattr(device_data, "PLANNED_STEPS", most)
    training = serial.Training(lr=0.1, batch_size=8, epochs=epochs, steps=steps, augment=augment)
    sizes = {"a": 1, "b": 40, "c": 8, "d": 33, "e": 9}
    local_training, data = make_data(sizes, training)
    tasks = [Task(client, 4) for client in ("d", "b", "e", "a")]
    parts = list(data.plan_cohort(local_training, tasks, "batches", (5, 4, 8)))
    assert all(len(part) <= most for part in parts)
    actual = torch.cat(parts)
    assert len(actual) == max(serial.count_steps(sizes[task.client], training) for task in tasks)
    for i, task in enumerate(tasks):
        rng = generator(9, "batches", 4, task.client)
        expected = lay_out(sizes[task.client], training, rng, data.offsets[task.client])
        assert torch.equal(actual[: len(expected), i], expected)
        assert not actual[len(expected) :, i].any()
        plan, batches = data.plan_client(local_training, task, "batches")
        assert torch.equal(plan, expected)
        assert len(batches) == len(expected)
    assert not actual[:, 4:].any()  # a row without a client


def test_batches_of_all_epochs_are_planned_when_they_are_needed():
    training = serial.Training(lr=0.1, batch_size=8, epochs=50, augment="crop")
    local_training, data = make_data({"a": 16, "b": 80}, training)
    parts = data.plan_cohort(local_training, [Task("b", 0), Task("a", 0)], "batches", (2, 4, 8))
    assert len(next(parts)) == 2  # an epoch of the smaller client


def test_a_client_without_examples_has_no_batches():
    training = serial.Training(lr=0.1, batch_size=8, epochs=2, augment="crop")
    local_training, data = make_data({"a": 16, "b": 0}, training)
    parts = list(data.plan_cohort(local_training, [Task("a", 0), Task("b", 0)], "batches", (2, 4, 8)))
    assert len(torch.cat(parts)) == 4
    assert not torch.cat(parts)[:, 1].any()
    assert list(data.plan_cohort(local_training, [Task("b", 0)], "batches", (2, 4, 8))) == []


def test_pixel_values_are_those_of_normalised_images():
    images = torch.randint(0, 256, (2, 3, 5, 7), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    split = Split(images, torch.zeros(2, dtype=torch.int64))
    local_training, _ = make_data({"a": 1}, serial.Training(lr=0.1, batch_size=2, epochs=1, steps=None, augment="none"))
    data = DeviceData(SimpleNamespace(**vars(local_training) | {"examples": {"a": split}}))
    actual = data.pixel_values[images.long(), torch.arange(3).view(1, 3, 1, 1)]
    assert torch.equal(actual, normalise_images(images))
