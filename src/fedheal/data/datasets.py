"""The data sets by name, and how a name, a folder or a function becomes a data set."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedheal.core.errors import format_error, suggest
from fedheal.core.import_path import import_function
from fedheal.data.catalogue.digits import DIGITS, DIGITS_FIVE
from fedheal.data.catalogue.image_folders import (
    DOMAINNET,
    DOMAINNET_10,
    OFFICE_CALTECH,
    OFFICE_HOME,
    PACS,
    TERRA_INCOGNITA,
    VLCS,
)
from fedheal.data.domains import Domains, check_domains
from fedheal.data.embedded.dataset import load_embedded
from fedheal.data.on_disk import FOLDER_PREFIX, DataRequest, load_opened, make_folder_spec, open_dataset
from fedheal.data.specs import DatasetSpec

SPECS = {
    spec.name: spec
    for spec in (
        DIGITS, OFFICE_CALTECH, DIGITS_FIVE, PACS, OFFICE_HOME, VLCS, DOMAINNET, DOMAINNET_10, TERRA_INCOGNITA,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Dataset:
    """A named data set.

    Attributes:
        protocol: The default settings of an experiment on it.
        about: One line about it.
    """

    protocol: Mapping[str, Any]
    about: str


_load_embedded_once = functools.cache(load_embedded)  # runs of a process share it; nothing writes to it
DATASETS = {
    "embedded": Dataset(
        {"model": "small_cnn", "rounds": 20, "epochs": 2, "batch_size": 32, "lr": 0.01, "augment": "none"},
        "ten digits in four domains, made offline: handwritten, print, street, display",
    ),
    **{name: Dataset(spec.protocol, spec.about) for name, spec in SPECS.items()},
}


def load_dataset(name: str, request: DataRequest | None = None) -> Domains:
    """Load a data set.

    Args:
        name: A name of `DATASETS`, "folder:PATH", or "package.module:function".
        request: Where it is on disk and what may be missing.

    Returns:
        The data set.

    Raises:
        ValueError: If the data set is unknown, missing or damaged.

    >>> load_dataset("embedded")
    Domains('embedded', 10 classes, train + test images of handwritten: 1287 + 510, ...)
    """
    return find_loader(name, request)()


def find_loader(name: str, request: DataRequest | None = None) -> Callable[[], Domains]:
    """Return the function that loads a data set, without reading an image.

    Args:
        name: As for `load_dataset`.
        request: As for `load_dataset`.

    Raises:
        ValueError: If the data set is unknown or missing.
    """
    request = request or DataRequest()
    if name in SPECS or name.startswith(FOLDER_PREFIX):
        return functools.partial(load_opened, open_dataset(*find_spec(name, request)))
    if request.size is not None and (":" in name or name == "embedded"):
        own = "" if name == "embedded" else ", or resize them in your function"
        raise ValueError(f"image_size = {request.size}: the images of {name!r} are not resized; leave it out{own}")
    if name == "embedded":
        return _load_embedded_once
    if ":" not in name:
        raise ValueError(
            f"there is no data set {name!r}{_suggest_data(name, list(DATASETS))}; choose one of {', '.join(DATASETS)}, "
            f"or use your own image folders as '{FOLDER_PREFIX}PATH', or your own function by its import path "
            '"package.module:function"'
        )
    return functools.partial(check_loaded, name, import_function("data set", name))


def check_loaded(name: str, loader: Callable[[], Any]) -> Domains:
    """Return what a user's function loads. Raise ValueError if it fails, or returns no consistent `Domains`."""
    try:
        data = loader()
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        raise ValueError(f"the data set's function {name!r} raised {format_error(error)}") from error
    if not isinstance(data, Domains):
        raise ValueError(f"{name!r} must return a fedheal.data.domains.Domains, got {type(data).__name__}")
    check_domains(data, name)
    return data


def find_spec(name: str, request: DataRequest | None = None) -> tuple[DatasetSpec, DataRequest]:
    """Return the specification of a data set that is read from disk, and the request to open it with.

    Args:
        name: A name of `SPECS`, or "folder:PATH".
        request: Where it is on disk and what may be missing.

    Raises:
        ValueError: If no data set of that name is read from disk.
    """
    request = request or DataRequest()
    if name.startswith(FOLDER_PREFIX):
        if request.root is not None:
            raise ValueError(f"data_root = {request.root!r}: {name!r} already names the folder; leave data_root out")
        return make_folder_spec(name), replace(request, root=name.removeprefix(FOLDER_PREFIX))
    if name not in SPECS:
        problem = "is not read from disk" if name in DATASETS else f"is no data set{_suggest_data(name, list(SPECS))}"
        raise ValueError(f"data = '{name}' {problem}: use one of {', '.join(SPECS)}, {FOLDER_PREFIX}PATH")
    return SPECS[name], request


def _suggest_data(name: str, known: list[str]) -> str:
    """Return what a name that is no data set's may mean: a folder that is there, or a similar name."""
    is_folder = name.isprintable() and os.path.isdir(os.path.expanduser(name))
    return f" (did you mean data={FOLDER_PREFIX}{name}?)" if is_folder else suggest(name, known)


def get_protocol(name: str) -> dict[str, Any]:
    """Return the default settings of an experiment on a data set; none for one of your own.

    Args:
        name: The data set's name.
    """
    return dict(DATASETS[name].protocol) if name in DATASETS else {}
