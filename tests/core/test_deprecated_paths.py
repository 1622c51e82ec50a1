"""Old import paths work for one release, and say where their names are now."""

from __future__ import annotations

import importlib

import pytest

import fedheal
from fedheal.core.deprecated_paths import MOVED

# What README, docs and examples of version 0.1 showed.
SHOWN = {
    "fedheal.aggregate.flaws": ["BadUpdate"],
    "fedheal.aggregate.server": ["Server"],
    "fedheal.aggregate.stages": ["STAGES"],
    "fedheal.data": ["load"],
    "fedheal.engine.serial": ["Bench", "Training", "seeded"],
    "fedheal.execute": ["run"],
    "fedheal.experiment": ["Experiment", "build", "module_of"],
    "fedheal.recipes": ["RECIPES", "Options", "paper", "planned"],
    "fedheal.flower.client": ["judged", "name_of", "received"],
    "fedheal.records": ["read_rounds", "states"],
    "fedheal.report.diagnose": ["diagnose", "lines", "sentences"],
    "fedheal.rng": ["generator"],
    "fedheal.run": ["Callback", "Federation"],
    "fedheal.statistics": ["compare_all", "seeds_needed", "verdict"],
    "fedheal.track": ["MLflow", "TensorBoard", "Wandb", "tracker"],
}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in SHOWN.items() for name in names])
def test_an_old_path_still_works(path: str, name: str) -> None:
    if path not in MOVED and name in vars(importlib.import_module(path)):
        return  # it has not moved
    with pytest.warns(DeprecationWarning, match=f"{name} is now fedheal\\."):
        assert getattr(importlib.import_module(path), name) is not None


def test_from_imports_work_and_the_function_run_stays_a_function() -> None:
    with pytest.warns(DeprecationWarning, match=r"fedheal\.simulate\.federation"):
        from fedheal.run import Federation
    from fedheal.simulate.federation import Federation as moved

    assert Federation is moved
    from fedheal import records

    with pytest.warns(DeprecationWarning, match=r"fedheal\.runs\.folder"):
        assert callable(records.read_rounds)
    assert callable(fedheal.run)


def test_a_name_that_never_was_is_an_attribute_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from fedheal.records import nothing  # noqa: F401


def test_every_entry_leads_somewhere() -> None:
    for module, renamed in MOVED.values():
        importlib.import_module(module)
        for target in renamed.values():
            path, _, name = target.rpartition(":")
            assert hasattr(importlib.import_module(path or module), name), target
