"""One image to pixels: what is resized, in which order, and how many at a time."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

import layouts
from fedheal.data.readers import images


def test_shrinking_averages_instead_of_picking_pixels() -> None:
    """With antialiasing a fine checkerboard becomes grey; picking pixels would leave it black and white."""
    board = Image.fromarray((np.indices((320, 320)).sum(axis=0) % 2 * 255).astype(np.uint8))
    small = images.resize_image(board, 32)
    assert small.shape == (3, 32, 32)
    assert abs(int(small.min()) - 127) < 3
    assert abs(int(small.max()) - 127) < 3


def test_enlarging_interpolates() -> None:
    """Two columns, 0 and 240, on four: centres at -0.25, 0.25, 0.75 and 1.25, so 0, 60, 180, 240."""
    image = Image.fromarray(np.array([[0, 240], [0, 240]], np.uint8))
    assert images.resize_image(image, 4)[0, 0].tolist() == [0, 60, 180, 240]


def test_an_oblong_image_is_squeezed_not_cut() -> None:
    wide = np.zeros((10, 40, 3), np.uint8)
    wide[:, 30:] = 200
    small = images.resize_image(Image.fromarray(wide), 8)
    assert small[0, :, 7].min() > 150
    assert small[0, :, 0].max() == 0


@pytest.mark.parametrize("size", [8, 32, 192, 1024])
def test_all_come_in_order_a_few_at_a_time(size: int) -> None:
    shades = [Image.new("L", (3, 3), i % 251) for i in range(600 if size <= 192 else 40)]
    batches = list(images.decode_batches(len(shades), shades.__getitem__, size))
    assert [int(image[0, 0, 0]) for batch in batches for image in batch] == [i % 251 for i in range(len(shades))]
    assert all(len(batch) * 3 * size * size <= images.BATCH_BYTES for batch in batches)


def test_what_cannot_be_read_does_not_stop_the_others() -> None:
    def decode(index: int) -> Image.Image:
        return images.decode_image(b"no" if index == 3 else layouts.picture(index), f"image-{index}")

    (decoded,) = images.decode_batches(6, decode, 16)
    assert [isinstance(image, images.UnreadableImageError) for image in decoded] == [False] * 3 + [True] + [False] * 2
    assert "image-3 is not an image" in str(decoded[3])


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    Image.new("1", (9000, 9000)).save(out, "PNG")
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(images.UnreadableImageError, match=r"9000 x 9000 pixels, more than 64,000,000"):
        images.decode_image(out.getvalue(), "big.png")


def test_names_are_quoted_where_they_would_break_a_sentence() -> None:
    with pytest.raises(images.UnreadableImageError) as error:
        images.decode_image(b"", "two\nlines.png")
    assert str(error.value).isprintable()
