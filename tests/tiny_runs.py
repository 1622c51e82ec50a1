"""Runs on the tiny data, and what tests compare of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import fedheal
from fedheal import Packed
from fedheal.runs.schema import RoundRecord
from fedheal.simulate.build import build_federation
from fedheal.simulate.federation import Federation
from fedheal.simulate.runner import Result
from tiny_data import load, quick

IDS = ["dark-0", "noisy-0", "noisy-1", "plain-0", "plain-1"]


def run(**keys: Any) -> Result:
    return fedheal.run(quick(**keys), progress=False)


def get_model_bytes(module: torch.nn.Module) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in module.state_dict().items()}


def drop_seconds(history: Sequence[RoundRecord]) -> list[dict[str, Any]]:
    return [{key: value for key, value in vars(record).items() if key != "seconds"} for record in history]


def make_federation(**keys: Any) -> Federation:
    return build_federation(quick(**keys), load(), torch.device("cpu"))


def is_same(first: Packed, second: Packed) -> bool:
    """Return whether two models have the same bits."""
    return all(torch.equal(getattr(first, f), getattr(second, f)) for f in ("params", "buffers", "counters"))


class Stop(fedheal.Callback):
    """Stops a run after its second round."""

    def round(self, record: RoundRecord) -> None:
        if record.round == 2:
            raise KeyboardInterrupt
