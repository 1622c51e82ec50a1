"""Models by name, and models of your own.

A model maps a batch of images to logits. The models here also have `features(x)` (pooled, [N, feature_size]) and
`head`, with `forward(x) = head(features(x))`. Methods that use representations need both (MOON, FedProto, FedProc, FPL,
FCCL+). All others accept any `torch.nn.Module`. Initial values depend on torch's global generator alone: seed it before
`build`.
"""

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fedheal.core.errors import add_article, format_error, suggest
from fedheal.core.import_path import import_function, is_importable
from fedheal.models.from_libraries import build_library_model, is_library_name
from fedheal.models.pretrained import load_weights, read_weights
from fedheal.models.resnet import BLOCKS, ResNet, build_resnet
from fedheal.models.small_cnn import SmallCNN

__all__ = ["MODELS", "ResNet", "SmallCNN", "build", "build_resnet", "is_import_path"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "small_cnn": SmallCNN,
    **{f"resnet{depth}": partial(build_resnet, depth=depth) for depth in BLOCKS},
}


def is_import_path(name: str) -> bool:
    """Return whether a model's name is the import path of a user's own factory.

    Args:
        name: The name, as `build` takes it.
    """
    return ":" in name and not is_library_name(name)


def build(
    name: str, classes: int, weights: str | None = None, input_shape: tuple[int, ...] | None = None, **kwargs: Any
) -> nn.Module:
    """Build a model.

    Args:
        name: A key of `MODELS`, a network of a library that is installed ("timm:resnet50", "torchvision:resnet18"), or the
            import path of your own factory, "package.module:factory".
        classes: The number of outputs, which your own factory takes as `classes` or `num_classes`.
        weights: A safetensors file of initial values; its `head` is left out if it is for another number of classes.
        input_shape: The shape of an image, for a factory of your own that has a parameter of this name.
        **kwargs: Further arguments of the factory, e.g. `width`.

    Returns:
        The model, with initial values from torch's global generator, unless `weights` are given.

    Raises:
        ValueError: There is no such model, or its library is not installed. Its factory does not accept the arguments,
            fails, or returns no module. The weights do not fit.

    >>> build("small_cnn", classes=10, width=4).feature_size
    256
    """
    if ":" not in name and name not in MODELS:
        raise ValueError(
            f"there is no model {name!r}{_suggest_model(name)}; choose one of {', '.join(MODELS)}, one of a library "
            "as 'timm:NAME' or 'torchvision:NAME', or name your own factory by import path, 'package.module:factory'"
        )
    if is_library_name(name):
        if kwargs:
            raise ValueError(f"{', '.join(kwargs)}: the model {name!r} has no such setting; leave it out")
        return build_library_model(name, classes, weights)
    factory = import_function("model", name) if ":" in name else MODELS[name]
    parameters = inspect.signature(factory).parameters
    count = "num_classes" if "num_classes" in parameters and "classes" not in parameters else "classes"
    arguments = {count: classes, **kwargs}
    if input_shape is not None and "input_shape" in parameters:
        arguments["input_shape"] = input_shape
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        needed = "; its function needs a parameter `classes` or `num_classes`, the number of classes"
        remedy = "" if _takes(factory, count) else needed
        raise ValueError(f"the model {name!r} cannot be built from {', '.join(arguments)}: {error}{remedy}") from error
    try:
        model = factory(**arguments)
    except (Exception, SystemExit) as error:
        if ":" not in name:
            raise
        raise ValueError(f"the model's factory {name!r} raised {format_error(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"the model's factory {name!r} returned {add_article(type(model).__name__)}, not a torch.nn.Module"
        )
    if weights is not None:
        load_weights(model, read_weights(weights), weights)
    return model


def _takes(factory: Callable[..., Any], name: str) -> bool:
    """Return whether a factory can be given an argument of this name."""
    parameters = inspect.signature(factory).parameters.values()
    return any(
        p.kind == p.VAR_KEYWORD or (p.name == name and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        for p in parameters
    )


def _suggest_model(name: str) -> str:
    """Return what a name that is no model's may mean: an import path without its colon, or a similar name."""
    module, dot, function = name.rpartition(".")
    if dot and re.fullmatch(r"\w+(\.\w+)*", name) and is_importable(module):
        return f" (did you mean '{module}:{'factory' if function == 'py' else function}'?)"
    return suggest(name, list(MODELS))
