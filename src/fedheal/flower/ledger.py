"""What the strategy keeps of clients and of the round that is under way, beside the state."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from fedheal.flower.identity import Asked
from fedheal.flower.judging import Judged


@dataclass
class Known:
    """What the strategy remembers of clients beside the state: JSON in the checkpoint."""

    federation: str = field(default_factory=lambda: secrets.token_hex(8))  # whose clients' memories are meant
    accepted: dict[str, int] = field(default_factory=dict)  # the last round in which its update counted
    homes: dict[str, str] = field(default_factory=dict)  # its domain
    looks: dict[str, str] = field(default_factory=dict)  # of what its local terms last told the server
    tests: dict[str, float] = field(default_factory=dict)  # examples it last judged with
    nodes: dict[str, str] = field(default_factory=dict)  # node -> client: with node keys ids outlive a run


class Clock:
    """Seconds from one lap to the next."""

    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.seconds = dict.fromkeys(("train", "aggregate", "evaluate"), 0.0)

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase], self.last = now - self.last, now


@dataclass
class Round:
    """A round while it goes on."""

    number: int
    asked: Asked
    connected: frozenset[int]
    size: int = 0  # bytes sent to all nodes
    clock: Clock = field(default_factory=Clock)
    replied: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    train_loss: float | None = None
    report: dict[str, Any] = field(default_factory=lambda: {"skipped": {}, "missing": []})
    judges: Asked = field(default_factory=lambda: Asked({}))
    judged: list[Judged] = field(default_factory=list)
