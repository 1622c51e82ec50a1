"""Models: sizes known from the literature, one interface, initial values from the seed, clear refusals."""

from __future__ import annotations

import math
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedheal.models import MODELS, ResNet, SmallCNN, build, build_resnet
from fedheal.models.fork import _apply_shortcut

NAMES = ["small_cnn", "resnet10", "resnet12", "resnet18", "resnet20", "resnet34"]


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def own_linear(classes: int, pixels: int = 12) -> nn.Module:
    """A model without `features`, as a user may bring it."""
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, classes))


def own_failure(classes: int) -> nn.Module:
    return {}["weights"]  # type: ignore[no-any-return]


def own_shaped(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return own_linear(num_classes, math.prod(input_shape))


def own_fixed() -> nn.Module:
    return own_linear(3)


def own_mistake(classes: int) -> str:
    return f"{classes} classes"


NOT_A_FUNCTION = 3


def test_the_table_lists_every_model() -> None:
    assert list(MODELS) == NAMES


# 10: 4,903,242 is the count of the published comparison; 18 and 34 are the well-known counts of the CIFAR variants.
# A further block in the first group adds 2 * (9 * 64 * 64 + 2 * 64) = 73,984; in the second 2 * (9 * 128**2 + 256) = 295,424.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet10", 4_903_242),
        ("resnet12", 4_903_242 + 73_984),
        ("resnet18", 11_173_962),
        ("resnet20", 11_173_962 - 73_984 + 295_424 + 1_180_672 + 4_720_640),  # blocks of 64 to 512 channels
        ("resnet34", 21_282_122),
    ],
)
def test_resnet_parameter_counts(name: str, count: int) -> None:
    assert count_parameters(build(name, classes=10)) == count


def test_small_cnn_parameter_count() -> None:
    """Convolutions 27w + 18w^2 + 72w^2, normalisation 2 * 7w, head 64w * classes + classes."""
    for width in (4, 8):
        count = 27 * width + 90 * width**2 + 14 * width + 64 * width * 10 + 10
        assert count_parameters(SmallCNN(10, width=width)) == count


def test_pooling_before_relu_changes_no_bit() -> None:
    """Outputs and gradients equal those of ReLU before pooling."""

    def apply_usual_order(model: SmallCNN, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        for conv, norm, _, _ in model.body:
            x = functional.max_pool2d(functional.relu(norm(conv(x))), 2)
        return model.head(x.flatten(1))

    actual = []
    for apply in (SmallCNN.forward, apply_usual_order):
        torch.manual_seed(0)
        model, x = SmallCNN(10), torch.randn(16, 3, 32, 32)
        logits = apply(model, x)
        functional.cross_entropy(logits, torch.arange(16) % 10).backward()
        actual.append([logits, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(first, second) for first, second in zip(*actual, strict=True))


def test_every_parameter_is_trained() -> None:
    for name in NAMES:
        model = build(name, classes=3, width=2)
        model(torch.randn(4, 3, 32, 32)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters()), name


@pytest.mark.parametrize("name", NAMES)
def test_forward_is_head_of_features(name: str) -> None:
    model = build(name, classes=7, width=4).eval()
    assert isinstance(model, ResNet | SmallCNN)
    x = torch.randn(3, 3, 32, 32)
    features = model.features(x)
    assert features.shape == (3, model.feature_size)
    assert model(x).shape == (3, 7)
    assert torch.equal(model(x), model.head(features))


@pytest.mark.parametrize("size", [32, 40, 64])
def test_other_input_sizes(size: int) -> None:
    for model in (build_resnet(5, width=4), SmallCNN(5, width=4)):
        assert model(torch.randn(2, 3, size, size)).shape == (2, 5)


def test_resnet_takes_the_sizes_of_both_comparisons() -> None:
    model = build_resnet(10, width=2).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 192, 192)).shape == (1, 10)
        assert model.groups(model.stem(torch.randn(1, 3, 32, 32))).shape == (1, 16, 4, 4)  # strides 1, 2, 2, 2


def test_small_cnn_refuses_small_images() -> None:
    remedies = (
        "set image_size=32 for images on disk, resize those of your own function or Domains, or use another model"
    )
    message = f"^small_cnn needs images of at least 32 x 32 pixels, got 16 x 20: {remedies}$"
    with pytest.raises(ValueError, match=message):
        SmallCNN(10)(torch.randn(1, 3, 16, 20))


