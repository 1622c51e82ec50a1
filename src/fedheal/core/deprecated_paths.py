"""Import paths of version 0.1, which work for one more release with a DeprecationWarning."""

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

# Old module -> the module that a name is in now, and the names that changed: "new_name" or "module:new_name".
MOVED: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "fedheal.aggregate.flaws": ("fedheal.aggregate.validate", {}),
    "fedheal.aggregate.server": ("fedheal.aggregate.server_optimizer", {}),
    "fedheal.aggregate.stages": (
        "fedheal.aggregate.registry",
        {
            "Stage": "fedheal.aggregate.stage:Stage",
            "afl": "fedheal.aggregate.weights.afl:afl_weights",
            "chain": "fedheal.aggregate.stage:chain",
            "directions": "fedheal.aggregate.masks.sign_agreement:sign_agreement_report",
            "fael": "fedheal.aggregate.fedheal_stages:fael_weights",
            "fael_exact": "fedheal.aggregate.weights.exact:exact_weights",
            "fedheal": "fedheal.aggregate.fedheal_stages:fedheal_stage",
            "fphl": "fedheal.aggregate.fedheal_stages:fphl_mask",
            "qffl": "fedheal.aggregate.weights.qffl:qffl_weights",
            "uniform": "fedheal.aggregate.weights.uniform:uniform_weights",
        },
    ),
    "fedheal.execute": ("fedheal.simulate.runner", {}),
    "fedheal.experiment": (
        "fedheal.simulate.experiment",
        {"build": "fedheal.simulate.build:build_federation", "module_of": "fedheal.simulate.build:build_module"},
    ),
    "fedheal.recipes": (
        "fedheal.reproduce",
        {"Entry": "RecipeRow", "paper": "fedheal.reproduce:paper", "planned": "plan_recipe", "suffix": "make_suffix"},
    ),
    "fedheal.recipes.paper": ("fedheal.reproduce.paper", {}),
    "fedheal.records": (
        "fedheal.runs.folder",
        {
            "BadState": "CheckpointError",
            "alone": "fedheal.runs.lock:hold_lock",
            "cut_rounds": "truncate_rounds",
            "load_state": "load_checkpoint",
            "lock": "fedheal.runs.lock:acquire_lock",
            "save_state": "save_checkpoint",
            "states": "list_checkpoints",
        },
    ),
    "fedheal.rng": ("fedheal.core.rng", {}),
    "fedheal.run": (
        "fedheal.simulate.round",
        {"Callback": "fedheal.simulate.callbacks:Callback", "Federation": "fedheal.simulate.federation:Federation"},
    ),
    "fedheal.statistics": ("fedheal.analysis.paired_tests", {}),
    "fedheal.track": ("fedheal.tracking", {}),
}


class MovedModule(ModuleType):
    """Stand in for a module that has moved: warn when a name is taken from it, and take it from its new place."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module, renamed = MOVED[self.__name__]
        return _take(f"{self.__name__}.{name}", module, renamed.get(name, name))


def warn_of_renames(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module whose names have changed: old name -> "new_name" or "module:new_name"."""

    def getattribute(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return _take(f"{module}.{name}", module, renamed[name])

    return getattribute


def _take(old_path: str, module: str, new_name: str) -> Any:
    target, _, attribute = (new_name if ":" in new_name else f"{module}:{new_name}").partition(":")
    try:
        value = getattr(importlib.import_module(target), attribute)
    except AttributeError:
        raise AttributeError(f"{old_path} is gone: {target} has no attribute {attribute!r}") from None
    message = f"{old_path} is now {target}.{attribute}; the old path goes with the next release"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return value


def install() -> None:
    """Make the old paths importable. A path that exists as a module is left alone."""
    for path in MOVED:
        sys.modules.setdefault(path, MovedModule(path))
