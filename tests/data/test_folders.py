"""Your own domains: image folders of any size, classes in common or all, images that cannot be read."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedheal
import layouts
from command_line import assert_sentence
from fedheal import data
from fedheal.data.readers import folders
from fedheal.simulate.build import load_domains, partition_clients


def load(root: Path, **keys: object) -> data.Domains:
    return data.load_dataset(f"folder:{root}", data.DataRequest(**keys))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    layouts.image_folders(tmp_path / "pets" / "photos", {"bird": 20, "cat": 10, "dog": 10}, 1)
    layouts.image_folders(tmp_path / "pets" / "sketches", {"cat": 15, "dog": 15, "fish": 10}, 2, ".png")
    return tmp_path / "pets"


def test_classes_in_common_and_all_classes(root: Path) -> None:
    common, all_ = load(root), load(root, classes="union")
    assert common.classes == ("cat", "dog")
    assert all_.classes == ("bird", "cat", "dog", "fish")
    assert [domain.name for domain in common.domains] == ["photos", "sketches"]
    assert len(common["photos"].train) + len(common["photos"].test) == 20
    assert len(all_["photos"].train) + len(all_["photos"].test) == 40
    assert sorted(set(all_["sketches"].train.labels.tolist())) == [1, 2, 3]


@pytest.mark.parametrize("number", [None, 2, 7])
def test_everything_is_shared_out_unless_said_otherwise(root: Path, number: int | None) -> None:
    experiment = fedheal.Experiment(data=f"folder:{root}", clients_per_domain=number)
    dataset = load_domains(experiment)
    clients = partition_clients(experiment, dataset)
    for domain in dataset.domains:
        sizes = [len(client.indices) for client in clients if client.domain == domain.name]
        assert sizes == [len(domain.train) // (number or 5)] * (number or 5)


def test_training_and_test_folders_are_kept(tmp_path: Path) -> None:
    layouts.image_folders(tmp_path / "a" / "train", {"x": 3, "y": 4}, 1)
    layouts.image_folders(tmp_path / "a" / "test", {"x": 2, "y": 1}, 2)
    domain = load(tmp_path)["a"]
    assert domain.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert domain.test.labels.tolist() == [0, 0, 1]


def test_any_size_becomes_the_size_asked_for(root: Path) -> None:
    assert load(root).domains[0].train.images.shape[1:] == (3, 32, 32)
    assert load(root, size=48).domains[0].train.images.shape[1:] == (3, 48, 48)


def test_images_that_cannot_be_read_are_named_and_counted(root: Path) -> None:
    whole = load(root)
    (root / "photos" / "cat" / "0001.jpg").write_bytes(b"not an image")
    (root / "photos" / "dog" / "0002.jpg").write_bytes(b"")
    half = (root / "photos" / "dog" / "0003.jpg").read_bytes()
    (root / "photos" / "dog" / "0003.jpg").write_bytes(half[: len(half) // 2])
    dataset = load(root)
    assert len(dataset["photos"].train) == len(whole["photos"].train) - 3
    assert len(dataset["sketches"].train) == len(whole["sketches"].train)
    (note,) = (note for note in dataset.notes if "could not be read" in note)
    assert note.startswith("photos: 3 images could not be read")
    assert "cat/0001.jpg is not an image" in note
    assert "dog/0003.jpg cannot be decoded" in note


def test_kinds_of_images(tmp_path: Path) -> None:
    """Grey, palette, transparent and 16-bit images, and files that are no images."""
    for name in ("x", "y"):
        layouts.image_folders(tmp_path / "a" / "train", {name: 2}, 1)
        layouts.image_folders(tmp_path / "a" / "test", {name: 1}, 1)
    folder = tmp_path / "a" / "train" / "x"
    for mode in ("1", "L", "P", "LA", "RGBA", "I;16", "CMYK"):
        out = io.BytesIO()
        Image.new(mode, (9, 7)).save(out, "TIFF" if mode == "CMYK" else "PNG")
        (folder / f"{mode.replace(';', '')}.png").write_bytes(out.getvalue())
    (folder / "notes.txt").write_text("not looked at")
    (folder / ".hidden.png").write_text("not looked at")
    dataset = load(tmp_path)
    assert len(dataset["a"].train) == 2 + 6 + 2
    assert "CMYK.png is not an image of a known format" in dataset.notes[0]


def test_images_in_folders_below_a_class_count(tmp_path: Path) -> None:
    layouts.image_folders(tmp_path / "a", {"x": 10, "y": 10})
    (tmp_path / "a" / "x" / "deep" / "er").mkdir(parents=True)
    shutil.copy(tmp_path / "a" / "x" / "0000.jpg", tmp_path / "a" / "x" / "deep" / "er" / "z.jpg")
    domain = load(tmp_path)["a"]
    assert len(domain.train) + len(domain.test) == 21


def test_domainnets_lists_decide_where_they_are(tmp_path: Path) -> None:
    layouts.image_folders(tmp_path / "domainnet" / "sketch", {"axe": 5, "bus": 5})
    (tmp_path / "domainnet" / "sketch_train.txt").write_text(
        "sketch/bus/0003.jpg 1\nsketch/axe/0001.jpg 0\nsketch/axe/9999.jpg 0\n\n"
    )
    (tmp_path / "domainnet" / "sketch_test.txt").write_text("sketch/axe/0002.jpg 0\n")
    domain = data.load_dataset("domainnet", data.DataRequest(str(tmp_path), allow_missing=True))["sketch"]
    assert domain.train.labels.tolist() == [1, 0]
    assert domain.test.labels.tolist() == [0]
    (tmp_path / "domainnet" / "sketch_test.txt").write_text("../secret/x.jpg 0\n")
    with pytest.raises(ValueError, match=r"line 1 of .*sketch_test.txt is not"):
        data.load_dataset("domainnet", data.DataRequest(str(tmp_path), allow_missing=True))


def test_mnist_m_by_folder(tmp_path: Path) -> None:
    layouts.image_folders(tmp_path / "digits" / "mnist_m", {str(digit): 3 for digit in range(10)})
    dataset = data.load_dataset("digits-five", data.DataRequest(str(tmp_path), allow_missing=True))
    assert [(domain.name, len(domain.train)) for domain in dataset.domains] == [("mnist_m", 24)]


def test_a_run_on_your_own_folders(root: Path, tmp_path: Path) -> None:
    keys = {"data": f"folder:{root}", "rounds": 1, "epochs": 1, "model": "small_cnn", "clients_per_domain": 2}
    result = fedheal.run(fedheal.Experiment(**keys, device="cpu"), tmp_path / "run", progress=False)
    assert list(result.domains) == ["photos", "sketches"]
    assert result.summary["data_fingerprint"] == load(root).identity


# What is refused


@pytest.mark.parametrize("name", ["new\nline", "tab\there", "\x1b[31m", "null\u200b"])
def test_names_that_cannot_be_shown(root: Path, name: str) -> None:
    (root / "photos" / name).mkdir()
    with pytest.raises(ValueError, match="not a valid domain or class name") as error:
        load(root)
    assert str(error.value).isprintable()


def test_no_domains_no_classes_no_images(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no subfolders"):
        load(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=rf"no domain of 'folder:{tmp_path}' was found: .*<class>"):
        load(tmp_path)
    (tmp_path / "a" / "x").mkdir()
    with pytest.raises(ValueError, match="no domain of 'folder:"):
        load(tmp_path)
    layouts.image_folders(tmp_path / "b", {"x": 10})
    with pytest.raises(ValueError, match=f"'folder:{tmp_path}' lacks 1 of 2 domains: a: "):
        load(tmp_path)
    with pytest.raises(ValueError, match=f"data 'folder:{tmp_path}': the intersection of .* has 1 class"):
        load(tmp_path, allow_missing=True)


@pytest.mark.parametrize(
    ("splits", "says"),
    [
        (["train", "valid"], "domain 'a' has train/ but no test/ (found valid/): name it test"),
        (["Training"], "domain 'a' has Training/ but no test/: add it, or put the folders of classes into a/ itself"),
        (["test"], "domain 'a' has test/ but no train/: add it"),
    ],
)
@pytest.mark.parametrize("command", [["data", "check", "folder:pets"], ["run", "data=folder:pets", "rounds=1"]])
def test_half_a_split_is_no_class(tmp_path: Path, call, command: list[str], splits: list[str], says: str) -> None:
    for split in splits:
        layouts.image_folders(tmp_path / "pets" / "a" / split, {"x": 10, "y": 10})
    layouts.image_folders(tmp_path / "pets" / "b", {"x": 10, "y": 10})
    assert_sentence(call(*command), says)
    assert [path.name for path in tmp_path.iterdir()] == ["pets"]


@pytest.mark.parametrize("classes", [{"train": 10, "valid": 10}, {"train": 10, "car": 10}])
def test_a_class_may_be_called_train(tmp_path: Path, classes: dict[str, int]) -> None:
    layouts.image_folders(tmp_path / "a", classes)
    if "car" in classes:  # images below folders in a class
        (tmp_path / "a" / "train").rename(tmp_path / "a" / "steam")
        (tmp_path / "a" / "train").mkdir()
        (tmp_path / "a" / "steam").rename(tmp_path / "a" / "train" / "steam")
    assert load(tmp_path).classes == tuple(sorted(classes))


def test_what_archives_of_macos_add_is_neither_domain_nor_class(root: Path) -> None:
    before = load(root, classes="union")
    layouts.image_folders(root / "__MACOSX" / "photos", {"cat": 10})
    layouts.image_folders(root / "photos", {"__MACOSX": 10})
    assert load(root, classes="union").identity == before.identity


def test_domains_without_a_common_class(tmp_path: Path) -> None:
    layouts.image_folders(tmp_path / "a", {"x": 10, "y": 10})
    layouts.image_folders(tmp_path / "b", {"z": 10, "w": 10})
    with pytest.raises(ValueError, match=r"the intersection of the classes of a, b has 0 classes"):
        load(tmp_path)
    assert load(tmp_path, classes="union").classes == ("w", "x", "y", "z")


def test_a_link_to_a_folder_above_and_one_to_itself(root: Path) -> None:
    (root / "photos" / "cat" / "loop").symlink_to(root / "photos", target_is_directory=True)
    with pytest.raises(ValueError, match=r"loop is a link to a folder that contains it"):
        load(root)
    (root / "photos" / "cat" / "loop").unlink()
    (root / "photos" / "cat" / "self").symlink_to(root / "photos" / "cat" / "self")
    with pytest.raises(ValueError, match="is a link to itself"):
        load(root)


def test_a_link_that_leads_nowhere_and_a_pipe_are_unreadable_images(root: Path) -> None:
    import os

    (root / "photos" / "cat" / "gone.jpg").symlink_to(root / "nowhere.jpg")
    os.mkfifo(root / "photos" / "cat" / "pipe.jpg")
    note, _ = load(root).notes  # the other is about classes
    assert "2 images could not be read" in note


def test_folders_too_deep_to_be_classes(tmp_path: Path) -> None:
    layouts.image_folders(tmp_path / "a", {"x": 10, "y": 10})
    (tmp_path / "a" / "x" / "/".join("d" * (folders.MAX_DEPTH + 2))).mkdir(parents=True)
    with pytest.raises(ValueError, match="folders deep"):
        load(tmp_path)


def test_a_domain_of_which_nothing_can_be_read(root: Path, cache_folder: Path) -> None:
    for path in (root / "photos").rglob("*.jpg"):
        path.write_bytes(b"no")
    said = "'photos' has 0 training and 0 test images that can be read, and needs both; 20 files cannot be "
    with pytest.raises(ValueError, match=rf"{said}\(.*\): replace the broken files$"):
        load(root)
    assert list(cache_folder.iterdir()) == []


def test_there_is_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        load(tmp_path / "nowhere")


def test_a_file_in_place_of_a_folder_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(b"no")
    sentence = rf"^data = 'folder:{path}': {path} is not an export, or is damaged \(.*\); "
    with pytest.raises(ValueError, match=sentence + r"folder: takes a folder that contains <domain>/<class>/"):
        load(path)


# What a new user may try


def test_sixteen_bits_of_grey_keep_their_shades(tmp_path: Path) -> None:
    shades = np.arange(9 * 32 * 32).reshape(9, 32, 32) % 256
    for name in ("x", "y"):
        (tmp_path / "a" / name).mkdir(parents=True)
        for number, shade in enumerate(shades):
            Image.fromarray((257 * shade).astype(np.uint16)).save(tmp_path / "a" / name / f"{number}.png")
    assert load(tmp_path)["a"].train.images[3, 1].tolist() == shades[3].tolist()


@pytest.mark.parametrize("counts", [{"x": 1, "y": 1}, {"x": 4, "y": 4}])
def test_a_domain_too_small_to_test_with(tmp_path: Path, call, counts: dict[str, int]) -> None:
    layouts.image_folders(tmp_path / "pets" / "big", {"x": 10, "y": 10})
    layouts.image_folders(tmp_path / "pets" / "small", counts)
    messages = (
        f"domain 'small' has {sum(counts.values())} training and 0 test images and needs both; image folders without"
    )
    checked, prepared = call("data", "check", "folder:pets"), call("data", "prepare", "folder:pets")
    assert (checked.code, prepared.code) == (2, 2)
    assert f"small: unusable in pets/small: {messages}" in checked.out
    assert messages in prepared.err


def test_a_folder_without_domains_and_one_too_high(tmp_path: Path, call) -> None:
    layouts.image_folders(tmp_path / "pets" / "photos", {"x": 10, "y": 10})
    flat = call("data", "check", "folder:pets/photos")
    assert flat.code == 1
    assert "photos/x/ should contain <class>/*.jpg" in flat.out
    assert "(it has images, but no folders of classes)" in flat.out
    (tmp_path / "high").mkdir()
    (tmp_path / "pets").rename(tmp_path / "high" / "pets")
    high = call("data", "check", "folder:high")
    assert "all images are in folders below its classes (photos): is the path one folder too high?" in high.out


def test_more_clients_than_images(tmp_path: Path, call) -> None:
    layouts.image_folders(tmp_path / "pets" / "a" / "train", {"x": 1, "y": 1})
    layouts.image_folders(tmp_path / "pets" / "a" / "test", {"x": 1, "y": 1})
    done = call("run", "data=folder:pets", "model=small_cnn", "rounds=1")
    assert done.code == 2
    assert "domain 'a' has 2 training samples for 5 clients: use at most 2 clients_per_domain" in done.err