def test_width_and_channels() -> None:
    assert build_resnet(10, width=16).feature_size == 128
    assert SmallCNN(10, width=4).feature_size == 4 * 4 * 16
    assert SmallCNN(10, width=4, channels=1)(torch.randn(2, 1, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("name", ["small_cnn", "resnet10"])
def test_initial_values_depend_on_the_seed_alone(name: str) -> None:
    def get_initial_values(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(build(name, classes=10, width=4).parameters())

    assert torch.equal(get_initial_values(0), get_initial_values(0))
    assert not torch.equal(get_initial_values(0), get_initial_values(1))


def test_a_factory_by_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_importable(monkeypatch)
    model = build("own_models:own_linear", classes=4, pixels=27)
    assert model(torch.randn(2, 3, 3, 3)).shape == (2, 4)
    model = build("own_models:own_shaped", classes=4, input_shape=(3, 5, 5))  # as for Experiment(model=own_shaped)
    assert model(torch.randn(2, 3, 5, 5)).shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "kwargs", "sentence"),
    [
        (
            "resnet11",
            {},
            r"there is no model 'resnet11' \(did you mean 'resnet1\d'\?\); choose one of small_cnn, resnet10",
        ),
        ("resnet10", {"size": 3}, "the model 'resnet10' cannot be built from classes, size: .*'size'"),
        ("no_such_package:make", {}, "the model 'no_such_package:make' cannot be imported: ModuleNotFoundError"),
        (":make", {}, "the model ':make' cannot be imported"),
        (
            "own_models:missing",
            {},
            "the model 'own_models:missing' cannot be imported: 'own_models' has no function 'missing'$",
        ),
        (
            "own_models:NOT_A_FUNCTION",
            {},
            "the model 'own_models:NOT_A_FUNCTION' cannot be imported: 'NOT_A_FUNCTION' is an? .*, not a function",
        ),
        (
            "own_models:own_mistake",
            {},
            "the model's factory 'own_models:own_mistake' returned a str, not a torch.nn.Module",
        ),
        (
            "own_models:own_fixed",
            {},
            "the model 'own_models:own_fixed' cannot be built from classes: .* 'classes'; its function needs a parameter "
            "`classes` or `num_classes`, the number of classes$",
        ),
        (
            "own_models:own_shaped",
            {},
            "the model 'own_models:own_shaped' cannot be built from num_classes: .*'input_shape'$",
        ),
        (
            "own_models:own_linear",
            {"width": 3},
            "the model 'own_models:own_linear' cannot be built from classes, width: .*'width'$",
        ),
        ("own_models:own_failure", {}, "the model's factory 'own_models:own_failure' raised KeyError: 'weights'"),
    ],
)
def test_refusals_are_sentences(
    monkeypatch: pytest.MonkeyPatch, name: str, kwargs: dict[str, int], sentence: str
) -> None:
    _make_importable(monkeypatch)
    with pytest.raises(ValueError, match=f"^{sentence}") as error:
        build(name, classes=10, **kwargs)
    assert not str(error.value).endswith(".")


def test_unknown_depth() -> None:
    with pytest.raises(ValueError, match=r"^depth = 50: there is no such ResNet; use one of 10, 12, 18, 20, 34$"):
        build_resnet(10, depth=50)


def _make_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the factories of this file be imported as `own_models`."""
    module = ModuleType("own_models")
    for thing in ("own_linear", "own_failure", "own_shaped", "own_mistake", "own_fixed", "NOT_A_FUNCTION"):
        setattr(module, thing, globals()[thing])
    monkeypatch.setitem(sys.modules, "own_models", module)


@pytest.mark.parametrize("inputs", [2, 15, 16])
def test_a_narrow_shortcut_is_the_convolution_that_it_stands_for(inputs):
    conv = nn.Conv2d(inputs, 2 * inputs, 1, stride=2, bias=False)
    x = torch.randn(3, inputs, 9, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    actual = _apply_shortcut(conv, x)
    plain = functional.conv2d(x.double(), conv.weight.double(), stride=2)
    torch.testing.assert_close(actual.double(), plain, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(plain)
    (ours,) = torch.autograd.grad(actual, x, upstream.float())
    (theirs,) = torch.autograd.grad(plain, x, upstream)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_narrow_networks_train_on_a_cpu():
    """In a process of its own: what this guards against corrupts memory, and ends the process sooner or later."""
    code = (
        "import torch\n"
        "from fedheal.models import build\n"
        "module = build('resnet10', 10, width=8)\n"
        "for _ in range(40):\n"
        "    x = torch.rand(3, 3, 32, 32).contiguous(memory_format=torch.channels_last)\n"
        "    torch.nn.functional.cross_entropy(module(x), torch.arange(3)).backward()\n"
        "print('trained')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
