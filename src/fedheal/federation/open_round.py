"""The round under way, until it becomes a record."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedheal.core.clock import Clock
from fedheal.federation.cohort import Cohort
from fedheal.federation.replies import EvaluateReply
from fedheal.federation.reply_limits import escape_text
from fedheal.federation.round_summary import summarise_evaluations
from fedheal.methods.server_step import StepOutcome, mean_train_loss
from fedheal.runs.schema import RoundRecord

MAX_REFUSAL = 1000  # characters of why a round is refused; an error of a user's term may quote what a client sent


@dataclass(kw_only=True)
class OpenRound:
    """A round under way."""

    number: int
    asked: Collection[int | str]  # nodes, or clients by name
    num_connected: int
    notes: Mapping[str, Any] = field(default_factory=dict)  # known before the replies; joins the report
    clock: Clock = field(default_factory=Clock)
    cohort: int = field(init=False)  # clients that were asked
    replied: int = 0
    weights: dict[str, float] = field(default_factory=dict)  # of the clients that count
    train_loss: float | None = None
    report: dict[str, Any] = field(default_factory=lambda: {"skipped": {}, "missing": []})
    evaluations: Sequence[EvaluateReply] = ()

    def __post_init__(self) -> None:
        self.cohort = len(self.asked)

    @property
    def is_empty(self) -> bool:
        """Whether clients were asked to train and the model stays as it was."""
        return bool(self.asked) and (not any(self.weights.values()) or "unmoved" in self.report)

    def record_step(
        self, cohort: Cohort, outcome: StepOutcome, problems: Mapping[str, str], missing: Sequence[str]
    ) -> None:
        """Record which clients counted, were skipped (`problems`: before the cohort was built) or did not reply."""
        aggregated, clients = outcome.aggregated, cohort.updates.clients
        skipped = {**problems, **cohort.skipped, **{str(c): str(w) for c, w in aggregated.report["skipped"].items()}}
        self.report = dict(aggregated.report) | {"skipped": skipped, "missing": missing}
        if far_norms := {c: why for c, why in cohort.find_far_norms().items() if c in outcome.accepted}:
            self.report["far_norms"] = far_norms
        if outcome.is_refused:
            self.report["unmoved"] = escape_text(outcome.refusal, MAX_REFUSAL)
        weights = zip(clients, aggregated.weights.tolist(), strict=True)
        # Not by `skipped`: it also has strangers that use the name of a client who counts.
        self.weights = {client: weight for client, weight in weights if client in outcome.accepted}
        self.train_loss = mean_train_loss(cohort.updates, outcome.accepted)

    def log_problems(self, log: logging.Logger) -> None:
        """Warn of every client that was skipped, is far from the others or did not reply."""
        for client, reason in self.report["skipped"].items():
            log.warning("round %d: '%s' is skipped: %s", self.number, client, reason)
        for client, how_far in self.report.get("far_norms", {}).items():
            advice = "max_norm='auto' leaves such out"
            log.warning("round %d: the update of '%s' has %s; %s", self.number, client, how_far, advice)
        if missing := self.report["missing"]:
            log.warning("round %d: no reply from %s", self.number, ", ".join(missing))
        if "unmoved" in self.report:
            log.warning("round %d: the model stays as it was: %s", self.number, self.report["unmoved"])

    def to_record(self, client_domains: Mapping[str, str]) -> RoundRecord:
        """Return the round's record, with the domains of its clients."""
        clients = {*self.weights, *(evaluation.client for evaluation in self.evaluations)}
        return RoundRecord(
            round=self.number,
            cohort=self.cohort,
            replied=self.replied,
            weights=self.weights,
            train_loss=self.train_loss,
            report={**self.report, **self.notes},
            seconds=self.clock.seconds,
            client_domains={client: client_domains[client] for client in sorted(clients & client_domains.keys())},
            **summarise_evaluations(self.evaluations),
        )
