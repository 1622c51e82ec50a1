"""Data and models that an experiment is given as Python objects instead of names.

The file of an experiment cannot hold an object. It has a description, "name@fingerprint": another object has another one, so
a run is resumed with the same object only.
"""

import copy
import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from types import CodeType
from typing import Any

import torch
from torch import nn

from fedheal.core.errors import add_article, format_error, name_callable, name_value
from fedheal.core.layout import Layout
from fedheal.data.datasets import check_loaded
from fedheal.data.domains import Domains, fingerprint
from fedheal.data.on_disk import FOLDER_PREFIX
from fedheal.simulate.model_checks import check_model

# What may be given as data and as a model.
REMEDIES = {
    "data": "give a data set's name, a Domains, or a function that returns one",
    "model": "give a model's name, a torch.nn.Module, or a function that builds one",
}
DESCRIPTION = re.compile(r".+@[0-9a-f]{12}")


@dataclass(frozen=True)
class DataObject:
    """A data set that is given as a `Domains`, or by a function that returns one."""

    description: str
    domains: Domains = field(repr=False, compare=False)


@dataclass(frozen=True)
class ModelObject:
    """A model that is given as a module, whose values every run starts from, or as a function that builds one."""

    description: str
    source: nn.Module | Callable[..., Any] = field(repr=False, compare=False)

    def build(self, classes: int, shape: tuple[int, ...] | None, **keys: Any) -> nn.Module:
        """Return a copy of the module, or what the function makes of `(num_classes[, input_shape])`.

        The first argument is the number of classes. One called `input_shape`, or a second one without a default, is the shape
        of an image, such as (3, 32, 32).
        """
        if isinstance(self.source, nn.Module):
            if keys:
                raise ValueError(f"width = {keys['width']}: the model {self.description} is a module; leave it out")
            return copy.deepcopy(self.source)
        parameters = inspect.signature(self.source).parameters
        others = [p for name, p in parameters.items() if name != "input_shape" and name not in keys]
        required = [
            p for p in others if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        arguments = (classes, shape)[: max(len(required), min(len(others), 1))]
        named = keys | ({"input_shape": shape} if "input_shape" in parameters else {})
        try:
            module = self.source(*arguments, **named)
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise ValueError(f"the model's function {self.description!r} raised {format_error(error)}") from error
        if not isinstance(module, nn.Module):
            returned = f"returned {add_article(type(module).__name__)}"
            raise ValueError(f"the model's function {self.description!r} {returned}, not a torch.nn.Module")
        return module


def wrap_objects(values: Mapping[str, Any]) -> dict[str, DataObject | ModelObject]:
    """Return the objects among the fields `data` and `model`, with their descriptions.

    Raises:
        ValueError: A field is of another type, a function that should return data fails, the data are inconsistent, or the
            module cannot be copied.
    """
    for key, remedy in REMEDIES.items():
        value = values.get(key, "")
        if key == "data" and isinstance(value, PathLike):
            raise ValueError(f"data is a path, {str(value)!r}: give your image folders as '{FOLDER_PREFIX}{value}'")
        if not isinstance(value, str | bool | DataObject | ModelObject | Domains) and not callable(value):
            raise ValueError(f"{name_value(key, value)}: {remedy}")
    found: dict[str, DataObject | ModelObject] = {}
    data, model = values.get("data"), values.get("model")
    if isinstance(data, DataObject | Domains) or callable(data):
        found["data"] = _wrap_data(data)
    if isinstance(model, ModelObject) or callable(model):
        found["model"] = _wrap_model(model)
    return found


def check_is_name(key: str, name: str) -> None:
    """Raise ValueError if a field has the description of an object where a run needs the object."""
    if DESCRIPTION.fullmatch(name):
        raise ValueError(f"{key} = {name!r} describes a Python object: run it in Python, with Experiment({key}=...)")


def fingerprint_module(module: nn.Module) -> str:
    """Return the SHA-256 of a module's structure, values and code, other than PyTorch's own."""
    layout = Layout.of(module)
    packed = layout.pack(module.state_dict())
    structure = re.sub(r"0x[0-9a-f]+", "", repr(module))  # without addresses, which no other process has
    classes = {type(part) for part in module.modules() if not type(part).__module__.startswith("torch.")}
    code = sorted(_read_code(kind) for kind in classes)
    digest = hashlib.sha256(f"{structure} {layout.entries} {code}".encode())
    for vector in (packed.params, packed.buffers, packed.counters):
        digest.update(vector.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _wrap_data(given: DataObject | Domains | Callable[[], Any]) -> DataObject:
    if isinstance(given, DataObject):
        return given
    if isinstance(given, Domains):
        domains = check_loaded(given.name, lambda: given)
    else:
        domains = check_loaded(_name_function(given), given)
    # The images alone do not say how they are divided among clients.
    known = fingerprint(domains)
    text = f"{known} {tuple(domains.clients_per_domain)} {tuple(domains.samples_per_client)}"
    return DataObject(_describe(domains.name, text), replace(domains, identity=known))


def _wrap_model(given: Any) -> ModelObject:
    if isinstance(given, ModelObject):
        return given
    if not isinstance(given, nn.Module):
        name = _name_function(given)
        return ModelObject(_describe(name, f"{name} {_read_code(given)}"), given)
    name = type(given).__name__
    check_model(given, name)
    try:
        kept = copy.deepcopy(given)  # the caller may train the module
    except Exception as error:  # a module may refuse to be copied in any way
        raise ValueError(f"model '{name}' cannot be copied ({format_error(error)}): give a function instead") from error
    return ModelObject(_describe(name, fingerprint_module(kept)), kept)


def _read_code(thing: Any) -> str:
    """Return the source of a function or class, or its bytecode where there is no source, as at a prompt."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        parts = [getattr(thing, "func", thing), *(vars(thing).values() if isinstance(thing, type) else ())]
        code = [_describe_code(part.__code__) for part in parts if inspect.isfunction(part)]
        return f"{code} {getattr(thing, 'args', '')} {getattr(thing, 'keywords', '')}"  # the latter of a partial


def _describe_code(code: CodeType) -> str:
    constants = [_describe_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _name_function(function: Any) -> str:
    function = getattr(function, "func", function)  # of a functools.partial
    return name_callable(function).replace("<locals>.", "")


def _describe(name: str, text: str) -> str:
    return f"{name}@{hashlib.sha256(text.encode()).hexdigest()[:12]}"
