"""Data sets by name, and data of your own.

A data set is a `Domains`: the same classes in several domains. Those of the paper and some others are read from disk by
name; your own are image folders ("folder:PATH"), or named by import path, "package.module:function", where the function
takes no arguments and returns a `Domains`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedheal.core.errors import format_error, suggest
from fedheal.core.import_path import import_function
from fedheal.data import on_disk as real
from fedheal.data.catalogue.digits import DIGITS, DIGITS_FIVE
from fedheal.data.catalogue.photographs import DOMAINNET, OFFICE_CALTECH, OFFICE_HOME, PACS
from fedheal.data.domains import Domains, check
from fedheal.data.embedded import dataset as embedded
from fedheal.data.on_disk import FOLDER, Wanted
from fedheal.data.specs import Description

__all__ = ["DATASETS", "DESCRIPTIONS", "Dataset", "Wanted", "description", "load", "protocol"]

DESCRIPTIONS = {d.name: d for d in (DIGITS, OFFICE_CALTECH, DIGITS_FIVE, PACS, OFFICE_HOME, DOMAINNET)}


@dataclass(frozen=True)
class Dataset:
    """How to get a data set, and the settings an experiment on it has unless it says otherwise."""

    load: Callable[[Wanted], Domains]
    protocol: Mapping[str, Any]
    about: str


@functools.cache
def _embedded() -> Domains:
    """Drawn once a process: several runs in one process share it, and nobody writes to it."""
    return embedded.load()


DATASETS = {
    "embedded": Dataset(
        lambda _: _embedded(),
        {"model": "small_cnn", "rounds": 20, "epochs": 2, "batch_size": 32, "lr": 0.01, "augment": "none"},
        "ten digits in four domains, made offline: handwritten, print, street, display",
    ),
    **{name: Dataset(functools.partial(real.load, d), d.protocol, d.about) for name, d in DESCRIPTIONS.items()},
}


def load(name: str, wanted: Wanted | None = None) -> Domains:
    """The data set of that name. `wanted` says where it lies, and what may be missing of it."""
    wanted = wanted or Wanted()
    if name.startswith(FOLDER):
        return real.load(*_in_folder(name, wanted))
    if wanted.size is not None and (":" in name or name == "embedded"):
        raise ValueError(f"image_size = {wanted.size}: the images of {name!r} come as they are; leave it out")
    if ":" not in name:
        if name not in DATASETS:
            raise ValueError(
                f"there is no data set {name!r}{suggest(name, list(DATASETS))}; choose one of {', '.join(DATASETS)}, "
                f"name your own image folders as '{FOLDER}PATH', or your own function by import path as "
                '"package.module:function"'
            )
        return DATASETS[name].load(wanted)
    made = import_function("data set", name)
    try:
        found = made()
    except Exception as error:  # whatever somebody's function may raise
        raise ValueError(f"the data set's function {name!r} ended with {format_error(error)}") from error
    if not isinstance(found, Domains):
        raise ValueError(f"{name!r} returned a {type(found).__name__}, not a fedheal.data.domains.Domains")
    check(found, name)
    return found


def description(name: str, wanted: Wanted | None = None) -> tuple[Description, Wanted]:
    """What is known of a data set that is read from disk, and how it is asked for."""
    wanted = wanted or Wanted()
    if name.startswith(FOLDER):
        return _in_folder(name, wanted)
    if name not in DESCRIPTIONS:
        raise ValueError(f"'{name}' is not read from disk; those that are: {', '.join(DESCRIPTIONS)}, {FOLDER}PATH")
    return DESCRIPTIONS[name], wanted


def protocol(name: str) -> dict[str, Any]:
    """The settings that belong to a data set; none for one of your own."""
    return dict(DATASETS[name].protocol) if name in DATASETS else {}


def _in_folder(name: str, wanted: Wanted) -> tuple[Description, Wanted]:
    if wanted.root is not None:
        raise ValueError(f"data_root = {wanted.root!r}: {name!r} says itself where the data lie; leave it out")
    return real.own_folder(name), replace(wanted, root=name.removeprefix(FOLDER))
