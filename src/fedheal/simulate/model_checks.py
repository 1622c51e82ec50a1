"""Check that a model can be evaluated and trained on a data set, before anything is written or trained."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from fedheal.core.errors import add_article, format_error
from fedheal.core.layout import Layout
from fedheal.engine.precision import autocast
from fedheal.engine.serial import use_seed


def check_model(module: nn.Module, name: str) -> None:
    """Check what needs no data: sizes, dtypes, and that there is a parameter to train."""
    if any(is_lazy(p) for p in module.parameters()):
        raise ValueError(f"model '{name}' has lazy layers, whose sizes are not set: initialise them first")
    try:
        Layout.of(module)
    except TypeError as error:
        raise ValueError(f"model '{name}' cannot be averaged: {error}") from error
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(f"model '{name}' has no parameter to train")


def check_evaluates(module: nn.Module, name: str, image: Tensor, classes: int) -> None:
    """Check that the model maps one image to the right number of outputs in evaluation mode."""
    was_training = module.training
    try:
        with _keep_random_state(image.device), torch.no_grad(), _explain_failure(name, image):
            logits = module.eval()(image)
    finally:
        module.train(was_training)
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
    """Check that a copy of the model can take a training step on two images; no step is taken.

    `single` is a client whose last batch is a single image; `features` says whether the method uses representations.
    """
    try:
        trial = copy.deepcopy(module)
    except Exception:  # torch's older `weight_norm` cannot be copied: skip the check
        return
    with _keep_random_state(image.device):
        _try_step(trial, name, image.repeat(2, 1, 1, 1), classes, features, precision)
        if single is not None:
            try:
                _try_step(trial, name, image, classes, features, precision)
            except ValueError as error:
                raise ValueError(
                    f"{error}; the last batch of client '{single}' is a single image: use another batch_size"
                ) from error


def _try_step(trial: nn.Module, name: str, images: Tensor, classes: int, features: bool, precision: str) -> None:
    """Run one forward and backward pass like `engine.serial`, without a method's terms."""
    x = images.contiguous(memory_format=torch.channels_last)
    trial.train()
    with _explain_failure(name, x, " in training"), autocast(precision, x.device):
        representations = trial.features(x) if features else None  # type: ignore[operator]
        logits = trial.head(representations) if features else trial(x)  # type: ignore[operator]
    if features and (not isinstance(representations, Tensor) or representations.ndim != 2):
        given = _describe_shape(representations)
        wanted = f"a tensor of shape ({len(x)}, size)"
        raise ValueError(f"`features` of model '{name}' give {given} for {_count_images(len(x))}, not {wanted}")
    _check_logits(name, logits, len(x), classes, " in training")
    with _explain_failure(name, x, " in training"):
        labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        torch.autograd.backward(functional.cross_entropy(logits.to(x.dtype), labels))


def _check_logits(name: str, logits: object, number: int, classes: int, where: str = "") -> None:
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != number:
        wanted = f"a tensor of shape ({number}, {classes})"
        raise ValueError(
            f"model '{name}' gives {_describe_shape(logits)} for {_count_images(number)}{where}, not {wanted}"
        )
    if logits.shape[1] < classes:
        raise ValueError(f"model '{name}' has {logits.shape[1]} outputs{where}, but the data set has {classes} classes")


def _describe_shape(given: object) -> str:
    return str(tuple(given.shape)) if isinstance(given, Tensor) else add_article(type(given).__name__)


def _count_images(number: int) -> str:
    return "one image" if number == 1 else f"{number} images"


@contextmanager
def _explain_failure(name: str, images: Tensor, where: str = "") -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:  # not only the model's fault
        raise
    except (Exception, SystemExit) as error:  # a user's model may raise anything
        shape, reason = tuple(images.shape[1:]), str(error).strip().partition("\n")[0]
        if isinstance(error, SystemExit):  # whose message is an exit code, if anything
            reason = format_error(error)
        raise ValueError(f"model '{name}' does not fit images of shape {shape}{where} ({reason})") from error


@contextmanager
def _keep_random_state(device: torch.device) -> Iterator[None]:
    """Restore torch's random state at the end, and do not benchmark kernels for a step that is never taken."""
    cudnn = torch.backends.cudnn
    before, cudnn.benchmark = cudnn.benchmark, False
    try:
        with use_seed(0, device):
            yield
    finally:
        cudnn.benchmark = before
