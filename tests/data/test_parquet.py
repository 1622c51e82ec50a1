"""Parquet files as the hub has them: labels and their names, several domains in one table, splits by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

import layouts
from fedheal import data
from fedheal.data.locate import inspect_domains
from fedheal.data.readers.parquet import read_parquet_domain


def write_table(path: Path, columns: dict[str, Any], features: dict[str, Any] | None = None, rows: int = 1000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table(columns)
    if features:
        metadata = json.dumps({"info": {"features": features}}).encode()
        table = table.replace_schema_metadata({b"huggingface": metadata})
    parquet.write_table(table, path, row_group_size=rows)


def make_images(number: int, seed: int = 0) -> list[dict[str, Any]]:
    return [{"bytes": layouts.picture(seed + i, 16, 16, "PNG"), "path": None} for i in range(number)]


def make_class_label(*labels: str) -> dict[str, Any]:
    return {"names": list(labels), "_type": "ClassLabel"}


def test_a_digits_domain_as_the_hub_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "flwrlabs--usps" / "data"
    digits = {"label": make_class_label(*"0123456789")}
    write_table(
        folder / "train-00000-of-00002.parquet",
        {"image": make_images(20), "label": [i % 10 for i in range(20)]},
        digits,
        7,
    )
    write_table(folder / "train-00001-of-00002.parquet", {"image": make_images(4, 90), "label": [1, 2, 3, 4]}, digits)
    write_table(folder / "test-00000-of-00001.parquet", {"image": make_images(5, 50), "label": [5, 6, 7, 8, 9]}, digits)
    domain = data.load_dataset("digits", data.DataRequest(str(tmp_path), allow_missing=True))["usps"]
    assert domain.train.labels.tolist() == [*(i % 10 for i in range(20)), 1, 2, 3, 4]
    assert domain.test.labels.tolist() == [5, 6, 7, 8, 9]
    whole = Image.fromarray(layouts.pixels(13, 16, 16, 3)).resize((32, 32), Image.Resampling.BILINEAR)
    assert np.array_equal(domain.train.images[13].numpy(), np.asarray(whole).transpose(2, 0, 1))


@pytest.mark.parametrize("coded", [True, False])
def test_several_domains_in_one_table_are_split_eight_to_two(tmp_path: Path, coded: bool) -> None:
    kinds, label_feature = ["Art", "Clipart", "Product", "Real World"], make_class_label("bed", "cup")
    which = [i % 4 for i in range(80)]
    columns = {
        "image": make_images(80),
        "domain": which if coded else [kinds[w] for w in which],
        "label": [(i // 4) % 2 for i in range(80)],
    }
    features = {"label": label_feature} | ({"domain": make_class_label(*kinds)} if coded else {})
    write_table(tmp_path / "hub" / "flwrlabs--office-home" / "data" / "train-0.parquet", columns, features, 16)
    dataset = data.load_dataset("office-home", data.DataRequest(str(tmp_path)))
    assert dataset.classes == ("bed", "cup")
    assert [domain.name for domain in dataset.domains] == ["art", "clipart", "product", "real_world"]
    for domain in dataset.domains:
        assert (domain.train.labels.tolist(), domain.test.labels.tolist()) == ([0] * 8 + [1] * 8, [0] * 2 + [1] * 2)


def test_a_table_that_does_not_say_domains_is_no_table_of_several(tmp_path: Path) -> None:
    """Otherwise every domain would be the whole table."""
    path = tmp_path / "hub" / "flwrlabs--pacs" / "data" / "train-0.parquet"
    write_table(path, {"image": make_images(20), "label": ["dog", "cat"] * 10, "style": ["photo", "sketch"] * 10})
    with pytest.raises(
        ValueError, match=r"train-0.parquet has the columns image, label, style; a column domain is required"
    ):
        data.load_dataset("pacs", data.DataRequest(str(tmp_path)))
    for domain in inspect_domains(data.SPECS["pacs"], tmp_path):
        assert domain.state == "damaged"
        assert domain.detail.endswith(f"is required to select '{domain.name}'")


def test_labels_as_words(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", {"image": make_images(20), "label": ["dog", "cat"] * 10})
    domain = read_parquet_domain("a", [tmp_path / "a.parquet"], "", ())
    assert domain.classes == ("cat", "dog")
    assert len(domain.train) == 16


def test_a_file_need_not_have_images_of_every_class(tmp_path: Path) -> None:
    shards = {"train-0": ["dog", "cat"], "train-1": ["cat", "owl"], "test-0": ["owl", "ant"]}
    for name, labels in shards.items():
        write_table(tmp_path / "data" / f"{name}.parquet", {"image": make_images(2), "label": labels})
    domain = read_parquet_domain("a", [tmp_path / "data" / f"{name}.parquet" for name in shards], "", ())
    assert domain.classes == ("ant", "cat", "dog", "owl")
    assert domain.train.labels.tolist() == [2, 1, 1, 3]
    assert domain.test.labels.tolist() == [3, 0]


def test_a_label_beyond_the_known_classes_is_damage(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "flwrlabs--usps" / "data"
    for part in ("train", "test"):
        write_table(folder / f"{part}.parquet", {"image": make_images(11), "label": list(range(11))})
    (domain,) = (f for f in inspect_domains(data.SPECS["digits"], tmp_path) if f.name == "usps")
    assert domain.state == "damaged"
    assert domain.detail.endswith("labels from 0 to 10 for 10 classes")
    with pytest.raises(ValueError, match="labels from 0 to 10 for 10 classes"):
        data.load_dataset("digits", data.DataRequest(str(tmp_path), allow_missing=True))


def test_splits_in_folders_of_their_own_and_files_that_are_not_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "ufldl-stanford--svhn" / "cropped_digits"
    for part, number in (("train", 12), ("test", 11), ("extra", 13)):
        write_table(
            folder / part / "0000.parquet", {"image": make_images(number), "label": [i % 10 for i in range(number)]}
        )
    domain = data.load_dataset("digits", data.DataRequest(str(tmp_path), allow_missing=True))["svhn"]
    assert (len(domain.train), len(domain.test)) == (12, 11)


def test_bytes_that_are_no_image_are_named_and_counted(tmp_path: Path) -> None:
    broken = make_images(20)
    broken[3]["bytes"] = b"no"
    broken[4]["bytes"] = None
    folder = tmp_path / "hub" / "flwrlabs--usps" / "data"
    for part in ("train", "test"):
        write_table(folder / f"{part}.parquet", {"image": broken, "label": [i % 10 for i in range(20)]})
    dataset = data.load_dataset("digits", data.DataRequest(str(tmp_path), allow_missing=True))
    assert len(dataset["usps"].train) == 18
    assert any("usps: 4 images could not be read" in note for note in dataset.notes)


@pytest.mark.parametrize(
    ("columns", "features", "sentence"),
    [
        ({"picture": [1], "label": [0]}, None, "image and label are required"),
        ({"image": [b""], "kind": [0]}, None, "image and label are required"),
        ({"image": [b""], "label": [7]}, {"label": make_class_label("a", "b")}, "labels from 7 to 7 for 2 classes"),
        ({"image": [b""], "label": [-1]}, {"label": make_class_label("a", "b")}, "labels from -1"),
        (
            {"image": [b""] * 2, "label": [0, None]},
            {"label": make_class_label("a", "b")},
            r"a.parquet#1 has no label: remove the row",
        ),
        ({"image": [b""] * 2, "label": ["a", None]}, None, r"a.parquet#1 has no label: remove the row"),
        ({"image": [b""], "label": [0.5]}, {"label": make_class_label("a", "b")}, "a column label of type double"),
        (
            {"image": [b""], "label": [0], "domain": [3]},
            {"label": make_class_label("a", "b"), "domain": make_class_label("art")},
            "domains from 3 to 3 for 1 names",
        ),
        ({"image": [b""], "label": [0]}, None, "does not name its classes"),
    ],
)
def test_tables_that_are_something_else(
    tmp_path: Path, columns: dict[str, Any], features: dict[str, Any] | None, sentence: str
) -> None:
    write_table(tmp_path / "a.parquet", columns, features)
    with pytest.raises(ValueError, match=sentence):
        read_parquet_domain("a", [tmp_path / "a.parquet"], "art" if "domain" in columns else "", ())


@pytest.mark.parametrize(
    ("limit", "sentence"), [("MAX_ROWS", "it has 100 rows, more than 9"), ("MAX_BYTES", "a column of a row group has")]
)
def test_tables_that_unpack_to_too_much(tmp_path: Path, monkeypatch, limit: str, sentence: str) -> None:
    monkeypatch.setattr(f"fedheal.data.readers.parquet.{limit}", 9)
    write_table(tmp_path / "a.parquet", {"image": [b"x" * 10] * 100, "label": [0] * 100})
    with pytest.raises(ValueError, match=sentence):
        read_parquet_domain("a", [tmp_path / "a.parquet"], "", ("cat", "dog"))


def test_class_names_that_are_nested_too_deeply_are_none(tmp_path: Path) -> None:
    table = pyarrow.table({"image": [b""], "label": [0]})
    parquet.write_table(table.replace_schema_metadata({b"huggingface": b"[" * 100_000}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="does not name its classes"):
        read_parquet_domain("a", [tmp_path / "a.parquet"], "", ())


def test_a_domain_may_be_a_number_or_unknown_and_labels_whole_numbers_of_any_kind(tmp_path: Path) -> None:
    columns = {"image": [b""] * 12, "label": [0.0, 1.0] * 6, "domain": [7] * 10 + [None, 8]}
    write_table(tmp_path / "a.parquet", columns, {"label": make_class_label("a", "b")})
    domain = read_parquet_domain("a", [tmp_path / "a.parquet"], "7", ())
    assert (len(domain.train), len(domain.test)) == (8, 2)
    assert sorted([*domain.train.labels.tolist(), *domain.test.labels.tolist()]) == [0] * 5 + [1] * 5


def test_a_file_that_is_not_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match="not a readable Parquet file"):
        read_parquet_domain("a", [tmp_path / "a.parquet"], "", ())
