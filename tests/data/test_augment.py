"""Crop, flip and normalise for whole batches against one image at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedheal.data.augment import PAD, apply_choices, draw_choices, normalise_images


def make_images(number: int = 20, height: int = 32, width: int = 32) -> Tensor:
    chance = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (number, 3, height, width), dtype=torch.uint8, generator=chance)


def make_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def augment(before: Tensor, how: str, generator: torch.Generator) -> Tensor:
    return apply_choices(before, draw_choices(len(before), how, generator))


def crop_by_hand(image: Tensor, top: int, left: int) -> Tensor:
    """Shift one image in a black frame, pixel by pixel."""
    _, height, width = image.shape
    cropped = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            y, x = row + top - PAD, column + left - PAD
            if 0 <= y < height and 0 <= x < width:
                cropped[:, row, column] = image[:, y, x]
    return cropped


SHAPES = [(32, 32), (28, 28), (8, 12), (5, 3), (1, 1)]


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_crop_is_each_image_moved_by_its_own_shift(height: int, width: int) -> None:
    before = make_images(6, height, width)
    after = augment(before, "crop", make_generator())
    # The same numbers drawn by hand: first all tops, then all lefts.
    top, left = torch.randint(0, 2 * PAD + 1, (2, 6, 1), generator=make_generator())
    for i in range(6):
        assert torch.equal(after[i], crop_by_hand(before[i], int(top[i]), int(left[i])))
    assert after.dtype == torch.uint8
    assert after.shape == before.shape


def test_every_shift_occurs_and_none_beyond_four_pixels() -> None:
    before = make_images(1, 9, 9).expand(600, -1, -1, -1)
    after = augment(before, "crop", make_generator())
    table = {crop_by_hand(before[0], t, s).numpy().tobytes(): (t, s) for t in range(9) for s in range(9)}
    actual = [table[image.contiguous().numpy().tobytes()] for image in after]
    assert len(set(actual)) == 81


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_flip_mirrors_about_half_the_images_left_to_right(height: int, width: int) -> None:
    before = make_images(400, height, width)
    after = augment(before, "flip", make_generator())
    mirrored = torch.rand(400, generator=make_generator()) < 0.5
    for i in range(400):
        expected = (
            torch.stack([before[i, :, :, width - 1 - x] for x in range(width)], dim=2) if mirrored[i] else before[i]
        )
        assert torch.equal(after[i], expected)
    assert 150 < int(mirrored.sum()) < 250


def test_crop_and_flip_do_both() -> None:
    before = make_images(5, 8, 8)
    after = augment(before, "crop-flip", make_generator())
    generator = make_generator()
    top, left = torch.randint(0, 2 * PAD + 1, (2, 5, 1), generator=generator)
    mirrored = torch.rand(5, generator=generator) < 0.5
    for i in range(5):
        expected = crop_by_hand(before[i], int(top[i]), int(left[i]))
        assert torch.equal(after[i], expected.flip(2) if mirrored[i] else expected)


def test_none_changes_nothing_and_draws_nothing() -> None:
    before, generator = make_images(), make_generator()
    assert torch.equal(augment(before, "none", generator), before)
    assert torch.equal(generator.get_state(), make_generator().get_state())


@pytest.mark.parametrize("how", ["none", "crop", "flip", "crop-flip"])
def test_the_generator_alone_decides_and_inputs_stay(how: str) -> None:
    before = make_images()
    copies = before.clone()
    first = augment(before, how, make_generator(1))
    torch.rand(3)
    assert torch.equal(first, augment(before, how, make_generator(1)))
    assert torch.equal(first, augment(before, how, make_generator(2))) == (how == "none")
    assert torch.equal(before, copies)


@pytest.mark.parametrize("how", ["none", "crop", "flip", "crop-flip"])
def test_no_images_are_no_trouble(how: str) -> None:
    assert augment(make_images(0), how, make_generator()).shape == (0, 3, 32, 32)


def test_normalised_numbers() -> None:
    image = torch.tensor([0, 255, 51], dtype=torch.uint8).view(1, 3, 1, 1)
    normalised = normalise_images(image).flatten().tolist()
    assert normalised == pytest.approx([-0.485 / 0.229, (1 - 0.456) / 0.224, (0.2 - 0.406) / 0.225], rel=1e-6)


def test_normalised_is_float32_of_the_same_shape() -> None:
    normalised = normalise_images(make_images(4, 7, 5))
    assert (normalised.dtype, normalised.shape) == (torch.float32, (4, 3, 7, 5))
    assert normalised.is_contiguous()


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_normalised_gives_the_same_bits_in_either_memory_format(height: int, width: int) -> None:
    plain = make_images(6, height, width)
    last = plain.contiguous(memory_format=torch.channels_last)
    normalised = normalise_images(last)
    assert torch.equal(normalised, normalise_images(plain))
    assert normalised.stride() == last.stride()
    assert torch.equal(last, plain), "the images themselves stay"


def test_normalised_leaves_floats_as_they_were() -> None:
    pixels = torch.full((2, 3, 4, 4), 51.0)
    normalise_images(pixels)
    assert bool((pixels == 51.0).all())
