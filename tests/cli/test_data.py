"""`fedheal data` and runs on real data, as a user gives them."""

from __future__ import annotations

import csv
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from PIL import Image

import layouts
from command_line import assert_sentence
from fedheal import data
from fedheal.simulate.build import load_domains, partition_clients
from fedheal.simulate.experiment import Experiment

QUICK = ["rounds=1", "epochs=1", "model=small_cnn", "samples_per_client=3", "clients_per_domain=2", "device=cpu"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return layouts.digits(tmp_path / "data")


def test_list_has_every_set_and_the_ways_to_bring_your_own(call) -> None:
    out = call("data", "list").out
    for name in (*data.DATASETS, "folder:PATH", "package.module:function"):
        assert name in out


def test_check_says_counts_balance_and_what_stands_in(root: Path, call) -> None:
    done = call("data", "check", "digits", "--data-root", root)
    assert done.code == 0, done
    for said in (
        "mnist",
        "idx",
        "LIBSVM text",
        "MATLAB",
        "stand-in",
        "4 in each of 10 classes",
        "73,257 training and 26,032 test images",
    ):
        assert said in done.out


def test_check_names_the_missing_file_and_where_it_can_be_had(root: Path, call) -> None:
    (root / "digits" / "svhn" / "test_32x32.mat").unlink()
    done = call("data", "check", "digits", "--data-root", root)
    assert done.code == 1
    assert f"{root}/digits/svhn/test_32x32.mat is missing" in done.out.replace("\n", "")
    assert "ufldl-stanford/svhn" in done.out


def test_classes_that_not_every_domain_has_are_named(call, tmp_path: Path) -> None:
    layouts.image_folders(tmp_path / "pets" / "art", {"cat": 10, "dog": 10, "horse": 10}, 1)
    layouts.image_folders(tmp_path / "pets" / "photos", {"cat": 10, "dog": 10, "horze": 10, "newt": 5}, 2)
    layouts.image_folders(tmp_path / "pets" / "sketches", {"cat": 10, "dog": 10, "horse": 10}, 3)
    note = (
        "3 classes are left out because not every domain has them: 'horse' (in art, sketches), 'horze' (in photos; did you "
        "mean 'horse'?), 'newt' (in photos); rename folders that are misspelt; classes=union keeps them"
    )
    checked = call("data", "check", "folder:pets")
    assert checked.code == 1, checked
    assert f"folder:pets: {note}" in checked.out
    done = call("run", "data=folder:pets", *QUICK, "name=one")
    assert done.out.startswith(f"Note: {note}.\n"), done  # before the first round
    assert json.loads((tmp_path / "runs" / "one" / "result.json").read_text())["data_notes"] == [note]
    for words in (["data", "check", "folder:pets"], ["data", "prepare", "folder:pets"]):
        union = call(*words, "classes=union")
        assert (union.code, "left out" in union.out) == (0, False)
        assert (
            "class names that may be misspelt: 'horze' (in photos; did you mean 'horse'?); rename folders that are"
            in union.out
        )


@pytest.mark.parametrize(
    "command", [["compare", "fedavg", "--data", "folder:pets"], ["sweep", "data=folder:pets", "lr=1,2"]]
)
def test_classes_that_are_left_out_are_named_before_the_first_of_many_runs(
    call, tmp_path: Path, command, monkeypatch
) -> None:
    for seed, classes in enumerate((["cat", "dog", "newt"], ["cat", "dog"])):
        layouts.image_folders(tmp_path / "pets" / f"domain{seed}", dict.fromkeys(classes, 10), seed)

    def refuse(*_: object) -> None:
        raise ValueError("no run today")

    monkeypatch.setattr("fedheal.campaign.pool._run_here", refuse)
    done = call(*command, *QUICK, "--seeds", "1")
    note = "Note: 1 class is left out because not every domain has it: 'newt' (in domain0); classes=union keeps it."
    assert (done.code, done.err, note in done.out) == (2, "fedheal: no run today\n", True), done


def test_check_says_which_folder_is_the_test_set_and_which_are_not_used(call, tmp_path: Path) -> None:
    splits = {"a": ("train", "val"), "b": ("train", "val", "test"), "c": ("train", "test")}
    for domain, names in splits.items():
        for name in names:
            layouts.image_folders(tmp_path / "pets" / domain / name, {"cat": 5, "dog": 5})
    done = call("data", "check", "folder:pets")
    assert done.code == 0, done
    assert "a: found in pets/a: val/ is the test set\n" in done.out
    assert "b: found in pets/b: val/ is not used\n" in done.out
    assert "c: found in pets/c\n" in done.out


def test_check_says_of_which_classes_a_domain_has_no_test_images(call, tmp_path: Path) -> None:
    layouts.image_folders(tmp_path / "pets" / "a", {"cat": 8, "dog": 12})
    layouts.image_folders(tmp_path / "pets" / "b", {"cat": 10, "dog": 10})
    done = call("data", "check", "folder:pets")
    assert done.code == 0, done
    assert "a: found in pets/a: no test images of cat\n" in done.out
    assert "b: found in pets/b\n" in done.out


def test_check_says_that_images_of_16_bits_use_fewer(call, tmp_path: Path) -> None:
    """12 bits in files of 16, as microscopes and X-ray detectors write them, become nearly black."""
    for domain, factor in (("dark", 1), ("bright", 16)):
        for name in ("a", "b"):
            (tmp_path / "cells" / domain / name).mkdir(parents=True)
            for number in range(10):
                shades = np.arange(64, dtype=np.uint16).reshape(8, 8) * 65 * factor  # up to 4095 of 65535
                Image.fromarray(shades).save(tmp_path / "cells" / domain / name / f"{number}.png")
    done = call("data", "check", "folder:cells")
    assert done.code == 0, done
    said = "its images have 16 bits per pixel, but use only 12 of them, so they will be nearly black"
    assert f"dark: found in cells/dark: {said}: multiply their values by 16, or save them with 8 bits\n" in done.out
    assert "bright: found in cells/bright\n" in done.out


def test_check_refuses_domains_without_a_common_class_as_a_run_does(call, tmp_path: Path) -> None:
    layouts.image_folders(tmp_path / "pets" / "a", {"v": 10, "w": 10, "x": 10, "y": 10}, 1)
    layouts.image_folders(tmp_path / "pets" / "b", {"y": 10, "z": 10}, 2)
    for words in (["data", "check", "folder:pets"], ["run", "data=folder:pets", *QUICK]):
        done = call(*words)
        assert done.code == 2, done
        assert "has 1 class; at least two are needed (a has v, w, x and 1 more; b has y, z)" in done.err


def test_check_without_a_name_looks_for_all(root: Path, call) -> None:
    done = call("data", "check", "--data-root", root)
    assert "pacs: not on disk" in done.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "digits", "data=embedded"], "'data' is given twice: digits and data=embedded"),
        (["prepare", "digits", "data=embedded"], "'data' is given twice: digits and data=embedded"),
        (["export", "digits", "seed=1", "seed=2"], "'seed' is given twice: seed=1 and seed=2"),
        (["show", "digits", "--data-root", ".", "data_root=x"], "'data_root' is given twice: . and data_root=x"),
        (["export", "digits", "--seeds", "0-0", "seed=3"], "seed=3: set the seeds of an export by --seeds"),
        (["export", "digits", "--seeds", "0-0", "split_seed=3"], "split_seed=3: set the seeds of an export by --seeds"),
    ],
)
def test_nothing_is_given_twice(call, words: list[str], said: str) -> None:
    done = call("data", *words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "digits", "--out", "data"], "data is a folder: name a file, such as data/data.export"),
        (["fetch", "pacs", "--from", "bogus"], "fedheal: from = bogus: use hub or web\n"),  # once, not for each domain
        (
            ["fetch", "digits", "--from", "ftp"],
            "fedheal: from = ftp: use hub or web\n",
        ),  # before what is on disk is named
    ],
)
def test_what_cannot_be_written_or_fetched_is_a_sentence(root: Path, call, words: list[str], said: str) -> None:
    assert_sentence(call("data", *words, "--data-root", root), said)


