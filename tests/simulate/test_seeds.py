"""The seeds of an experiment's three sources of chance: `split_seed`, `init_seed` and `batch_seed`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedheal
from fedheal.core.rng import SEED_FIELDS, SOURCES
from fedheal.engine import serial
from tiny_data import quick
from tiny_runs import get_model_bytes, make_federation, run

# A source of chance of every kind.
KEYS: dict[str, Any] = {"model": "tiny_data:dropout", "participation": 0.6, "dropout": 0.3, "augment": "crop-flip"}
KEYS |= {"method": "fedavg", "rounds": 2, "validation": 0.25, "dirichlet": 0.5}


def record_draws(monkeypatch: pytest.MonkeyPatch, **keys: Any) -> dict[str, list[Tensor]]:
    """Run an experiment; return what chance decided, by its source."""
    drawn: list[Tensor] = []

    def record_batches(*arguments: Any, plan: Any = serial.plan_batches) -> Any:
        for order, choices, last in plan(*arguments):
            drawn.extend([order, *(choice for choice in choices if choice is not None)])
            yield order, choices, last

    def record_layers(seed: int, device: torch.device, use: Any = serial.use_seed) -> Any:
        drawn.append(torch.tensor(seed))
        return use(seed, device)

    with monkeypatch.context() as patch:
        patch.setattr(serial, "plan_batches", record_batches)
        patch.setattr(serial, "use_seed", record_layers)
        history = run(**keys).history
    built = make_federation(**keys)
    splits = [*built.local_training.examples.values(), *built.validation.values()]
    cohorts = [torch.tensor([client in record.weights for client in built.clients]) for record in history]
    return {
        "split": [tensor for split in splits for tensor in (split.images, split.labels)],
        "init": list(built.local_training.module.state_dict().values()),
        "batch": drawn + cohorts,
    }


def are_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_seed_changes_its_own_source_of_chance_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    before = record_draws(monkeypatch, **KEYS)
    assert len(before["batch"]) > 20
    for changed in SOURCES:
        after = record_draws(monkeypatch, **KEYS, **{f"{changed}_seed": 7})
        equal = {source: are_equal(before[source], after[source]) for source in SOURCES}
        assert equal == {source: source != changed for source in SOURCES}


def test_three_equal_seeds_are_that_seed_and_each_changes_the_result() -> None:
    whole, parts = run(seed=7, **KEYS), run(seed=3, **dict.fromkeys(SEED_FIELDS, 7), **KEYS)
    assert get_model_bytes(whole.model) == get_model_bytes(parts.model)
    models = [get_model_bytes(run(seed=7, **{field: 8}, **KEYS).model) for field in SEED_FIELDS]
    assert all(model != get_model_bytes(whole.model) for model in models)


def test_a_run_records_the_seeds_that_were_set_and_no_others(tmp_path: Path) -> None:
    for name, seeds in (("plain", {}), ("split", {"split_seed": 0, "batch_seed": 2})):
        folder = tmp_path / name
        summary = fedheal.run(quick(rounds=1, **seeds), folder, progress=False).summary
        for fields in (summary, tomllib.loads((folder / "experiment.toml").read_text())):
            assert {key: value for key, value in fields.items() if "seed" in key} == {"seed": 0} | seeds


def test_names_hold_the_seeds_that_were_set() -> None:
    assert quick(method="fedavg", seed=2).folder_name == "fedavg-tiny_data_load-seed2"
    crossed = quick(method="fedavg", split_seed=4, batch_seed=0)
    assert crossed.folder_name == "fedavg-tiny_data_load-seed0-split4-batch0"
    assert crossed.run_name.startswith("fedavg-tiny_data_load-seed0-split4-batch0_")
    assert "split_seed" not in crossed.run_name
    assert crossed.identity != quick(method="fedavg").identity


def test_a_wrong_seed_is_named() -> None:
    with pytest.raises(ValueError, match="init_seed = -1"):
        quick(init_seed=-1)
    with pytest.raises(ValueError, match="split_seed = True: use a whole number"):
        quick(split_seed=True)
