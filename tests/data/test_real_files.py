"""The real data sets, where FEDHEAL_DATA names a folder with them: counts, balance and pixels known from elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fedheal import data
from fedheal.data import cache
from fedheal.data.locate import locate_domains
from fedheal.data.on_disk import open_dataset
from fedheal.data.specs import DomainFiles
from needs import needs

pytestmark = pytest.mark.slow

MNIST_BALANCE = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST_BALANCE = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
USPS_BALANCE = [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644]
USPS_TEST_BALANCE = [359, 264, 198, 166, 200, 160, 170, 147, 166, 177]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    needs("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDHEAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield os.environ["FEDHEAL_DATA"]


@pytest.fixture(autouse=True)
def cache_folder(root: str) -> None:
    """One for all tests of this file: preparing takes seconds."""


@pytest.fixture(scope="module")
def digits(root: str) -> data.Domains:
    return data.load_dataset("digits", data.DataRequest(root))


@pytest.fixture(scope="module")
def office(root: str) -> data.Domains:
    return data.load_dataset("office-caltech", data.DataRequest(root, allow_missing=True))


def count_labels(split: data.domains.Split) -> list[int]:
    return np.bincount(split.labels.numpy(), minlength=10).tolist()


def test_counts_and_balance_of_mnist_and_usps(digits: data.Domains) -> None:
    mnist, usps = digits["mnist"], digits["usps"]
    assert (count_labels(mnist.train), count_labels(mnist.test)) == (MNIST_BALANCE, MNIST_TEST_BALANCE)
    assert (count_labels(usps.train), count_labels(usps.test)) == (USPS_BALANCE, USPS_TEST_BALANCE)
    assert (len(mnist.train), len(mnist.test), len(usps.train), len(usps.test)) == (60_000, 10_000, 7_291, 2_007)


def test_svhn_and_the_stand_in_hold_all_digits(digits: data.Domains) -> None:
    for name in ("svhn", digits.domains[3].name):
        for split in (digits[name].train, digits[name].test):
            assert min(count_labels(split)) > 0.05 * len(split)
    street = count_labels(digits["svhn"].train)
    assert street.index(max(street)) == 1  # house numbers begin with one more often than not


def test_no_test_image_of_the_digits_was_trained_with(digits: data.Domains) -> None:
    for domain in digits.domains:
        trained = {image.numpy().tobytes() for image in domain.train.images}
        assert not any(image.numpy().tobytes() in trained for image in domain.test.images), domain.name


def test_pixels_of_mnist(root: str) -> None:
    """Mean 0.1307 and deviation 0.3081, as everybody normalises it; the first digit is a five."""
    (location,) = (p for p in locate_domains(data.SPECS["digits"], Path(root)) if p.name == "mnist")
    assert isinstance(location.files, DomainFiles)
    raw = location.files.read()
    pixels = raw.train.array / 255
    assert (round(pixels.mean(), 4), round(pixels.std(), 4)) == (0.1307, 0.3081)
    assert raw.train.labels[:5].tolist() == [5, 0, 4, 1, 9]


def test_pixels_after_resizing(digits: data.Domains) -> None:
    for name, low, high in (("mnist", 0.12, 0.14), ("usps", 0.2, 0.3), ("svhn", 0.4, 0.5)):
        mean = digits[name].train.images[:5000].float().mean() / 255
        assert low < mean < high, name
    grey = digits["usps"].train.images[:50]
    assert torch.equal(grey[:, 0], grey[:, 2])
    colour = digits["svhn"].train.images[:50]
    assert not torch.equal(colour[:, 0], colour[:, 2])


def test_office_caltech(office: data.Domains) -> None:
    sizes = {d.name: (len(d.train), len(d.test)) for d in office.domains}
    known = {"caltech": (899, 224), "amazon": (768, 190), "webcam": (237, 58), "dslr": (127, 30)}
    assert sizes == {name: known[name] for name in sizes}
    assert {"amazon", "webcam", "dslr"} <= sizes.keys()
    shares = dict(zip(sizes, office.samples_per_client, strict=True))
    assert shares | {"amazon": 76, "webcam": 23, "dslr": 12} == shares
    assert office["dslr"].train.images.shape == (127, 3, 192, 192)
    assert office["amazon"].train.images.float().mean() > 170  # goods on white
    assert office["webcam"].train.images.float().mean() < 170


def test_protocol_sizes(digits: data.Domains) -> None:
    assert digits.samples_per_client == (600, 72, 732, 100)


def test_a_prepared_set_loads_in_less_than_a_second(root: str, digits: data.Domains) -> None:
    started = time.process_time()
    again = data.load_dataset("digits", data.DataRequest(root))
    assert again.identity == digits.identity
    assert time.process_time() - started < 1


def test_preparing_takes_less_than_a_minute(root: str) -> None:
    started = time.process_time()
    for name in ("digits", "office-caltech"):
        dataset = open_dataset(data.SPECS[name], data.DataRequest(root, allow_missing=True))
        cache.prepare_data(dataset.inputs, again=True)
    assert time.process_time() - started < 60


@pytest.mark.parametrize(
    ("name", "seeds", "words"), [("digits", "0-2", []), ("office-caltech", "0-4", ["--allow-missing"])]
)
def test_exports_are_small(root: str, call, tmp_path: Path, name: str, seeds: str, words: list[str]) -> None:
    out = tmp_path / f"{name}.export"
    done = call("data", "export", name, "--seeds", seeds, "--out", out, "--data-root", root, *words)
    assert done.code == 0, done.err
    assert out.stat().st_size < 55e6


@pytest.mark.parametrize("words", [["data=digits"], ["data=office-caltech", "allow_missing=true", "image_size=64"]])
def test_a_run_on_it(root: str, call, words: list[str]) -> None:
    done = call("run", *words, f"data_root={root}", "rounds=2", "epochs=1", "model=small_cnn", "device=cpu")
    assert done.code == 0, done.err
    assert "round 2/2" in done.out
