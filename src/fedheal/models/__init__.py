"""Models by name, and models of your own.

A model maps a batch of images to logits. The models here also have `features(x)` (pooled, [N, feature_size])
and `head`, with `forward(x) = head(features(x))`. Methods that look at representations (MOON, FedProto, FedProc)
need these; all others accept any `torch.nn.Module`. Initial values depend on torch's global generator alone:
seed it before `build`.

A model of your own is named by import path, "package.module:factory". The factory is called with `classes=` and
the keyword arguments given to `build`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fedheal.core.errors import format_error
from fedheal.core.import_path import import_function
from fedheal.models.resnet import BLOCKS, ResNet, resnet
from fedheal.models.small_cnn import SmallCNN, small_cnn

__all__ = ["MODELS", "ResNet", "SmallCNN", "build", "resnet", "small_cnn"]

Factory = Callable[..., nn.Module]

MODELS: dict[str, Factory] = {
    "small_cnn": small_cnn,
    **{f"resnet{depth}": partial(resnet, depth=depth) for depth in BLOCKS},
}


def build(name: str, classes: int, **kwargs: Any) -> nn.Module:
    """The model of that name for that many classes.

    >>> build("small_cnn", classes=10, width=4).feature_size
    256
    """
    factory = import_function("model", name) if ":" in name else _listed(name)
    try:
        inspect.signature(factory).bind(classes=classes, **kwargs)
    except TypeError as error:
        given = ", ".join(["classes", *kwargs])
        raise ValueError(f"the model {name!r} cannot be built from {given}: {error}") from error
    try:
        model = factory(classes=classes, **kwargs)
    except Exception as error:
        if ":" not in name:
            raise
        raise ValueError(f"the model's factory {name!r} ended with {format_error(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model's factory {name!r} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _listed(name: str) -> Factory:
    if name not in MODELS:
        raise ValueError(
            f"there is no model {name!r}; choose one of {', '.join(MODELS)}, "
            "or name your own factory by import path, 'package.module:factory'"
        )
    return MODELS[name]
