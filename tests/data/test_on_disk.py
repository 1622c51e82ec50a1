"""Digits and Office-Caltech from disk: where they are looked for, how much each client gets, what is said about the rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import layouts
from disk_hooks import raise_disk_full
from fedheal import data
from fedheal.data import cache
from fedheal.data.domains import fingerprint
from fedheal.data.on_disk import multiply_fraction
from fedheal.data.splits import find_training_images


def load(name: str, root: Path, **keys: object) -> data.Domains:
    return data.load_dataset(name, data.DataRequest(str(root), **keys))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return layouts.digits(tmp_path / "data")


def test_digits_are_32_pixels_rgb_in_the_papers_order(root: Path) -> None:
    dataset = load("digits", root)
    assert [domain.name for domain in dataset.domains] == ["mnist", "usps", "svhn", "syn_standin"]
    assert [(len(d.train), len(d.test)) for d in dataset.domains] == [(40, 20), (30, 20), (40, 20), (30, 20)]
    for domain in dataset.domains:
        assert domain.train.images.shape[1:] == (3, 32, 32)
        assert domain.train.images.dtype == torch.uint8
        assert domain.train.labels.tolist() == [i % 10 for i in range(len(domain.train))]
    assert dataset.classes == tuple("0123456789")


def test_one_percent_is_of_the_whole_set_whatever_is_on_disk(root: Path) -> None:
    dataset = load("digits", root)
    assert dataset.clients_per_domain == (5, 5, 5, 5)
    assert dataset.samples_per_client == (600, 72, 732, 100)
    assert [domain.nominal for domain in dataset.domains] == [60_000, 7_291, 73_257, 10_000]


def test_ten_percent_of_office_caltech(tmp_path: Path) -> None:
    dataset = load("office-caltech", layouts.office_caltech(tmp_path))
    assert [domain.name for domain in dataset.domains] == ["caltech", "amazon", "webcam", "dslr"]
    assert dataset.samples_per_client == (89, 76, 23, 12)
    assert [domain.nominal for domain in dataset.domains] == [899, 768, 237, 127]
    assert dataset.domains[0].train.images.shape[1:] == (3, 192, 192)


def test_the_papers_test_sets_of_office_caltech() -> None:
    assert [(~find_training_images(images)).sum() for images in (1123, 958, 295, 157)] == [224, 190, 58, 30]


def test_a_share_is_of_the_decimal_that_was_written() -> None:
    assert multiply_fraction(0.29, 100) == 29  # 0.29 * 100 is 28.999999999999996
    assert multiply_fraction(0.07, 100) == 7


def test_of_every_ten_images_sorted_by_class_and_name_the_first_eight_train(tmp_path: Path) -> None:
    """70 images of ten classes, seven each: image i is 0000.jpg to 0006.jpg of class i // 7."""
    root = layouts.office_caltech(tmp_path, ("dslr",))
    domain = load("office-caltech", root, allow_missing=True)["dslr"]
    order = [(c, i) for c in range(10) for i in range(7)]
    assert domain.train.labels.tolist() == [c for k, (c, _) in enumerate(order) if k % 10 <= 7]
    assert domain.test.labels.tolist() == [c for k, (c, _) in enumerate(order) if k % 10 > 7]
    assert (len(domain.train), len(domain.test)) == (56, 14)
    path = root / "office_caltech_10" / "dslr" / "bike" / "0001.jpg"  # number 8, so the first for testing
    image = np.asarray(Image.open(path).convert("RGB").resize((192, 192), Image.Resampling.BILINEAR))
    assert np.array_equal(domain.test.images[0].numpy(), image.transpose(2, 0, 1))


def test_grey_images_are_resized_as_grey_and_repeated(root: Path) -> None:
    first = load("digits", root)["mnist"].train.images[0].numpy()
    expected = Image.fromarray(layouts.pixels(1, 40, 28, 28)[0]).resize((32, 32), Image.Resampling.BILINEAR)
    assert np.array_equal(first, np.stack([np.asarray(expected)] * 3))