def test_show_writes_a_sheet_for_each_domain(root: Path, call, tmp_path: Path) -> None:
    done = call("data", "show", "digits", "--data-root", root, "--out", tmp_path / "sheets")
    assert done.code == 0, done.err
    sheets = sorted((tmp_path / "sheets").iterdir())
    assert [p.name for p in sheets] == [f"digits-{d}.png" for d in ("mnist", "svhn", "syn_standin", "usps")]
    with Image.open(sheets[1]) as sheet:
        assert sheet.height > 10 * 64
        first = sheet.getpixel((sheet.width - 12 * 98 + 48, 24 + 48))  # in the first image of the first row
        second = sheet.getpixel((sheet.width - 11 * 98 + 48, 24 + 48))
    assert first not in ((255, 255, 255), second)


def test_a_failed_show_leaves_no_folder(root: Path, call, tmp_path: Path) -> None:
    words = ["--clients", "--data-root", root, "--out", tmp_path / "sheets", "clients_per_domain=mnistt=3"]
    assert_sentence(call("data", "show", "digits", *words), "clients_per_domain names 'mnistt'")
    assert not (tmp_path / "sheets").exists()


def test_show_clients_draws_and_prints_what_each_holds(root: Path, call, tmp_path: Path) -> None:
    table = "clients_per_domain=mnist=3 usps=1 svhn=2 syn_standin=1"
    words = ["samples_per_client=6", table, "pathological=2", "seed=4"]
    done = call("data", "show", "digits", "--clients", "--data-root", root, "--out", tmp_path / "s", *words)
    assert done.code == 0, done.err
    assert [line.split()[1] for line in done.out.splitlines() if "-" in line and "│" in line] == [
        "mnist-0", "mnist-1", "mnist-2", "usps-0", "svhn-0", "svhn-1", "syn_standin-0",
    ]  # fmt: skip
    head, *rows = csv.reader((tmp_path / "s" / "digits-clients.csv").read_text().splitlines())
    assert head == ["client", "domain", "samples", *"0123456789"]
    assert all(sum(n != "0" for n in row[3:]) == 2 and sum(map(int, row[3:])) == int(row[2]) for row in rows)
    with Image.open(tmp_path / "s" / "digits-clients.png") as plot:
        assert len(plot.convert("RGB").getcolors(1 << 24)) > 10


