"""Data sets by name, and data of your own.

A data set is a `Domains`: the same classes in several domains. One of your own is named by import path,
"package.module:function"; the function takes no arguments and returns a `Domains`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fedheal.data import embedded
from fedheal.data.domains import Domains, check

__all__ = ["DATASETS", "Dataset", "load", "protocol"]


@dataclass(frozen=True)
class Dataset:
    """How to get a data set, and the settings an experiment on it has unless it says otherwise."""

    load: Callable[[], Domains]
    protocol: Mapping[str, Any]
    about: str


DATASETS = {
    "embedded": Dataset(
        embedded.load,
        {"model": "small_cnn", "rounds": 20, "epochs": 2, "batch_size": 32, "lr": 0.01, "augment": "none"},
        "ten digits in four domains, made offline: handwritten, print, street, display",
    )
}


def load(name: str) -> Domains:
    """The data set of that name."""
    if ":" not in name:
        if name not in DATASETS:
            raise ValueError(
                f"there is no data set {name!r}; choose one of {', '.join(DATASETS)}, or name your own function "
                'by import path as "package.module:function"'
            )
        return _named(name)
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"the data set {name!r} cannot be imported: {error}") from error
    if not isinstance(found, Domains):
        raise ValueError(f"{name!r} returned a {type(found).__name__}, not a fedheal.data.domains.Domains")
    check(found, name)
    return found


@cache
def _named(name: str) -> Domains:
    """Read once a process: several runs in one process share it, and nobody writes to it."""
    return DATASETS[name].load()


def protocol(name: str) -> dict[str, Any]:
    """The settings that belong to a data set; none for one of your own."""
    return dict(DATASETS[name].protocol) if name in DATASETS else {}
