"""Networks of timm and torchvision by name, `timm:resnet50` or `torchvision:resnet18`, where these libraries are installed.

The library builds the network for the data set's number of classes, without its pretrained values: nothing is downloaded. Its
last linear layer becomes `head`, and what comes before it `body`, so methods that use representations work with it, too.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from torch import Tensor, nn

from fedheal.core.errors import format_error, suggest
from fedheal.models.pretrained import load_weights, read_weights

LIBRARIES = ("timm", "torchvision")


class LibraryModel(nn.Module):
    """A network of a library, with `forward(x) = head(features(x))`."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body, self.head = body, head
        self.feature_size = head.in_features

    def features(self, x: Tensor) -> Tensor:
        """Return the features of images, `[N, feature_size]`."""
        features: Tensor = self.body(x)
        return features

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images, `[N, classes]`."""
        logits: Tensor = self.head(self.features(x))
        return logits


def is_library_name(name: str) -> bool:
    """Return whether a model's name is that of a library's network rather than an import path."""
    return name.partition(":")[0] in LIBRARIES


def build_library_model(name: str, classes: int, weights: str | None = None) -> LibraryModel:
    """Build a network of a library; `weights` is a safetensors file with the library's names of values."""
    library, _, network = name.partition(":")
    try:
        module = importlib.import_module(library)
    except Exception as error:  # a torchvision of another torch raises all kinds of errors
        raise ValueError(
            f"the model {name!r} needs {library}, which cannot be imported ({format_error(error)}): "
            f"pip install {library}, or choose another model"
        ) from error
    _check_name(library, network, module)
    try:
        whole = _create(library, network, module, classes)
    except Exception as error:  # of the library
        raise ValueError(f"the model {name!r} cannot be built: {format_error(error)}") from error
    path, head = _find_classifier(whole, name, classes)
    parent, _, attribute = path.rpartition(".")
    setattr(whole.get_submodule(parent), attribute, nn.Identity())
    model = LibraryModel(whole, head)
    if weights is not None:
        values = read_weights(weights)
        if not all(key.startswith(("body.", "head.")) for key in values):  # not of a run of ours
            values = {
                f"head{key.removeprefix(path)}" if key.startswith(f"{path}.") else f"body.{key}": value
                for key, value in values.items()
            }
        load_weights(model, values, weights)
    return model


def _check_name(library: str, network: str, module: Any) -> None:
    """Raise ValueError unless the library has such a network. Names with a prefix such as hf-hub: would download."""
    names = module.list_models() if library == "timm" else module.models.list_models(module=module.models)
    if not re.fullmatch(r"[\w.]+", network) or network.partition(".")[0] not in names:
        raise ValueError(
            f"there is no model {network!r} in {library}{suggest(network, list(names))}; "
            f"{'timm' if library == 'timm' else 'torchvision.models'}.list_models() lists those that there are"
        )


def _create(library: str, network: str, module: Any, classes: int) -> nn.Module:
    if library == "timm":
        whole: nn.Module = module.create_model(network, pretrained=False, num_classes=classes)
    else:
        whole = module.models.get_model(network, weights=None, num_classes=classes)
    return whole


def _find_classifier(whole: nn.Module, name: str, classes: int) -> tuple[str, nn.Linear]:
    """Return the last linear layer of a network, and its path."""
    linear = [(path, part) for path, part in whole.named_modules() if isinstance(part, nn.Linear)]
    if not linear or linear[-1][1].out_features != classes:
        raise ValueError(
            f"the model {name!r} does not end with a linear layer of {classes} outputs: choose another, or write a factory "
            "'package.module:factory' for it"
        )
    return linear[-1]
