"""Benchmarks that are not in the paper: small files of each published layout, and protocols against their table in the docs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import layouts
from fedheal import data
from fedheal.data.catalogue.image_folders import DOMAINNET_TEN, TERRA_CLASSES, VLCS_CLASSES
from fedheal.data.locate import inspect_domains
from fedheal.data.on_disk import multiply_fraction
from fedheal.simulate.experiment import Experiment

NEW = ("digits-five", "pacs", "office-home", "vlcs", "domainnet", "domainnet-10", "terra-incognita")
KFOLD = ("{}_train_kfold.txt", "{}_crossval_kfold.txt")
DOCS = Path(__file__).parents[2] / "docs" / "data.md"


def load(name: str, root: Path, **keys: object) -> data.Domains:
    return data.load_dataset(name, data.DataRequest(str(root), size=8, **keys))


def count_images(dataset: data.Domains) -> dict[str, tuple[int, int]]:
    return {domain.name: (len(domain.train), len(domain.test)) for domain in dataset.domains}


def write_image_folders(parent: Path, domains: tuple[str, ...], classes: tuple[str, ...], each: int = 5) -> None:
    for domain in domains:
        layouts.image_folders(parent / domain, dict.fromkeys(classes, each))


# Layouts


@pytest.mark.parametrize(
    ("images", "lists"),
    [
        ("PACS", "PACS"),
        ("PACS/kfold", "PACS/Train val splits and h5py files pre-read"),
        ("PACS/raw_images", "PACS/label"),
        ("pacs/images", "pacs/splits"),
    ],
)
def test_pacs_is_divided_by_its_split_files(tmp_path: Path, images: str, lists: str) -> None:
    domains = ("photo", "art_painting", "cartoon", "sketch")
    write_image_folders(tmp_path / images, domains, ("dog", "horse"))
    assert count_images(load("pacs", tmp_path)) == dict.fromkeys(domains, (8, 2))
    for domain in domains:
        layouts.split_lists(tmp_path / lists, KFOLD, domain, tmp_path / images / domain)
    dataset = load("pacs", tmp_path)  # prepared anew, though the images are the same
    assert dataset["sketch"].test.labels.tolist() == [0, 1]
    assert dataset.samples_per_client == (449, 552, 632, 1059)  # 30 % of 1,499, 1,840, 2,107 and 3,531
    assert "photo: 8 of 1,499 training and 2 of 171 test images on disk" in dataset.notes


def test_pacs_lists_that_are_incomplete_or_of_other_images(tmp_path: Path) -> None:
    write_image_folders(tmp_path / "PACS", ("photo",), ("dog", "horse"))
    layouts.split_lists(tmp_path / "PACS", KFOLD, "photo", tmp_path / "PACS" / "photo")
    (tmp_path / "PACS" / "photo_crossval_kfold.txt").unlink()
    with pytest.raises(ValueError, match=r"photo: .*PACS/photo_crossval_kfold.txt is missing; it is available from"):
        load("pacs", tmp_path)
    for part in ("train", "crossval"):
        (tmp_path / "PACS" / f"photo_{part}_kfold.txt").write_text("photo/cat/1.jpg 1\n")
    with pytest.raises(
        ValueError, match=r"photo_train_kfold.txt and .*photo_crossval_kfold.txt list no image that is below"
    ):
        load("pacs", tmp_path)


@pytest.mark.parametrize("name", ["pacs", "domainnet-10"])
def test_images_of_split_files_that_are_not_there_are_named(name: str, tmp_path: Path) -> None:
    """The full sizes of DomainNet's ten classes are unknown, so only the split files show that images are missing."""
    spec = data.SPECS[name].domains[-1]
    root = tmp_path / spec.folders[0]
    write_image_folders(root.parent, (spec.name,), data.SPECS[name].classes or ("dog", "horse"), 3)
    layout = spec.layouts[0]
    layouts.split_lists(root.parent, layout.split_lists, spec.name, root)
    assert "not there" not in inspect_domains(data.SPECS[name], tmp_path)[-1].detail
    lost = sorted(root.glob("*/0000.jpg"))[0]
    lost.unlink()
    sentence = f"1 image of the split files is not there: {lost}"
    assert inspect_domains(data.SPECS[name], tmp_path)[-1].detail.endswith(sentence)
    assert f"{spec.name}: {sentence}" in load(name, tmp_path, allow_missing=True).notes


