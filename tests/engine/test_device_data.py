"""Batches that are planned for a GPU are those of the serial engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedheal.data.augment import normalise_images
from fedheal.data.domains import Split
from fedheal.engine import serial
from fedheal.engine.device_data import DeviceData, plan_epochs


@pytest.mark.parametrize("augment", ["none", "crop", "flip", "crop-flip"])
@pytest.mark.parametrize(
    ("examples", "batch_size", "epochs", "steps"),
    [(732, 64, 2, None), (64, 64, 3, None), (7, 64, 2, None), (130, 64, 1, 5), (130, 64, 1, 1), (1, 2, 2, None)],
)
def test_epochs_planned_at_once_equal_batches_planned_one_by_one(augment, examples, batch_size, epochs, steps):
    training = serial.Training(lr=0.1, batch_size=batch_size, epochs=epochs, steps=steps, augment=augment)
    one, two = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    expected = [[order, *choices] for order, choices, _ in serial.plan_batches(examples, training, one)]
    found = [
        [None if part is None else part[start : start + size] for part in (order, *choices)]
        for order, choices, size in plan_epochs(examples, training, two)
        for start in range(0, len(order), size)
    ]
    assert len(found) == len(expected)
    for batch, expected_batch in zip(found, expected, strict=True):
        for part, expected_part in zip(batch, expected_batch, strict=True):
            assert (part is None) == (expected_part is None)
            assert part is None or torch.equal(part, expected_part)
    assert torch.equal(one.get_state(), two.get_state())


def test_pixel_values_are_those_of_normalised_images():
    images = torch.randint(0, 256, (2, 3, 5, 7), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    split = Split(images, torch.zeros(2, dtype=torch.int64))
    training = serial.Training(lr=0.1, batch_size=2, epochs=1, steps=None, augment="none")
    given = SimpleNamespace(examples={"a": split}, training=training, device=torch.device("cpu"))
    found = DeviceData(given).pixel_values[images.long(), torch.arange(3).view(1, 3, 1, 1)]
    assert torch.equal(found, normalise_images(images))