def test_prepare_says_counts_fingerprint_and_place(root: Path, call, cache_folder: Path) -> None:
    done = call("data", "prepare", "digits", "--data-root", root)
    assert "mnist: 40 training and 20 test images" in done.out
    assert data.load_dataset("digits", data.DataRequest(str(root))).identity in done.out
    assert str(cache_folder) in done.out


@pytest.mark.slow
def test_a_run_on_digits_names_the_stand_in_everywhere(root: Path, call, tmp_path: Path) -> None:
    done = call("run", "data=digits", f"data_root={root}", *QUICK, "name=one")
    assert done.code == 0, done.err
    assert "syn_standin" in done.out.split("Note:")[0]
    assert "Note: syn_standin stands in for syn" in done.out
    result = json.loads((tmp_path / "runs" / "one" / "result.json").read_text())
    assert list(result["domains"]) == ["mnist", "usps", "svhn", "syn_standin"]
    assert any("stands in for syn" in note for note in result["data_notes"])
    table = call("report", "runs/one", "--format", "markdown").out
    assert "syn_standin" in table.split("\n- ")[0]
    assert "Note: syn_standin stands in for syn" in table


def test_a_run_on_three_domains_must_be_asked_for(tmp_path: Path, call) -> None:
    root = layouts.office_caltech(tmp_path / "data", ("amazon", "webcam", "dslr"))
    words = ["run", "data=office-caltech", f"data_root={root}", *QUICK, "image_size=32", "name=one"]
    refused = call(*words)
    assert refused.code == 2
    assert "caltech" in refused.err
    assert not (tmp_path / "runs").exists()
    done = call(*words, "allow_missing=true")
    assert done.code == 0, done.err
    assert "results are over 3 of 4 domains" in done.out


def test_compare_with_bounds_on_real_data(root: Path, call) -> None:
    words = [word for word in QUICK if word != "clients_per_domain=2"]
    done = call("compare", "fedavg", "leave-one-domain-out", "--data", "digits", "--seeds", "1", "--jobs", "1",
                f"data_root={root}", "clients_per_domain=1", *words)  # fmt: skip
    assert done.code == 0, done.err
    assert "syn_standin" in done.out
    assert "stands in for syn" in done.out


