"""The second version: it reads, trains and judges as the protocol says, and agrees with the package where both are exact."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import layouts
from fedheal import data
from fedheal.models import build
from fedheal.reproduce import RECIPES
from fedheal.runs.schema import RoundRecord

ROOT = Path(__file__).parents[2]
# With fewer than 16 channels torch's convolutions on a CPU can write beyond their memory (see models/resnet.py).
QUICK = ("--device", "cpu", "--width", "16", "--epochs", "1", "--rounds", "2")


@pytest.fixture
def second_version(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    module = importlib.import_module("second_version")
    monkeypatch.setattr(module, "SIZES", {"mnist": 8, "usps": 2, "svhn": 8, "syn_standin": 3})
    return module


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "data"
    layouts.digits(folder)
    return folder


@pytest.fixture
def prepared_file(second_version, data_folder, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDHEAL_CACHE", str(tmp_path / "cache"))
    Path("data").symlink_to(data_folder)
    assert second_version.main(["prepare", "data", "second.npz"]) == 0
    return tmp_path / "second.npz"


def run(second, prepared, *words):
    assert second.main(["run", str(prepared), "--out", "out", *QUICK, *words]) == 0
    (path,) = Path("out").iterdir()
    record = json.loads(path.read_text())
    path.unlink()
    return record


def test_it_shares_no_code_with_the_package():
    text = (ROOT / "tools" / "second_version.py").read_text(encoding="utf-8")
    assert "import fedheal" not in text
    assert "from fedheal" not in text


def to_planes(images):
    """Return images as three planes of integers that can be subtracted."""
    planes = np.repeat(images[:, None], 3, axis=1) if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    return planes.astype(np.int64)


def test_both_read_the_same_pixels_and_labels(prepared_file):
    arrays = np.load(prepared_file)
    for domain in data.load_dataset("digits", data.DataRequest(str(prepared_file.parent / "data"))).domains:
        nearly = 1 if domain.name == "usps" else 0  # reals, of which one version rounds and the other cuts
        test, train = to_planes(arrays[f"{domain.name}_test_x"]), to_planes(arrays[f"{domain.name}_x"])
        assert np.abs(test - domain.test.images.numpy()).max() <= nearly
        assert np.array_equal(arrays[f"{domain.name}_test_y"], domain.test.labels.numpy())
        differences = np.abs(train[:, None] - domain.train.images.numpy()[None].astype(np.int64)).max(axis=(2, 3, 4))
        assert differences.min(axis=1).max() <= nearly
        assert len(set(differences.argmin(axis=1))) == len(train)  # no image twice
        assert np.array_equal(arrays[f"{domain.name}_y"], domain.train.labels.numpy()[differences.argmin(axis=1)])


def test_both_have_the_same_network(second_version):
    ours, theirs = build("resnet10", 10), second_version.Network(64)
    assert sum(p.numel() for p in theirs.parameters()) == 4_903_242
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.copy_(mine)
    images = torch.rand(4, 3, 32, 32)
    for mode in (True, False):  # batch statistics, then the running ones that they left
        ours.train(mode)
        theirs.train(mode)
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-5)


def test_a_step_is_that_of_torch(second_version):
    """Momentum and weight decay as torch.optim.SGD has them, with the same gradients."""
    torch.manual_seed(0)
    trainer = second_version.Trainer(16, "cpu")
    twin = second_version.Network(16)
    twin.load_state_dict(trainer.network.state_dict())
    optimiser = torch.optim.SGD(
        twin.parameters(), second_version.LR, second_version.MOMENTUM, weight_decay=second_version.DECAY
    )
    x, y = torch.rand(6, 3, 32, 32), torch.arange(6)
    for _ in range(3):
        trainer.step(x, y)
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = twin(x)
        torch.nn.functional.cross_entropy(logits.float(), y).backward()
        optimiser.step()
    for mine, other in zip(trainer.params, twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


def test_shifts_are_within_four_pixels_with_black_around(second_version):
    x = torch.full((64, 3, 32, 32), 255, dtype=torch.uint8)
    (batch,) = (
        inputs for inputs, _ in second_version._make_batches(x, torch.arange(64), 1, torch.Generator().manual_seed(0))
    )
    black = (batch - second_version._scale(torch.zeros(1, 3, 1, 1, dtype=torch.uint8))).abs().amax(dim=1) < 1e-6
    rows, columns = black.all(dim=2).sum(dim=1), black.all(dim=1).sum(dim=1)
    assert set(rows.tolist()) == set(columns.tolist()) == {0, 1, 2, 3, 4}


@pytest.mark.slow
def test_a_record_has_the_accuracies_of_every_round(second_version, prepared_file):
    record = run(second_version, prepared_file, "--weights", "uniform")
    assert (record["weights"], record["seed"], record["split"], record["width"]) == ("uniform", 0, 7, 16)
    assert [[*line] for line in record["rounds"]] == [["mnist", "usps", "svhn", "syn_standin"]] * 2


@pytest.mark.slow
def test_a_run_is_repeatable_and_seeds_and_weights_matter(second_version, prepared_file, monkeypatch):
    monkeypatch.setattr(
        second_version, "_evaluate", lambda trainer, x, y: float(sum(v.abs().sum() for v in trainer.floats))
    )
    choices = [("uniform", "0"), ("uniform", "0"), ("uniform", "1"), ("size", "0")]
    first, again, *others = [
        run(second_version, prepared_file, "--weights", w, "--seed", seed)["rounds"] for w, seed in choices
    ]
    assert first == again
    assert first[0] != first[1]
    assert first not in others
    assert others[0] != others[1]


def test_the_average_is_by_weights(second_version, prepared_file, monkeypatch):
    """Where client k's training ends at the constant k, the model is the weighted mean of the constants."""
    ends: list[float] = []

    def train_to_constant(trainer, x, y):
        ends.append(float(len(ends)))
        for value in trainer.floats:
            value.fill_(ends[-1])

    seen = {}
    monkeypatch.setattr(second_version.Trainer, "step", train_to_constant)
    monkeypatch.setattr(
        second_version, "_evaluate", lambda trainer, x, y: seen.setdefault("mean", float(trainer.floats[0].mean()))
    )
    run(second_version, prepared_file, "--weights", "size", "--rounds", "1")
    sizes = np.repeat([8, 2, 8, 3], 5)
    assert seen.pop("mean") == pytest.approx((sizes * np.arange(20)).sum() / sizes.sum())
    ends.clear()
    run(second_version, prepared_file, "--weights", "uniform", "--rounds", "1")
    assert seen["mean"] == pytest.approx(9.5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "nowhere", "x.npz"], "No such file or directory (nowhere/digits/mnist/"),
        (["run", "nowhere.npz"], "No such file or directory (nowhere.npz)"),
        (["run", "junk.npz"], "junk.npz is not what prepare makes"),
        (["run", "other.npz"], "other.npz is not what prepare makes: it has no mnist_test_x"),
        (["run", "second.npz", "--rounds", "0"], "rounds = 0: use 1 or more"),
        (["run", "second.npz", "--seconds", "0"], "seconds = 0: use a positive number"),
        (
            ["run", "second.npz", "--out", "there"],
            "size-seed0.json is there already: remove it, or name another folder",
        ),
        (["run", "empty.npz"], "empty.npz is not what prepare makes"),
        (["run", "few.npz"], "few.npz is not what prepare makes: usps has not 10 images and labels"),
        (["prepare", "data", "nowhere/x.npz"], "nowhere/x.npz: there is no folder nowhere"),
        (["prepare", "cut", "x.npz"], "mnist: its files cannot be read (EOFError: "),
    ],
)
def test_bad_input_is_one_sentence(second_version, prepared_file, capsys, words, message):
    Path("junk.npz").write_text("junk")
    np.savez("other.npz", split=7)
    Path("empty.npz").touch()
    arrays = dict(np.load(prepared_file))
    np.savez("few.npz", **arrays | {"usps_x": arrays["usps_x"][:3]})
    Path("there").mkdir()
    Path("there/size-seed0.json").write_text("{}")
    shutil.copytree("data", "cut")
    images = Path("cut/digits/mnist/train-images-idx3-ubyte.gz")
    images.write_bytes(images.read_bytes()[:-200])
    capsys.readouterr()
    assert second_version.main(words + (["--device", "cpu"] if words[0] == "run" else [])) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_too_few_images_are_refused(second_version, prepared_file, monkeypatch, capsys):
    monkeypatch.setattr(second_version, "SIZES", second_version.SIZES | {"usps": 600})
    assert second_version.main(["prepare", "data", "x.npz"]) == 2
    assert "usps: 30 training images, but the clients need 3000" in capsys.readouterr().err
    assert not Path("x.npz").exists()


