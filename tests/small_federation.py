"""A small federation and its state after some rounds, to compare engines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedheal.simulate.build import build_federation
from fedheal.simulate.federation import Federation
from fedheal.simulate.round import initial_state, run_round
from tiny_data import load, quick

CPU = torch.device("cpu")


def make_federation(method: str = "fedavg", **keys: Any) -> Federation:
    fields: dict[str, Any] = {
        "model": "tiny_data:feature_model",
        "augment": "crop-flip",
        "participation": 0.7,
    }
    if "steps" not in keys:
        fields["epochs"] = 2
    if method in ("fedce", "fedga"):
        fields["validation"] = 0.25
    return build_federation(quick(method=method, rounds=3, **fields | keys), load(), CPU)


def run_rounds(fed: Federation, engine: Any, rounds: int = 2) -> list[Tensor]:
    """Return the state after some rounds and the losses, and restore the module."""
    before = {name: value.clone() for name, value in fed.local_training.module.state_dict().items()}
    state, losses = initial_state(fed), []
    for _ in range(rounds):
        state, record = run_round(fed, state, engine, evaluate=False)
        losses.append(record.train_loss)
    fed.local_training.module.load_state_dict(before)
    arrays, _ = state.to_arrays()
    return [arrays[name] for name in sorted(arrays)] + [torch.tensor(losses, dtype=torch.float64)]
