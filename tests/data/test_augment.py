"""Crop, flip and normalise for whole batches against one image at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedheal.data.augment import AUGMENTATIONS, PAD, apply_choices, draw_choices, normalise_images


def images(number: int = 20, height: int = 32, width: int = 32) -> Tensor:
    chance = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (number, 3, height, width), dtype=torch.uint8, generator=chance)


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def augment(before: Tensor, how: str, generator: torch.Generator) -> Tensor:
    return apply_choices(before, draw_choices(len(before), how, generator))


def cropped(image: Tensor, top: int, left: int) -> Tensor:
    """One image moved in a black frame, entry by entry."""
    _, height, width = image.shape
    made = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            y, x = row + top - PAD, column + left - PAD
            if 0 <= y < height and 0 <= x < width:
                made[:, row, column] = image[:, y, x]
    return made


SHAPES = [(32, 32), (28, 28), (8, 12), (5, 3), (1, 1)]


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_crop_is_each_image_moved_by_its_own_shift(height: int, width: int) -> None:
    before = images(6, height, width)
    after = augment(before, "crop", chance())
    # The same numbers drawn by hand: first all tops, then all lefts.
    top, left = torch.randint(0, 2 * PAD + 1, (2, 6, 1), generator=chance())
    for i in range(6):
        assert torch.equal(after[i], cropped(before[i], int(top[i]), int(left[i])))
    assert after.dtype == torch.uint8
    assert after.shape == before.shape


def test_every_shift_occurs_and_none_beyond_four_pixels() -> None:
    before = images(1, 9, 9).expand(600, -1, -1, -1)
    after = augment(before, "crop", chance())
    table = {cropped(before[0], t, s).numpy().tobytes(): (t, s) for t in range(9) for s in range(9)}
    found = [table[image.contiguous().numpy().tobytes()] for image in after]
    assert len(set(found)) == 81


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_flip_mirrors_about_half_the_images_left_to_right(height: int, width: int) -> None:
    before = images(400, height, width)
    after = augment(before, "flip", chance())
    mirrored = torch.rand(400, generator=chance()) < 0.5
    for i in range(400):
        wanted = (
            torch.stack([before[i, :, :, width - 1 - x] for x in range(width)], dim=2) if mirrored[i] else before[i]
        )
        assert torch.equal(after[i], wanted)
    assert 150 < int(mirrored.sum()) < 250


def test_crop_and_flip_do_both() -> None:
    before = images(5, 8, 8)
    after = augment(before, "crop-flip", chance())
    drawn = chance()
    top, left = torch.randint(0, 2 * PAD + 1, (2, 5, 1), generator=drawn)
    mirrored = torch.rand(5, generator=drawn) < 0.5
    for i in range(5):
        wanted = cropped(before[i], int(top[i]), int(left[i]))
        assert torch.equal(after[i], wanted.flip(2) if mirrored[i] else wanted)


def test_none_changes_nothing_and_draws_nothing() -> None:
    before, drawn = images(), chance()
    assert torch.equal(augment(before, "none", drawn), before)
    assert torch.equal(drawn.get_state(), chance().get_state())


@pytest.mark.parametrize("how", AUGMENTATIONS)
def test_the_generator_alone_decides_and_inputs_stay(how: str) -> None:
    before = images()
    kept = before.clone()
    one = augment(before, how, chance(1))
    torch.rand(3)
    assert torch.equal(one, augment(before, how, chance(1)))
    assert torch.equal(one, augment(before, how, chance(2))) == (how == "none")
    assert torch.equal(before, kept)


@pytest.mark.parametrize("how", AUGMENTATIONS)
def test_no_images_are_no_trouble(how: str) -> None:
    assert augment(images(0), how, chance()).shape == (0, 3, 32, 32)


def test_normalised_numbers() -> None:
    image = torch.tensor([0, 255, 51], dtype=torch.uint8).view(1, 3, 1, 1)
    found = normalise_images(image).flatten().tolist()
    assert found == pytest.approx([-0.485 / 0.229, (1 - 0.456) / 0.224, (0.2 - 0.406) / 0.225], rel=1e-6)


def test_normalised_is_float32_of_the_same_shape() -> None:
    found = normalise_images(images(4, 7, 5))
    assert (found.dtype, found.shape) == (torch.float32, (4, 3, 7, 5))
    assert found.is_contiguous()


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_normalised_gives_the_same_bits_in_either_memory_format(height: int, width: int) -> None:
    plain = images(6, height, width)
    last = plain.contiguous(memory_format=torch.channels_last)
    found = normalise_images(last)
    assert torch.equal(found, normalise_images(plain))
    assert found.stride() == last.stride()
    assert torch.equal(last, plain), "the images themselves stay"


def test_normalised_leaves_floats_as_they_were() -> None:
    given = torch.full((2, 3, 4, 4), 51.0)
    normalise_images(given)
    assert bool((given == 51.0).all())
