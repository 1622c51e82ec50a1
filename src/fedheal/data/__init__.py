"""Data sets by name, and data of your own.

A data set is a `Domains`: the same classes in several domains. Those of the paper and some others are read from disk by name.
Your own are image folders ("folder:PATH") or a function without arguments that returns a `Domains` ("package.module:function").

Public names are imported when they are first used: a worker process needs `domains` and `augment` alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedheal.core.deprecated_paths import warn_of_renames

if TYPE_CHECKING:
    from fedheal.data.datasets import DATASETS, SPECS, Dataset, find_loader, find_spec, get_protocol, load_dataset
    from fedheal.data.on_disk import DataRequest

__all__ = ["DATASETS", "SPECS", "DataRequest", "Dataset", "find_loader", "find_spec", "get_protocol", "load_dataset"]

_RENAMED = {
    "DESCRIPTIONS": "SPECS", "Wanted": "DataRequest", "description": "find_spec", "load": "load_dataset",
    "protocol": "get_protocol",
}  # fmt: skip
_find_renamed = warn_of_renames(__name__, _RENAMED)

if not TYPE_CHECKING:  # a type checker would take any name for a public one

    def __getattr__(name: str) -> Any:
        if name in {*__all__, "Domains", "check_loaded"}:
            return getattr(importlib.import_module("fedheal.data.datasets"), name)
        return _find_renamed(name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