@pytest.fixture
def page_tool(tmp_path, monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    (tmp_path / "second-version").mkdir()
    return importlib.import_module("results_page")


def make_record(**keys):
    rounds = [{"mnist": float(number)} for number in range(1, 26)]
    whole = {"weights": "size", "seed": 0, "split": 7, "width": 64, "epochs": 10, "hardware": "GPU", "rounds": rounds}
    return whole | keys


def test_its_rounds_stand_beside_as_many_of_ours(page_tool, tmp_path):
    (tmp_path / "second-version" / "size-seed0.json").write_text(json.dumps(make_record()))
    (tmp_path / "second-version" / "uniform-seed0.json").write_text(json.dumps(make_record(weights="uniform")))
    entries = {entry.label: entry for entry in RECIPES["headline"].list_rows("digits")}

    class Ours:
        entry, is_full, experiment = entries["FedAvg"], True, type("", (), {"seed": 3})
        records = tuple(RoundRecord(round=number, domains={"mnist": 2.0 * number}) for number in range(1, 201))

    seconds = page_tool.read_second_runs(tmp_path)
    assert [second.row for second in seconds] == ["FedAvg", "uniform weights"]
    assert page_tool.tabulate_second_runs(seconds, [Ours()], ["mnist"]) == [
        ["FedAvg", "20", "second version, seed 0", "18.0"],
        ["", "", "ours, seed 3", "36.0"],
        ["", "", "second version less the mean of ours", "-18.0"],
        ["FedAvg", "25", "second version, seed 0", "23.0"],
        ["", "", "ours, seed 3", "46.0"],
        ["", "", "second version less the mean of ours", "-23.0"],
        ["uniform weights", "20", "second version, seed 0", "18.0"],
        ["uniform weights", "25", "second version, seed 0", "23.0"],
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"weights": "half"}, "weights must be 'size' or 'uniform', got 'half'"),
        ({"seed": "0"}, "seed must be a whole number, got '0'"),
        ({"split": True}, "split must be a whole number, got True"),
        ({"width": 4}, "width must be 64, got 4"),
        ({"epochs": 1}, "epochs must be 10, got 1"),
        ({"rounds": [{"mnist": 1.0}] * 4}, "rounds must have at least 5 items"),
        ({"rounds": [{"mnist": 1.0}] * 5 + [{"usps": 1.0}]}, "rounds must all have the same domains"),
        ({"rounds": [{"mnist": "x"}] * 5}, "rounds.0.mnist must be a number, got 'x'"),
    ],
)
def test_a_record_that_is_none_is_named(page_tool, tmp_path, keys, message):
    path = tmp_path / "second-version" / "size-seed0.json"
    path.write_text(json.dumps(make_record(**keys)))
    with pytest.raises(ValueError, match=r"size-seed0\.json") as error:
        page_tool.read_second_runs(tmp_path)
    assert message in str(error.value)
