"""Whether a model can be judged and trained on a data set, asked before anything is written or trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from fedheal.core.layout import Layout
from fedheal.engine.precision import autocast
from fedheal.engine.serial import use_seed


def check_model(module: nn.Module, name: str) -> None:
    """What no data are needed for."""
    if any(is_lazy(p) for p in module.parameters()):
        raise ValueError(f"model '{name}' has layers whose sizes are not said (lazy ones): first values need them")
    try:
        Layout.of(module)
    except TypeError as error:
        raise ValueError(f"model '{name}' cannot be averaged: {error}") from error
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(f"model '{name}' has no parameter to train")


def check_judges(module: nn.Module, name: str, image: Tensor, classes: int) -> None:
    """One image through the model as it is judged."""
    was = module.training
    try:
        with _aside(image.device), torch.no_grad(), _said(name, image):
            logits = module.eval()(image)
    finally:
        module.train(was)
    _check_logits(name, logits, 1, classes)


def check_trains(
    module: nn.Module,
    name: str,
    image: Tensor,
    classes: int,
    single: str | None = None,
    features: bool = False,
    precision: str = "fp32",
) -> None:
    """Two images forwards and backwards through a copy of the model, as a step of training goes; no step is taken.

    `single` is a client whose last batch is a single image, `features` whether the method looks at representations.
    """
    try:
        trial = copy.deepcopy(module)
    except Exception:  # as with torch's older `weight_norm`: nothing to try it on, and no reason to refuse it
        return
    with _aside(image.device):
        _try(trial, name, image.repeat(2, 1, 1, 1), classes, features, precision)
        if single is not None:
            try:
                _try(trial, name, image, classes, features, precision)
            except ValueError as error:
                raise ValueError(
                    f"{error}; the last batch of client '{single}' is a single image: another batch_size would help"
                ) from error


def _try(trial: nn.Module, name: str, images: Tensor, classes: int, features: bool, precision: str) -> None:
    """The way of `engine.serial.train_step`, without a method's terms."""
    x = images.contiguous(memory_format=torch.channels_last)
    trial.train()
    with _said(name, x, " in training"), autocast(precision, x.device):
        found = trial.features(x) if features else None  # type: ignore[operator]
        logits = trial.head(found) if features else trial(x)  # type: ignore[operator]
    if features and (not isinstance(found, Tensor) or found.ndim != 2):
        raise ValueError(
            f"`features` of model '{name}' give {_shape(found)} for {_images(len(x))}, not a tensor of shape ({len(x)}, size)"
        )
    _check_logits(name, logits, len(x), classes, " in training")
    with _said(name, x, " in training"):
        labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        torch.autograd.backward(functional.cross_entropy(logits.to(x.dtype), labels))


def _check_logits(name: str, logits: object, number: int, classes: int, where: str = "") -> None:
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != number:
        wanted = f"a tensor of shape ({number}, {classes})"
        raise ValueError(f"model '{name}' gives {_shape(logits)} for {_images(number)}{where}, not {wanted}")
    if logits.shape[1] < classes:
        raise ValueError(f"model '{name}' tells {logits.shape[1]} classes apart{where}, and the data have {classes}")


def _shape(given: object) -> str:
    return str(tuple(given.shape)) if isinstance(given, Tensor) else f"a {type(given).__name__}"


def _images(number: int) -> str:
    return "one image" if number == 1 else f"{number} images"


@contextmanager
def _said(name: str, images: Tensor, where: str = "") -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:  # not the model's fault alone
        raise
    except Exception as error:  # whatever somebody's model may raise
        shape, reason = tuple(images.shape[1:]), str(error).strip().partition("\n")[0]
        raise ValueError(f"model '{name}' does not fit images of shape {shape}{where} ({reason})") from error


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """Leaves torch's random numbers as they were, and does not look for the fastest kernels for a step never taken."""
    cudnn = torch.backends.cudnn
    before, cudnn.benchmark = cudnn.benchmark, False
    try:
        with use_seed(0, device):
            yield
    finally:
        cudnn.benchmark = before
