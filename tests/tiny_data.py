"""A data set and models so small that a round takes milliseconds; their import paths are "tiny_data:load" and so on."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedheal.data.domains import Domain, Domains, Split
from fedheal.simulate.experiment import Experiment

CLASSES = ("a", "b", "c")
SIDE = 8
TEST = {"plain": 20, "noisy": 15, "dark": 7}
CLIENTS = {"plain": 2, "noisy": 2, "dark": 1}
SAMPLES = {"plain": 24, "noisy": 16, "dark": 13}
# Fields that make an experiment on this data quick.
QUICK: dict[str, Any] = {
    "data": "tiny_data:load",
    "model": "tiny_data:linear",
    "rounds": 3,
    "epochs": 1,
    "batch_size": 8,
    "lr": 0.05,
    "device": "cpu",
}
WORDS = [f"{key}={value}" for key, value in QUICK.items()]


def words(*more: str) -> list[str]:
    """Return WORDS and `more`, which replaces WORDS with the same key: a command line takes each key once."""
    given_keys = {word.partition("=")[0] for word in more}
    return [word for word in WORDS if word.partition("=")[0] not in given_keys] + list(more)


def quick(**keys: Any) -> Experiment:
    fields = QUICK | keys
    if "steps" in keys and "epochs" not in keys:
        del fields["epochs"]
    return Experiment(**fields)


def make_split(size: int, dim: float, noise: float, seed: int) -> Split:
    """Return random images in which each class is bright in another part."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % len(CLASSES)
    images = noise * torch.rand(size, 3, SIDE, SIDE, generator=chance)
    for i, label in enumerate(labels.tolist()):
        images[i, :, 2 * label : 2 * label + 3] += 0.5
    return Split((255 * dim * images.clamp(0, 1)).to(torch.uint8), labels)


def load() -> Domains:
    domains = (
        Domain("plain", make_split(60, 1.0, 0.4, 1), make_split(TEST["plain"], 1.0, 0.4, 2)),
        Domain("noisy", make_split(40, 1.0, 1.0, 3), make_split(TEST["noisy"], 1.0, 1.0, 4)),
        Domain("dark", make_split(20, 0.3, 0.9, 5), make_split(TEST["dark"], 0.3, 0.9, 6)),
    )
    return Domains("tiny", CLASSES, domains, tuple(CLIENTS.values()), tuple(SAMPLES.values()))


def load_and_log() -> Domains:
    """Load the data, and append this process and its visible GPUs to the file TINY_DATA_LOG."""
    with Path(os.environ["TINY_DATA_LOG"]).open("a") as file:
        file.write(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
    return load()


def load_with_seed() -> Domains:
    """Use torch's global generators, which a run in another thread trains with."""
    for _ in range(20):
        torch.manual_seed(0)
        time.sleep(0.001)
    return load()


def uneven() -> Domains:
    """Load the data with larger images in the last domain."""
    *most, dark = load().domains
    larger = [Split(part.images.repeat(1, 1, 2, 2), part.labels) for part in (dark.train, dark.test)]
    return replace(load(), domains=(*most, Domain("dark", *larger)))


def failing() -> Domains:
    return {}["nothing"]  # type: ignore[no-any-return]


def load_many_clients() -> Domains:
    """Load two domains with a thousand clients of four 32 x 32 images each."""

    def make_training_split(dim: float, seed: int) -> Split:
        chance = torch.Generator().manual_seed(seed)
        images = torch.randint(0, int(255 * dim), (2000, 3, 32, 32), dtype=torch.uint8, generator=chance)
        return Split(images, torch.arange(2000) % len(CLASSES))

    def take_test_split(all_: Split) -> Split:
        return Split(all_.images[:20], all_.labels[:20])

    first, second = make_training_split(1.0, 1), make_training_split(0.5, 2)
    return Domains(
        "many",
        CLASSES,
        (Domain("one", first, take_test_split(first)), Domain("two", second, take_test_split(second))),
        (500, 500),
        (4, 4),
    )


def linear(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, classes))


def shaped(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def wide(classes: int, width: int = 512) -> nn.Module:
    """Return a network for 32 x 32 images with many parameters that trains quickly."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, width), nn.ReLU(), nn.Linear(width, classes))


def wide_batchnorm(classes: int, width: int = 512) -> nn.Module:
    """Return `wide` with batch normalisation: running means, variances and a counter."""
    layers = list(wide(classes, width))
    return nn.Sequential(*layers[:3], nn.BatchNorm1d(width), *layers[3:])


def conv_batchnorm(classes: int, width: int = 4) -> nn.Module:
    """Return a convolution with batch normalisation: running means, variances and a counter."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width * SIDE * SIDE, classes),
    )


