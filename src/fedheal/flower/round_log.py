"""What the strategy keeps of clients and of the round that is under way, beside the state, and the record it becomes."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedheal.aggregate import Aggregated
from fedheal.flower.intake import Cohort
from fedheal.flower.judging import Judged
from fedheal.flower.node_registry import Asked, Heard
from fedheal.runs.schema import RoundRecord

log = logging.getLogger("flwr.fedheal")


@dataclass
class Known:
    """What the strategy remembers of clients beside the state: JSON in the checkpoint."""

    federation: str = field(default_factory=lambda: secrets.token_hex(8))  # whose clients' memories are meant
    accepted: dict[str, int] = field(default_factory=dict)  # the last round in which its update counted
    client_domains: dict[str, str] = field(default_factory=dict)  # its domain
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

    def note(self, arrived: Sequence[Heard], cohort: Cohort, out: Aggregated, known: Known) -> list[str]:
        """Keep who counted, who was left out and who never answered, here and of the clients; those who counted."""
        troubled = {one.client: one.trouble for one in arrived if one.trouble is not None}
        skipped = troubled | cohort.skipped | {str(c): str(why) for c, why in out.report["skipped"].items()}
        for client, why in skipped.items():
            log.warning("round %d: '%s' is left out: %s", self.number, client, why)
        answered = {one.node for one in arrived}
        missing = sorted(name for node, name in self.asked.nodes.items() if node not in answered)
        if missing:
            log.warning("round %d: no reply from %s", self.number, ", ".join(missing))
        self.report = dict(out.report) | {"skipped": skipped, "missing": missing}
        self.weights = dict(zip(cohort.updates.clients, out.weights.tolist(), strict=True))
        taken = [client for client in cohort.updates.clients if client not in skipped]
        losses = [cohort.read[c].metrics.get("train_loss", math.nan) for c in taken]
        sound = [loss for loss in losses if math.isfinite(loss)]
        self.train_loss = sum(sound) / len(sound) if sound else None
        known.looks |= cohort.looks
        known.accepted |= dict.fromkeys(taken, self.number)
        known.client_domains |= {one.client: one.domain for one in arrived if one.client in taken}
        return taken

    def record(self, client_domains: Mapping[str, str]) -> RoundRecord:
        """What stays of it. `client_domains`: the domains of all clients; those of this round's go along."""
        there = sorted({*self.weights, *(one.client for one in self.judged)} & client_domains.keys())
        return RoundRecord(
            round=self.number,
            cohort=len(self.asked.nodes),
            replied=self.replied,
            weights=self.weights,
            train_loss=self.train_loss,
            report=self.report,
            seconds=self.clock.seconds,
            **Judged.together(self.judged),
            client_domains={client: client_domains[client] for client in there},
        )