def test_images_of_the_right_size_keep_every_bit(root: Path) -> None:
    cube = layouts.pixels(5, 32, 32, 3, 40)
    assert np.array_equal(load("digits", root)["svhn"].train.images[7].numpy(), cube[:, :, :, 7].transpose(2, 0, 1))


# Where it is looked for


@pytest.mark.parametrize("inside", ["digits", ""])
def test_domains_may_lie_in_a_folder_of_the_set_or_in_the_root(tmp_path: Path, inside: str) -> None:
    layouts.mnist(tmp_path / inside / "mnist", zipped=False)
    dataset = load("digits", tmp_path, allow_missing=True)
    assert [domain.name for domain in dataset.domains] == ["mnist"]


def test_torchvisions_places_are_known(tmp_path: Path) -> None:
    layouts.mnist(tmp_path / "MNIST" / "raw", zipped=False)
    layouts.usps(tmp_path / "a")
    layouts.svhn(tmp_path / "b")
    for path in [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]:
        shutil.move(path, tmp_path / path.name)
    dataset = load("digits", tmp_path, allow_missing=True)
    assert [domain.name for domain in dataset.domains] == ["mnist", "usps", "svhn"]


def test_the_environment_variable_and_the_field_that_wins(root: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FEDHEAL_DATA", str(root))
    assert len(data.load_dataset("digits").domains) == 4
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no domain of 'digits'"):
        load("digits", tmp_path / "empty")


def test_nothing_said_and_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data directory is configured: set FEDHEAL_DATA, or pass data_root=FOLDER"):
        data.load_dataset("digits")
    with pytest.raises(ValueError, match="there is no such folder"):
        load("digits", tmp_path / "nowhere")


def test_syn_as_image_folders(tmp_path: Path) -> None:
    for part, each in (("train", 4), ("val", 2)):
        layouts.image_folders(tmp_path / "syn" / part, {str(d): each for d in range(10)}, suffix=".png")
    domain = load("digits", tmp_path, allow_missing=True)["syn"]
    assert (len(domain.train), len(domain.test)) == (40, 20)
    assert domain.test.labels.tolist() == [d for d in range(10) for _ in range(2)]


def test_the_real_syn_is_preferred_to_the_stand_in(root: Path) -> None:
    assert any("syn_standin stands in for syn" in note for note in load("digits", root).notes)
    layouts.syn(root / "digits" / "syn", train=33)
    dataset = load("digits", root)
    assert [domain.name for domain in dataset.domains][3] == "syn"
    assert len(dataset["syn"].train) == 33
    assert not any("stands in" in note for note in dataset.notes)


# What is missing


def test_a_missing_domain_is_named_with_where_it_can_be_had(tmp_path: Path) -> None:
    root = layouts.office_caltech(tmp_path, ("amazon", "dslr", "webcam"))
    with pytest.raises(
        ValueError, match=r"lacks 1 of 4 domains.*office_caltech_10/caltech.*https://.*allow_missing=true"
    ):
        load("office-caltech", root)
    dataset = load("office-caltech", root, allow_missing=True)
    assert [domain.name for domain in dataset.domains] == ["amazon", "webcam", "dslr"]
    assert "caltech is not on disk: results are over 3 of 4 domains" in dataset.notes


def test_one_missing_file_is_named(root: Path) -> None:
    (root / "digits" / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ValueError, match=r"mnist: .*digits/mnist/t10k-labels-idx1-ubyte\.gz is missing") as error:
        load("digits", root)
    assert "t10k-images" not in str(error.value)
    assert "ylecun/mnist" in str(error.value)


def test_the_notes_say_how_much_is_on_disk(root: Path) -> None:
    assert "svhn: 40 of 73,257 training and 20 of 26,032 test images on disk" in load("digits", root).notes


# Prepared once


def list_prepared(cache_folder: Path) -> list[Path]:
    return sorted(cache_folder.iterdir()) if cache_folder.exists() else []


def test_images_are_decoded_once(root: Path, cache_folder: Path, monkeypatch) -> None:
    first = load("digits", root)
    assert len(list_prepared(cache_folder)) == 1
    monkeypatch.setattr(cache.images, "decode_batches", lambda *_: pytest.fail("decoded again"))
    again = load("digits", root)
    assert fingerprint(again) == fingerprint(first) == first.identity


def test_the_fingerprint_is_that_of_the_bytes(root: Path) -> None:
    dataset = load("digits", root)
    in_memory = data.Domains(dataset.name, dataset.classes, dataset.domains, (5,) * 4, (1,) * 4)
    assert dataset.identity == fingerprint(in_memory)


def test_other_files_sizes_or_classes_are_prepared_anew(root: Path, cache_folder: Path) -> None:
    first = load("digits", root)
    assert load("digits", root, size=16)["mnist"].train.images.shape[-1] == 16
    assert len(list_prepared(cache_folder)) == 2
    shutil.rmtree(root / "digits" / "usps")
    layouts.usps(root / "digits" / "usps", train=31)
    second = load("digits", root)
    assert len(list_prepared(cache_folder)) == 3
    assert first.identity != second.identity
    assert len(second["usps"].train) == 31


def test_what_is_written_to_the_images_does_not_reach_the_file(root: Path) -> None:
    load("digits", root)["svhn"].train.images.zero_()
    assert load("digits", root)["svhn"].train.images.any()


@pytest.mark.parametrize("damage", ["0.train.images", "1.test.labels", "manifest.json"])
def test_a_damaged_cache_is_said_and_made_anew(root: Path, cache_folder: Path, call, damage: str) -> None:
    load("digits", root)
    path = list_prepared(cache_folder)[0] / damage
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match="are damaged"):
        load("digits", root)
    assert call("data", "prepare", "digits", "--data-root", root, "--again").code == 0
    assert len(load("digits", root).domains) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: {},
        lambda manifest: manifest | {"size": "large"},
        lambda manifest: manifest | {"format": "another"},
        lambda manifest: manifest | {"domains": [{"name": "mnist"}]},
        lambda manifest: [manifest],
    ],
)
def test_a_manifest_that_somebody_made_something_else_of_is_damage(root: Path, cache_folder: Path, change) -> None:
    load("digits", root)
    path = list_prepared(cache_folder)[0] / "manifest.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=r"the prepared data in .* are damaged: remove that folder"):
        load("digits", root)


