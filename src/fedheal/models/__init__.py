"""Models by name, and models of your own.

A model maps a batch of images to logits. The models here also have `features(x)` (pooled, [N, feature_size]) and `head`, with
`forward(x) = head(features(x))`, which methods that use representations need (MOON, FedProto, FedProc, FPL); all others accept
any `torch.nn.Module`. Initial values depend on torch's global generator alone: seed it before `build`.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fedheal.core.errors import format_error, suggest
from fedheal.core.import_path import import_function
from fedheal.models.resnet import BLOCKS, ResNet, build_resnet
from fedheal.models.small_cnn import SmallCNN

__all__ = ["MODELS", "ResNet", "SmallCNN", "build", "build_resnet"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "small_cnn": SmallCNN,
    **{f"resnet{depth}": partial(build_resnet, depth=depth) for depth in BLOCKS},
}


def build(name: str, classes: int, **kwargs: Any) -> nn.Module:
    """Build a model.

    Args:
        name: A key of `MODELS`, or the import path of your own factory, "package.module:factory".
        classes: The number of outputs.
        **kwargs: Further arguments of the factory, e.g. `width`.

    Returns:
        The model, with initial values from torch's global generator.

    Raises:
        ValueError: If there is no such model, or its factory does not accept the arguments, fails, or returns no module.

    >>> build("small_cnn", classes=10, width=4).feature_size
    256
    """
    if ":" not in name and name not in MODELS:
        raise ValueError(
            f"there is no model {name!r}{suggest(name, list(MODELS))}; choose one of {', '.join(MODELS)}, "
            "or name your own factory by import path, 'package.module:factory'"
        )
    factory = import_function("model", name) if ":" in name else MODELS[name]
    try:
        inspect.signature(factory).bind(classes=classes, **kwargs)
    except TypeError as error:
        arguments = ", ".join(["classes", *kwargs])
        raise ValueError(f"the model {name!r} cannot be built from {arguments}: {error}") from error
    try:
        model = factory(classes=classes, **kwargs)
    except Exception as error:
        if ":" not in name:
            raise
        raise ValueError(f"the model's factory {name!r} raised {format_error(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model's factory {name!r} returned a {type(model).__name__}, not a torch.nn.Module")
    return model
