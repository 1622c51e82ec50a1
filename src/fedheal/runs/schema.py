"""The fields of `rounds.jsonl` and `result.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Settings that change no result, so that a resumed run may differ in them.
FREE = frozenset({"name", "workers", "lanes", "save_seconds", "data_root"})


@dataclass(frozen=True)
class RoundRecord:
    """What a round leaves behind: a line of `rounds.jsonl`. Accuracies (percent) are there in evaluated rounds."""

    round: int
    cohort: int  # clients asked
    replied: int
    weights: Mapping[str, float]
    train_loss: float | None
    report: Mapping[str, Any]  # the aggregator's
    seconds: Mapping[str, float]  # train, aggregate, evaluate
    domains: Mapping[str, float] | None = None
    clients: Mapping[str, float] | None = None
    fairness: Mapping[str, float] | None = None
    client_fairness: Mapping[str, float] | None = None
    validation: Mapping[str, float] | None = None  # per domain, on examples held out of its clients' training data