def test_two_processes_that_prepare_at_once_both_get_it(root: Path, cache_folder: Path, monkeypatch) -> None:
    make = cache._write_data

    def prepare_twice(recipe: cache.CacheInputs, folder: Path) -> None:
        monkeypatch.setattr(cache, "_write_data", make)
        load("digits", root)  # another process is faster
        make(recipe, folder)

    monkeypatch.setattr(cache, "_write_data", prepare_twice)
    assert len(load("digits", root).domains) == 4
    assert len(list_prepared(cache_folder)) == 1


def test_a_full_disk_leaves_nothing(root: Path, cache_folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(cache, "_write_integers", raise_disk_full)
    message = r"cannot be written to .* \(No space left on device\): set FEDHEAL_CACHE to another folder, or make room"
    with pytest.raises(ValueError, match=f"^prepared data {message}$"):
        load("digits", root)
    assert list_prepared(cache_folder) == []


def test_what_killed_processes_left_goes_after_a_day(root: Path, cache_folder: Path) -> None:
    import os

    for name, age in ((".making-old", 90_000), (".making-new", 0)):
        (cache_folder / name).mkdir(parents=True)
        when = (cache_folder / name).stat().st_mtime - age
        os.utime(cache_folder / name, (when, when))
    load("digits", root)
    assert [path.name for path in list_prepared(cache_folder) if path.name.startswith(".")] == [".making-new"]


def test_classes_that_a_domain_cannot_be_judged_by_are_noted(tmp_path: Path) -> None:
    """Eight of ten images in order train: of two classes of eight the test images are all of the second."""
    for domain in ("a", "b"):
        for name in ("cat", "dog"):
            folder = tmp_path / domain / name
            folder.mkdir(parents=True)
            for i in range(8):
                Image.new("RGB", (40, 40), (i, 2 * i, 3 * i)).save(folder / f"{i}.png")
    notes = data.load_dataset(f"folder:{tmp_path}", data.DataRequest(None)).notes
    assert "a: no test images of cat" in notes
    assert not [note for note in notes if "training images of" in note and "no " in note]