# What an experiment says about data


def test_protocols_of_the_paper() -> None:
    digits, office = Experiment(data="digits"), Experiment(data="office-caltech")
    shared = {"model": "resnet10", "rounds": 200, "epochs": 10, "lr": 0.001, "momentum": 0.9, "weight_decay": 1e-5}
    for experiment in (digits, office):
        assert {key: getattr(experiment, key) for key in shared} == shared
    assert (digits.batch_size, digits.augment) == (64, "crop")
    assert (office.batch_size, office.augment) == (16, "flip")
    assert digits.method_name == "fedavg+fedheal"
    assert office.method_name == "fedavg+fedheal:tau=0.4"


def test_a_sets_tau_gives_way_to_what_is_said_and_to_methods_without() -> None:
    assert Experiment(data="office-caltech", tau=0.2).method_name == "fedavg+fedheal:tau=0.2"
    assert Experiment(data="office-caltech", method="fedheal:tau=0.1").method_name == "fedavg+fedheal:tau=0.1"
    assert Experiment(data="office-caltech", method="fedavg").method_name == "fedavg"
    assert Experiment(data="office-caltech", method="fael-exact").method_name == "fedavg+fael-exact"
    again = Experiment(**{"data": "office-caltech", "method": Experiment(data="office-caltech", tau=0.2).method})
    assert again.method_name == "fedavg+fedheal:tau=0.2"


def test_numbers_for_each_domain_in_words_in_toml_and_in_python(root: Path, tmp_path: Path) -> None:
    said = {"mnist": 4, "usps": 1, "svhn": 2, "syn_standin": 3}
    toml = tmp_path / "e.toml"
    fields = {"data": "digits", "data_root": str(root), "samples_per_client": 5}
    toml.write_text(tomli_w.dumps(fields | {"clients_per_domain": said}))
    words = [f"{key}={value}" for key, value in fields.items()]
    ways = [
        Experiment(**fields, clients_per_domain=said),
        Experiment.read(toml),
        Experiment.read(None, [*words, "clients_per_domain=mnist=4 usps=1 svhn=2 syn_standin=3"]),
        Experiment.read(None, [*words, "clients_per_domain={mnist=4,usps=1,svhn=2,syn_standin=3}"]),
    ]
    assert len({experiment.identity for experiment in ways}) == 1
    clients = partition_clients(ways[0], load_domains(ways[0]))
    client_domains = [client.domain for client in clients]
    assert {name: client_domains.count(name) for name in said} == said
    assert Experiment.of(tomllib.loads(ways[0].to_toml())) == ways[0]


def test_a_fraction_is_of_the_whole_set(root: Path) -> None:
    shares = {"mnist": 0.0005, "usps": 0.001, "svhn": 0.0002, "syn_standin": 0.001}
    experiment = Experiment(data="digits", data_root=str(root), clients_per_domain=1, fraction=shares)
    sizes = {c.domain: len(c.indices) for c in partition_clients(experiment, load_domains(experiment))}
    assert sizes == {"mnist": 30, "usps": 7, "svhn": 14, "syn_standin": 10}


def test_the_split_depends_neither_on_rounds_nor_on_the_method(root: Path) -> None:
    def held(**keys: object) -> dict[str, list[int]]:
        fields = {"data": "digits", "data_root": str(root), "samples_per_client": 5, "seed": 3} | keys
        experiment = Experiment(**fields)
        return {c.id: c.indices.tolist() for c in partition_clients(experiment, load_domains(experiment))}

    for skew in ({}, {"dirichlet": 0.3}, {"pathological": 2}, {"quantity": 0.5}, {"class_filling": True}):
        assert held(**skew) == held(**skew, rounds=7, method="fedavg")


@pytest.mark.parametrize(
    ("name", "message"),
    [("digit", "is no data set (did you mean 'digits'?)"), ("embedded", "is not read from disk")],
)
def test_a_data_set_that_cannot_be_checked_is_a_sentence(call, name: str, message: str) -> None:
    assert_sentence(call("data", "check", name), message)
