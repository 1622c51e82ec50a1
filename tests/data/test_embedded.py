"""The embedded digits: pinned bytes, true labels, and integer drawing that can be checked by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
import torch

from fedheal.data import load_dataset
from fedheal.data.domains import Domain, Domains, Split, fingerprint
from fedheal.data.embedded import dataset as embedded
from fedheal.data.embedded.raster import ONE, blend, blur, make_pixel_grid, rotate, sample_bilinear, shrink
from fedheal.data.embedded.scenes import SEGMENTS
from fedheal.data.embedded.stable_random import draw_integers, splitmix64

NAMES = ("handwritten", "print", "street", "display")


@pytest.fixture(scope="module")
def data() -> Domains:
    return load_dataset("embedded")


@pytest.mark.slow
def test_four_domains_of_ten_digits(data: Domains) -> None:
    assert tuple(domain.name for domain in data.domains) == NAMES
    assert data.classes == tuple("0123456789")
    for domain in data.domains:
        for split in (domain.train, domain.test):
            assert split.images.dtype == torch.uint8
            assert split.images.shape == (len(split), 3, 32, 32)
            assert split.labels.dtype == torch.int64
            assert torch.bincount(split.labels, minlength=10).min() >= len(split) // 12


@pytest.mark.slow
def test_default_federation_fits_and_favours_the_large_domains(data: Domains) -> None:
    sizes = [c * n for c, n in zip(data.clients_per_domain, data.samples_per_client, strict=True)]
    assert all(count <= len(domain.train) for count, domain in zip(sizes, data.domains, strict=True))
    assert sizes[-1] / sum(sizes) < 0.1  # display, the domain at stake
    assert len(set(data.clients_per_domain)) == 1  # uniform client weights are uniform over domains


@pytest.mark.slow
def test_load_refuses_other_bytes(data: Domains, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(data, domains=data.domains[::-1])
    monkeypatch.setattr(embedded, "draw_embedded", lambda: other)
    with pytest.raises(ValueError, match="results would not be comparable"):
        embedded.load_embedded()


def test_fingerprint_sees_every_part() -> None:
    split = Split(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]))
    data = Domains("tiny", ("a", "b"), (Domain("x", split, split),), (1,), (2,))
    images = split.images.clone()
    images[1, 2, 3, 3] = 1
    changed = (
        replace(data, name="other"),
        replace(data, classes=("a", "c")),
        replace(data, domains=(Domain("y", split, split),)),
        replace(data, domains=(Domain("x", split, replace(split, labels=torch.tensor([1, 0]))),)),
        replace(data, domains=(Domain("x", replace(split, images=images), split),)),
        replace(data, domains=(Domain("x", replace(split, images=split.images.view(2, 3, 2, 8)), split),)),
    )
    assert len({fingerprint(data), *map(fingerprint, changed)}) == 1 + len(changed)
    assert fingerprint(replace(data, clients_per_domain=(2,))) == fingerprint(data)


@pytest.mark.slow
def test_domains_are_found_by_name(data: Domains) -> None:
    assert data["street"] is data.domains[2]
    with pytest.raises(KeyError, match="has no domain 'sketch'; it has handwritten, print, street, display"):
        data["sketch"]


@pytest.mark.slow
def test_no_image_is_in_both_splits(data: Domains) -> None:
    for domain in data.domains:
        train = {image.tobytes() for image in domain.train.images.numpy()}
        assert not any(image.tobytes() in train for image in domain.test.images.numpy())


def test_train_and_test_fonts_are_different_families() -> None:
    credits = json.loads(resources.files("fedheal.data.embedded").joinpath("glyphs.json").read_text(encoding="utf-8"))
    train, test = ({font["family"] for font in credits[part]} for part in ("train", "test"))
    assert len(train) >= 20
    assert len(test) >= 8
    assert not train & test
    assert all(font["licence"] for part in credits.values() for font in part)
    with resources.files("fedheal.data.embedded").joinpath("glyphs.npz").open("rb") as file, np.load(file) as atlas:
        assert (len(atlas["train"]), len(atlas["test"])) == (len(train), len(test))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("handwritten", 0.9), ("print", 0.85), ("street", 0.5), ("display", 0.25)])
def test_labels_belong_to_images(data: Domains, name: str, least: float) -> None:
    """The nearest training image has the right label far more often than the one time in ten of chance."""
    domain = data[name]
    train, test = _normalise_contrast(domain.train.images), _normalise_contrast(domain.test.images)
    nearest = (test @ train.T).argmax(dim=1)
    assert (domain.train.labels[nearest] == domain.test.labels).float().mean() >= least


def _normalise_contrast(images: torch.Tensor) -> torch.Tensor:
    """Return grey images as centred unit vectors, so that products compare shapes."""
    grey = images.float().mean(dim=1).flatten(1)
    return torch.nn.functional.normalize(grey - grey.mean(dim=1, keepdim=True))


def test_splitmix64_gives_the_published_sequence() -> None:
    """The values for seed 1234567 commonly used to check implementations."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert splitmix64(1234567, 4).tolist() == expected


def test_integers_cover_their_range_and_differ_by_name() -> None:
    values = draw_integers("a", -2, 2, 100, 100)
    assert values.shape == (100, 100)
    counts = np.unique(values, return_counts=True)
    assert counts[0].tolist() == [-2, -1, 0, 1, 2]
    assert counts[1].min() > 1800
    assert (draw_integers("a", 0, 9, 5) == draw_integers("a", 0, 9, 50)[:5]).all()
    assert not (draw_integers("a", 0, 9, 50) == draw_integers("b", 0, 9, 50)).all()


def test_sampling_at_pixel_centres_returns_the_image_and_black_outside() -> None:
    image = np.arange(16, dtype=np.int64).reshape(1, 4, 4)
    x, y = make_pixel_grid(4)
    assert (sample_bilinear(image, x, y) == image).all()
    right = sample_bilinear(image, x + ONE, y)
    assert (right[0, :, :3] == image[0, :, 1:]).all()
    assert (right[0, :, 3] == 0).all()
    between = sample_bilinear(image * 2, x + ONE // 2, y)  # doubled: 2a and 2(a + 1) have the mean 2a + 1
    assert (between[0, :, :3] == 2 * image[0, :, :3] + 1).all()


def test_rotation_keeps_lengths_and_by_nothing_moves_nothing() -> None:
    x, y = make_pixel_grid(8)
    still = rotate(x, y, np.zeros(1, dtype=np.int64))
    assert (still[0] == x).all()
    assert (still[1] == y).all()
    u, v = rotate(x, y, np.array([40]))
    assert np.abs((u**2 + v**2) / (x**2 + y**2) - 1).max() < 0.02


def test_blur_shrink_and_blend_by_hand() -> None:
    dot = np.zeros((1, 3, 3), dtype=np.int64)
    dot[0, 1, 1] = 160
    assert blur(dot)[0].tolist() == [[10, 20, 10], [20, 40, 20], [10, 20, 10]]
    assert (blur(np.full((1, 3, 3), 77)) == 77).all()
    assert shrink(np.array([[[1, 2], [3, 4]]]), 2).tolist() == [[[3]]]  # 2.5 rounds up
    black, white = np.array([0]), np.array([255])
    assert [int(blend(black, white, np.array([k]))[0]) for k in (0, 51, 255)] == [0, 51, 255]


def test_seven_segment_digits_are_the_usual_ones() -> None:
    assert SEGMENTS.sum(axis=1).tolist() == [6, 2, 5, 5, 4, 5, 6, 3, 7, 6]
    assert len({tuple(digit) for digit in SEGMENTS.tolist()}) == 10