@pytest.mark.parametrize("part", ["", "train", "test"])
def test_a_split_without_split_files_is_noted(part: str, tmp_path: Path) -> None:
    """Folders for training and testing count as a split."""
    root = tmp_path / "domainnet" / "sketch"
    write_image_folders(root, (part,), DOMAINNET_TEN)
    if part:
        write_image_folders(root, ({"train": "test", "test": "train"}[part],), DOMAINNET_TEN)
    note = "sketch: sketch_train.txt and sketch_test.txt are not there, so of every ten images the first eight are for training"
    assert (note in load("domainnet-10", tmp_path, allow_missing=True).notes) is (not part)


def test_a_full_set_counts_as_complete_however_it_is_divided() -> None:
    """Without split files the same images of PACS are 8 of 10 for training, and none is missing."""
    spec = data.SPECS["pacs"].domains[0]
    assert not spec.is_incomplete(1336, 334)
    assert spec.is_incomplete(1336, 333)


@pytest.mark.parametrize("numbered", [False, True])
def test_vlcs_by_class_and_by_number(tmp_path: Path, numbered: bool) -> None:
    if numbered:  # full is the union of train and crossval
        for domain in ("CALTECH", "LABELME", "PASCAL", "SUN"):
            for part, each in (("full", 3), ("train", 2), ("crossval", 1), ("test", 1)):
                write_image_folders(tmp_path / "VLCS" / domain, (part,), tuple("01234"), each)
    else:
        write_image_folders(tmp_path / "VLCS", ("Caltech101", "LabelMe", "VOC2007", "SUN09"), VLCS_CLASSES, 4)
    dataset = load("vlcs", tmp_path)
    assert dataset.classes == VLCS_CLASSES
    assert count_images(dataset) == dict.fromkeys(
        ("caltech", "labelme", "pascal", "sun"), (15, 5) if numbered else (16, 4)
    )
    assert dataset.samples_per_client == (339, 637, 810, 787)
    assert {status.detail.partition(";")[0] for status in inspect_domains(data.SPECS["vlcs"], tmp_path)} == {
        f"the full data set has {train} training and {test} test images"
        for train, test in (("1,133", "282"), ("2,126", "530"), ("2,702", "674"), ("2,626", "656"))
    }


def test_vlcs_without_a_class(tmp_path: Path) -> None:
    write_image_folders(tmp_path / "VLCS", ("Caltech101",), VLCS_CLASSES[1:], 4)
    with pytest.raises(
        ValueError, match=r"caltech: .*VLCS/Caltech101/bird is missing; it is available from https://.*DomainBed"
    ):
        load("vlcs", tmp_path)


def test_terra_incognita_by_location_folders(tmp_path: Path) -> None:
    names = ("location_100", "location_38", "location_43", "location_46")
    write_image_folders(tmp_path / "terra_incognita", names, TERRA_CLASSES, 1)
    dataset = load("terra-incognita", tmp_path)
    assert dataset.classes == TERRA_CLASSES
    assert count_images(dataset) == dict.fromkeys(names, (8, 2))


def test_terra_incognita_by_annotations(tmp_path: Path) -> None:
    """Of 33 images a location 11 are birds, 11 cats and 11 of no class; of every ten of the others the first eight train."""
    root = tmp_path / "terra_incognita"
    layouts.camera_traps(root, each=33)
    dataset = load("terra-incognita", tmp_path)
    assert count_images(dataset) == dict.fromkeys(
        ("location_100", "location_38", "location_43", "location_46"), (18, 4)
    )
    assert dataset["location_38"].test.labels.tolist() == [0, 0, 2, 2]  # birds and cats among the ten classes
    tenth = Image.open(root / "eccv_18_all_images_sm" / "38-27.jpg").resize((8, 8), Image.Resampling.BILINEAR)  # bird
    assert np.array_equal(dataset["location_38"].test.images[1].numpy(), np.asarray(tenth).transpose(2, 0, 1))


