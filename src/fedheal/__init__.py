"""fedheal: fair federated learning under domain skew, for PyTorch.

Public names are imported when they are first used: `import fedheal` is quick, and so is `fedheal --help`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fedheal.core import deprecated_paths
from fedheal.version import __version__

if TYPE_CHECKING:
    from fedheal import aggregate, methods
    from fedheal.core.layout import Layout, Packed
    from fedheal.core.updates import Reply, Updates
    from fedheal.methods import Method
    from fedheal.simulate.callbacks import Callback
    from fedheal.simulate.experiment import Experiment
    from fedheal.simulate.runner import Result, load, run

__all__ = [
    "Callback",
    "Experiment",
    "Layout",
    "Method",
    "Packed",
    "Reply",
    "Result",
    "Updates",
    "__version__",
    "aggregate",
    "load",
    "methods",
    "run",
]

# Public name -> the module that has it. Packages are names of their own.
_MODULES = {
    "Callback": "simulate.callbacks",
    "Experiment": "simulate.experiment",
    "Layout": "core.layout",
    "Method": "methods",
    "Packed": "core.layout",
    "Reply": "core.updates",
    "Result": "simulate.runner",
    "Updates": "core.updates",
    "load": "simulate.runner",
    "run": "simulate.runner",
}
_PACKAGES = frozenset({"aggregate", "data", "engine", "local", "methods", "models", "runs", "simulate"})

if not TYPE_CHECKING:  # a type checker would take any name for a public one

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return importlib.import_module(f"fedheal.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'fedheal' has no attribute {name!r}")
        globals()[name] = value = getattr(importlib.import_module(f"fedheal.{_MODULES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


deprecated_paths.install()
