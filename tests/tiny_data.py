"""A data set and models so small that a round takes milliseconds; their import paths are "tiny_data:load" and so on."""

from __future__ import annotations

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
# What makes an experiment on them quick; anything may be said otherwise.
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
    """WORDS, without those that `more` says otherwise, and `more`: on a command line each key may stand once."""
    said = {word.partition("=")[0] for word in more}
    return [word for word in WORDS if word.partition("=")[0] not in said] + list(more)


def quick(**keys: Any) -> Experiment:
    return Experiment(**QUICK | keys)


def split(size: int, dim: float, noise: float, seed: int) -> Split:
    """Each class is bright in another part of the image."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % len(CLASSES)
    images = noise * torch.rand(size, 3, SIDE, SIDE, generator=chance)
    for i, label in enumerate(labels.tolist()):
        images[i, :, 2 * label : 2 * label + 3] += 0.5
    return Split((255 * dim * images.clamp(0, 1)).to(torch.uint8), labels)


def load() -> Domains:
    domains = (
        Domain("plain", split(60, 1.0, 0.4, 1), split(TEST["plain"], 1.0, 0.4, 2)),
        Domain("noisy", split(40, 1.0, 1.0, 3), split(TEST["noisy"], 1.0, 1.0, 4)),
        Domain("dark", split(20, 0.3, 0.9, 5), split(TEST["dark"], 0.3, 0.9, 6)),
    )
    return Domains("tiny", CLASSES, domains, tuple(CLIENTS.values()), tuple(SAMPLES.values()))


def told() -> Domains:
    """The same, and who asked for it, into the file that TINY_DATA_TOLD names: process and visible GPUs."""
    with Path(os.environ["TINY_DATA_TOLD"]).open("a") as file:
        file.write(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
    return load()


def uneven() -> Domains:
    """The last domain's images are larger than the others'."""
    *most, dark = load().domains
    larger = [Split(part.images.repeat(1, 1, 2, 2), part.labels) for part in (dark.train, dark.test)]
    return replace(load(), domains=(*most, Domain("dark", *larger)))


def failing() -> Domains:
    return {}["nothing"]  # type: ignore[no-any-return]


def many() -> Domains:
    """A thousand clients of four 32 x 32 images each, in two domains."""

    def half(dim: float, seed: int) -> Split:
        chance = torch.Generator().manual_seed(seed)
        images = torch.randint(0, int(255 * dim), (2000, 3, 32, 32), dtype=torch.uint8, generator=chance)
        return Split(images, torch.arange(2000) % len(CLASSES))

    def few(all_: Split) -> Split:
        return Split(all_.images[:20], all_.labels[:20])

    one, two = half(1.0, 1), half(0.5, 2)
    return Domains("many", CLASSES, (Domain("one", one, few(one)), Domain("two", two, few(two))), (500, 500), (4, 4))


def linear(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, classes))


def broad(classes: int, width: int = 512) -> nn.Module:
    """Many parameters that cost little time, for 32 x 32 images."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, width), nn.ReLU(), nn.Linear(width, classes))


def broad_normed(classes: int, width: int = 512) -> nn.Module:
    """The same, with running means, variances and a counter."""
    layers = list(broad(classes, width))
    return nn.Sequential(*layers[:3], nn.BatchNorm1d(width), *layers[3:])


def normed(classes: int, width: int = 4) -> nn.Module:
    """With running means, variances and a counter."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width * SIDE * SIDE, classes),
    )


class Featured(nn.Module):
    """With `features` and `head`, which methods that look at representations need."""

    def __init__(self, classes: int, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(width * 9, classes)

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


def featured(classes: int) -> nn.Module:
    return Featured(classes)


class Slow(Featured):
    """Each step of training takes as many seconds longer as TINY_DATA_SLEEP says; the numbers are those without."""

    def features(self, x: Tensor) -> Tensor:
        time.sleep(float(os.environ.get("TINY_DATA_SLEEP", "0")) if self.training else 0)
        return super().features(x)


def slow(classes: int) -> nn.Module:
    return Slow(classes, 16)


class Lowered(Featured):
    """In a dtype of its own, whatever that of the images."""

    def __init__(self, classes: int, dtype: torch.dtype) -> None:
        super().__init__(classes)
        self.to(dtype)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x.to(self.head.weight.dtype))


def bfloat16(classes: int) -> nn.Module:
    return Lowered(classes, torch.bfloat16)


def float16(classes: int) -> nn.Module:
    return Lowered(classes, torch.float16)


def dropping(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * SIDE * SIDE, classes))


class Tied(nn.Module):
    """The same square matrix twice, under two names."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.one = nn.Linear(3 * SIDE, 3 * SIDE, bias=False)
        self.two = nn.Linear(3 * SIDE, 3 * SIDE, bias=False)
        self.two.weight = self.one.weight
        self.head = nn.Linear(3 * SIDE, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.two(torch.tanh(self.one(x.mean(dim=3).flatten(1))))))
        return logits


def tied(classes: int) -> nn.Module:
    return Tied(classes)


class Looking(nn.Module):
    """Decides on the host by what it sees, which no graph can."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3 * SIDE * SIDE, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))
        return logits if bool(x.sum() > 0) else 2 * logits


def looking(classes: int) -> nn.Module:
    return Looking(classes)


def narrow(classes: int) -> nn.Module:
    return linear(classes - 1)


def frozen(classes: int) -> nn.Module:
    return linear(classes).requires_grad_(False)


def lazy(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


def empty(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten())


def normed_flat(classes: int) -> nn.Module:
    """Normalises over the images of a batch, of which there must be two."""
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3 * SIDE * SIDE), nn.Linear(3 * SIDE * SIDE, classes))


class Odd(nn.Module):
    """Gives two things, of which neither is asked for, and keeps another."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.inner = linear(classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.inner(x)
        return logits, logits


class Secretive(Odd):
    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


class Auxiliary(Odd):
    """One thing where it is judged, and two in training."""

    def forward(self, x: Tensor) -> Any:
        logits = self.inner(x)
        return (logits, logits) if self.training else logits


class Unpooled(nn.Module):
    """`features` that are maps: `forward` takes their mean, and `head` alone cannot take them."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3, stride=2), nn.Linear(4, classes)

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x).mean(dim=(2, 3)))
        return logits


class Pooling(Unpooled):
    """Likewise, but `head` takes the mean itself: only a method that compares features is led astray."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), self.head)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


class Detached(Odd):
    """Nothing to go back along."""

    def forward(self, x: Tensor) -> Any:
        return self.inner(x).detach()


class Viewing(Odd):
    """Takes images for rows that lie one behind the other, which those of a training batch do not."""

    def forward(self, x: Tensor) -> Any:
        return self.inner[1](x.view(len(x), -1))


def normalised_weights(classes: int) -> nn.Module:
    """torch refuses to copy such a module."""
    return nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(3 * SIDE * SIDE, classes)))


def unable(classes: int) -> nn.Module:
    raise RuntimeError("no weights here")