def test_camera_traps_that_cannot_be_read(tmp_path: Path) -> None:
    root = tmp_path / "terra_incognita"
    layouts.camera_traps(root)
    file = root / "eccv_18_annotation_files" / "train_annotations.json"
    for text, sentence in (
        ("{", r"train_annotations.json is not a file of camera trap annotations \(the file: Invalid JSON"),
        ('{"images": [{"id": 1}], "annotations": [], "categories": []}', r"\(images.0.file_name: Field required\)"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=sentence):
            load("terra-incognita", tmp_path)
    (root / "eccv_18_annotation_files").rename(root / "moved")
    with pytest.raises(ValueError, match=r"eccv_18_annotation_files/\*_annotations.json is missing; .*lila.science"):
        load("terra-incognita", tmp_path)
    (root / "moved").rename(root / "eccv_18_annotation_files")
    (root / "eccv_18_all_images_sm").rename(root / "moved")
    with pytest.raises(ValueError, match="eccv_18_all_images_sm is missing"):
        load("terra-incognita", tmp_path)


def test_domainnet_and_its_ten_classes(tmp_path: Path) -> None:
    root = tmp_path / "domainnet"
    write_image_folders(root, ("clipart", "sketch"), ("aircraft_carrier", *DOMAINNET_TEN), 2)
    for domain in ("clipart", "sketch"):
        layouts.split_lists(root, ("{}_train.txt", "{}_test.txt"), domain, root / domain)
    assert count_images(load("domainnet", tmp_path, allow_missing=True)) == dict.fromkeys(
        ("clipart", "sketch"), (11, 11)
    )
    dataset = load("domainnet-10", tmp_path, allow_missing=True)
    assert dataset.classes == DOMAINNET_TEN
    assert count_images(dataset) == dict.fromkeys(("clipart", "sketch"), (10, 10))
    assert dataset.samples_per_client == (105, 105)
    assert all("is not on disk" in note for note in dataset.notes)
    clipart = inspect_domains(data.SPECS["domainnet-10"], tmp_path)[0]
    assert (clipart.state, clipart.train, clipart.classes) == ("found", 10, DOMAINNET_TEN)


def test_office_home_with_either_spelling_of_its_last_domain(tmp_path: Path) -> None:
    write_image_folders(tmp_path / "office_home", ("Art", "Clipart", "Product", "Real_World"), ("Bed", "Bike"))
    assert count_images(load("office-home", tmp_path)) == dict.fromkeys(
        ("art", "clipart", "product", "real_world"), (8, 2)
    )


def test_digits_five_as_matlab_files(tmp_path: Path) -> None:
    layouts.digit_five(tmp_path / "Digit-Five")
    dataset = data.load_dataset("digits-five", data.DataRequest(str(tmp_path)))
    assert count_images(dataset) == dict.fromkeys(("mnist", "usps", "svhn", "syn", "mnist_m"), (12, 6))
    assert dataset.samples_per_client == (743,) * 5
    for domain in dataset.domains:
        assert domain.train.images.shape[1:] == (3, 28, 28)
        assert domain.train.labels.tolist() == [i % 10 for i in range(12)]
    large = [
        Image.fromarray(image).resize((28, 28), Image.Resampling.BILINEAR)
        for image in layouts.pixels(40, 12, 32, 32, 3)
    ]
    for name in ("syn", "svhn"):
        assert np.array_equal(dataset[name].train.images[7].numpy(), np.asarray(large[7]).transpose(2, 0, 1))
    exact = {"mnist_m": layouts.pixels(31, 6, 28, 28, 3).transpose(0, 3, 1, 2)}
    exact["usps"] = (layouts.pixels(51, 6, 1, 28, 28) / 256 * 255).astype(np.uint8).repeat(3, axis=1)
    for name, expected in exact.items():
        assert np.array_equal(dataset[name].test.images.numpy(), expected)


def test_pickles_are_named_and_not_read(tmp_path: Path) -> None:
    """FedBN distributes its digits as pickles; this one would write a file if it were loaded."""
    (tmp_path / "SVHN" / "partitions").mkdir(parents=True)
    trap = tmp_path / "ran"
    (tmp_path / "SVHN" / "partitions" / "train_part0.pkl").write_bytes(
        b"cos\nsystem\n(S'touch %b'\ntR." % str(trap).encode()
    )
    svhn = inspect_domains(data.SPECS["digits-five"], tmp_path)[2]
    assert svhn.state == "missing"
    assert "SVHN/partitions/train_part0.pkl is a pickle, which can run code and is never read" in svhn.detail
    assert not trap.exists()


# What is missing, and protocols


@pytest.mark.parametrize("name", NEW)
def test_check_says_what_is_missing_and_where_it_can_be_had(name: str, tmp_path: Path, call: Callable) -> None:
    done = call("data", "check", name, "--data-root", tmp_path)
    assert done.code == 1
    lines = [line for line in done.out.splitlines() if "missing: " in line]
    assert len(lines) == len(data.SPECS[name].domains)
    assert all(re.search(r"/ should contain .*; it is available from .*https?://", line) for line in lines), lines


def read_table(mark: str = "protocols") -> dict[str, list[str]]:
    """Return a table of docs/data.md: each row's other cells by its first cell."""
    text = DOCS.read_text(encoding="utf-8").partition(f"<!-- {mark} -->")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


@pytest.mark.parametrize("name", NEW)
def test_the_documented_protocol_is_the_one_that_runs(name: str) -> None:
    spec, e = data.SPECS[name], Experiment(data=name)
    samples = (
        str(spec.samples) if spec.samples else f"{spec.fraction:.0%}".replace("%", " %") if spec.fraction else "all"
    )
    local = f"{e.steps} steps" if e.steps else f"{e.epochs} epoch{'s' if e.epochs > 1 else ''}"
    numbers = [
        spec.clients,
        samples,
        f"`{e.model}`",
        spec.size,
        f"{e.rounds} x {local}",
        e.batch_size,
        e.lr,
        e.momentum,
    ]
    *cells, source = read_table()[name]
    assert cells == [str(number) for number in numbers] + [f"{e.weight_decay:g}".replace("e-0", "e-")]
    assert re.search(r"\d{4}\)", source)


@pytest.mark.parametrize(("column", "name"), [(0, "digits"), (1, "office-caltech")])
def test_the_documented_protocol_of_the_paper_is_the_one_that_runs(column: int, name: str) -> None:
    table = read_table("paper protocol")
    assert all(cells[-1] for cells in table.values())  # every row names its source
    documented = {row: cells[column] for row, cells in table.items()}
    spec, e = data.SPECS[name], Experiment(data=name)
    assert documented["clients"] == f"{spec.clients} per domain"
    samples = [multiply_fraction(spec.fraction, domain.train) for domain in spec.domains]
    assert documented["images per client"].startswith(f"{spec.fraction:.0%}".replace("%", " %"))
    assert " / ".join(map(str, samples)) in documented["images per client"]
    assert documented["images"].startswith(f"{spec.size} x {spec.size}, ")
    assert ("crop" in documented["images"], ", flip" in documented["images"]) == (
        "crop" in e.augment,
        "flip" in e.augment,
    )
    training = table["training"][0].replace("64", "16") if column else table["training"][0]
    numbers = f"{e.rounds} rounds, {e.epochs} epochs, batch {e.batch_size}, lr {e.lr}, momentum {e.momentum}"
    assert training == f"ResNet-10, {numbers}, weight decay {e.weight_decay:g}".replace("e-0", "e-")
    assert e.model == "resnet10"
    assert documented["training"] == (f"the same with batch {e.batch_size}" if column else training)
    fedheal = {key: value for part in e.resolved_method.parts for key, value in part.values.items()}
    assert documented["FedHEAL"] == f"`tau` {fedheal['tau']}, `beta` {fedheal['beta']}"


def test_epochs_replace_the_steps_of_a_protocol() -> None:
    assert Experiment(data="domainnet").steps == 5
    assert Experiment(data="domainnet", epochs=2).steps is None
    assert Experiment(data="domainnet", steps=3).steps == 3