class FeatureModel(nn.Module):
    """A network with `features` and `head`, which some methods need."""

    def __init__(self, classes: int, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(width * 9, classes)

    def features(self, x: Tensor) -> Tensor:
        maps: Tensor = self.body(x)
        return maps

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


def feature_model(classes: int) -> nn.Module:
    return FeatureModel(classes)


class Slow(FeatureModel):
    """Trains TINY_DATA_SLEEP seconds longer per step, with the same results."""

    def features(self, x: Tensor) -> Tensor:
        time.sleep(float(os.environ.get("TINY_DATA_SLEEP", "0")) if self.training else 0)
        return super().features(x)


def slow(classes: int) -> nn.Module:
    return Slow(classes, 16)


class LowPrecision(FeatureModel):
    """A network with its own dtype."""

    def __init__(self, classes: int, dtype: torch.dtype) -> None:
        super().__init__(classes)
        self.to(dtype)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x.to(self.head.weight.dtype))


def bfloat16(classes: int) -> nn.Module:
    return LowPrecision(classes, torch.bfloat16)


def float16(classes: int) -> nn.Module:
    return LowPrecision(classes, torch.float16)


def dropout(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * SIDE * SIDE, classes))


class TiedWeights(nn.Module):
    """A network that uses one square matrix under two names."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.one = nn.Linear(3 * SIDE, 3 * SIDE, bias=False)
        self.two = nn.Linear(3 * SIDE, 3 * SIDE, bias=False)
        self.two.weight = self.one.weight
        self.head = nn.Linear(3 * SIDE, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.two(torch.tanh(self.one(x.mean(dim=3).flatten(1))))))
        return logits


def tied_weights(classes: int) -> nn.Module:
    return TiedWeights(classes)


class DataDependent(nn.Module):
    """Branches on the values of its input, which no CUDA graph can capture."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3 * SIDE * SIDE, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))
        return logits if bool(x.sum() > 0) else 2 * logits


def data_dependent(classes: int) -> nn.Module:
    return DataDependent(classes)


def one_class_fewer(classes: int) -> nn.Module:
    return linear(classes - 1)


def frozen(classes: int) -> nn.Module:
    return linear(classes).requires_grad_(False)


def lazy(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


def empty(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten())


def flat_batchnorm(classes: int) -> nn.Module:
    """Return a network that normalises over a batch, which must have at least two images."""
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3 * SIDE * SIDE), nn.Linear(3 * SIDE * SIDE, classes))


class TwoOutputs(nn.Module):
    """Returns a tuple instead of logits."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.inner = linear(classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.inner(x)
        return logits, logits


class WithExtraState(TwoOutputs):
    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


class AuxiliaryOutput(TwoOutputs):
    """Returns logits in evaluation, and a tuple in training."""

    def forward(self, x: Tensor) -> Any:
        logits = self.inner(x)
        return (logits, logits) if self.training else logits


class Unpooled(nn.Module):
    """`features` returns maps, which `forward` averages before `head`: `head(features(x))` fails."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3, stride=2), nn.Linear(4, classes)

    def features(self, x: Tensor) -> Tensor:
        maps: Tensor = self.body(x)
        return maps

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x).mean(dim=(2, 3)))
        return logits


class PoolingHead(Unpooled):
    """`features` returns maps, and `head` averages them: only methods that compare features fail."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), self.head)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


class DetachedOutput(TwoOutputs):
    """Returns logits without a gradient."""

    def forward(self, x: Tensor) -> Any:
        return self.inner(x).detach()


class ViewsInput(TwoOutputs):
    """Calls `view` on its input, which fails for batches in channels-last format."""

    def forward(self, x: Tensor) -> Any:
        return self.inner[1](x.view(len(x), -1))


class LeavingModel(TwoOutputs):
    """Ends the process instead of returning logits."""

    def forward(self, x: Tensor) -> Any:
        raise SystemExit(4)


def normalised_weights(classes: int) -> nn.Module:
    """Return a network with `weight_norm`, which torch refuses to copy."""
    return nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(3 * SIDE * SIDE, classes)))


def unable(classes: int) -> nn.Module:
    raise RuntimeError("no weights here")


def leaving(classes: int) -> nn.Module:
    raise SystemExit(3)


def leaving_without_data() -> Domains:
    raise SystemExit
