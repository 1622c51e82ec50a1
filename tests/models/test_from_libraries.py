"""Networks of timm and torchvision by name, and initial values from a local file. A stub stands in for both libraries."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fedheal
from fedheal.models import build
from fedheal.simulate.runner import load
from tiny_data import quick


class Network(nn.Module):
    """A small network with the names of a ResNet: its classifier is `fc`, and `fc_norm` is no part of it."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.fc_norm = nn.LayerNorm(16)
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc_norm(torch.relu(self.bn1(self.conv1(x))).mean(dim=(2, 3))))


def create_model(name: str, pretrained: bool, num_classes: int) -> nn.Module:
    assert pretrained is False
    networks: dict[str, Any] = {
        "resnet50": Network,
        "fully_conv": lambda n: nn.Conv2d(3, n, 1),
        "broken": lambda n: 1 / 0,
    }
    network: nn.Module = networks[name.partition(".")[0]](num_classes)
    return network


@pytest.fixture(autouse=True)
def stub_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["resnet50", "fully_conv", "broken"]
    timm, torchvision = ModuleType("timm"), ModuleType("torchvision")
    timm.create_model, timm.list_models = create_model, lambda: names  # type: ignore[attr-defined]
    torchvision.models = SimpleNamespace(  # type: ignore[attr-defined]
        list_models=lambda module: names,
        get_model=lambda name, weights, num_classes: create_model(name, weights is not None, num_classes),
    )
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)


def save_weights(path: Path, model: nn.Module, **changes: Tensor) -> str:
    save_file({**model.state_dict(), **changes}, path)
    return str(path)


@pytest.mark.parametrize("name", ["timm:resnet50", "timm:resnet50.a1_in1k", "torchvision:resnet50"])
def test_a_network_is_cut_in_front_of_its_classifier(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, classes=7).eval()
    torch.manual_seed(0)
    whole, x = Network(7).eval(), torch.randn(2, 3, 8, 8)
    assert model.features(x).shape == (2, model.feature_size) == (2, 16)
    assert torch.equal(model.head(model.features(x)), model(x))
    assert torch.equal(model(x), whole(x))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "timm:resnet51",
            r"there is no model 'resnet51' in timm \(did you mean 'resnet50'\?\); timm.list_models\(\) lists",
        ),
        ("torchvision:vgg", r"there is no model 'vgg' in torchvision; torchvision.models.list_models\(\) lists"),
        ("timm:hf-hub:resnet50", "there is no model 'hf-hub:resnet50' in timm"),  # would be downloaded
        ("timm:", "there is no model '' in timm"),
        ("timm:fully_conv", "the model 'timm:fully_conv' does not end with a linear layer of 3 outputs"),
        ("timm:broken", "the model 'timm:broken' cannot be built: ZeroDivisionError"),
    ],
)
def test_networks_that_cannot_be_had(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        build(name, classes=3)


def test_width_is_not_a_setting_of_a_library() -> None:
    with pytest.raises(ValueError, match=r"^width: the model 'timm:resnet50' has no such setting; leave it out$"):
        build("timm:resnet50", classes=3, width=4)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_is_not_installed(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ValueError,
        match=f"^the model '{library}:resnet18' needs {library}, .*: pip install {library}, or choose another",
    ):
        build(f"{library}:resnet18", classes=3)


# Initial values


def test_weights_are_the_librarys_and_a_head_for_other_classes_stays(tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = Network(5)
    source.bn1.running_mean += 3
    path = save_weights(tmp_path / "w.safetensors", source)
    torch.manual_seed(2)
    fresh = build("timm:resnet50", classes=3)
    torch.manual_seed(2)
    model = build("timm:resnet50", classes=3, weights=path)
    assert all(torch.equal(value, source.state_dict()[key]) for key, value in model.body.state_dict().items())
    assert torch.equal(model.head.weight, fresh.head.weight)
    assert torch.equal(build("timm:resnet50", classes=5, weights=path).head.weight, source.fc.weight)
    again = save_weights(tmp_path / "run.safetensors", model)  # as a run of ours leaves it
    assert torch.equal(build("timm:resnet50", classes=3, weights=again).head.weight, model.head.weight)


def test_weights_of_our_own_models_and_in_half_precision(tmp_path: Path) -> None:
    source = build("small_cnn", classes=10, width=16)
    path = save_weights(tmp_path / "w.safetensors", source.half())
    model = build("small_cnn", classes=4, weights=path, width=16)
    assert model.body[0][0].weight.dtype == torch.float32
    assert torch.equal(model.body[0][0].weight, source.body[0][0].weight.float())
    assert model.head.out_features == 4


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    good, file = Network(3).state_dict(), tmp_path / "w.safetensors"
    old = {key: value for key, value in good.items() if not key.endswith("num_batches_tracked")}
    save_file(old, file)
    build("timm:resnet50", classes=3, weights=str(file))  # files of old networks lack the counters
    for changed, sentence in (
        ({**good, "other": torch.zeros(1)}, "the file has values that the model lacks: body.other; is it of another"),
        (
            {k: v for k, v in good.items() if "conv1" not in k},
            "the file lacks body.conv1.weight; is it of another model",
        ),
        ({**good, "bn1.bias": torch.zeros(8)}, r"body.bn1.bias is torch.float32 of shape \(8,\), but the model has"),
        ({**good, "bn1.bias": torch.zeros(16, dtype=torch.int64)}, "body.bn1.bias is torch.int64"),
        ({**good, "bn1.bias": torch.full((16,), torch.nan)}, "body.bn1.bias has values that are not finite"),
    ):
        save_file(changed, file)
        with pytest.raises(ValueError, match=f"^weights = '{file}': {sentence}"):
            build("timm:resnet50", classes=3, weights=str(file))


def test_files_that_are_not_read(tmp_path: Path) -> None:
    damaged = tmp_path / "w.safetensors"
    damaged.write_bytes(b"\xff" * 100)
    for path, sentence in (
        ("resnet50.pth", "only .safetensors files are read, since others can run code; convert it with"),
        ("nowhere.safetensors", "there is no such file; nothing is downloaded"),
        (str(damaged), "the file cannot be read"),
    ):
        with pytest.raises(ValueError, match=f"^weights = '{path}': {sentence}"):
            build("small_cnn", classes=3, weights=path)


@pytest.mark.parametrize("method", ["fedbn", "moon"])
def test_a_run_starts_from_the_file_and_is_resumed_with_the_same_only(tmp_path: Path, method: str) -> None:
    """FedBN needs the normalisation layers, MOON the features."""
    path = save_weights(tmp_path / "w.safetensors", Network(8))
    experiment = quick(model="timm:resnet50", weights=path, method=method, rounds=1)
    result = fedheal.run(experiment, tmp_path / "run")
    assert result.summary["model_fingerprint"]
    save_weights(Path(path), Network(8))
    with pytest.raises(ValueError, match=r"the model of .* has changed since it was begun"):
        fedheal.run(experiment, tmp_path / "run", resume=True)
    Path(path).unlink()
    loaded = load(tmp_path / "run")  # does not need the initial values
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in result.model.state_dict().items())


def test_an_object_brings_its_own_values() -> None:
    with pytest.raises(
        ValueError, match=r"^weights = '.*w.safetensors': the model is an object; load them into it yourself"
    ):
        fedheal.run(quick(model=Network(3), weights="w.safetensors"))
