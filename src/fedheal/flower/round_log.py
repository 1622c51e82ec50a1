"""What the strategy keeps about clients beside the run's state, and about the round under way until it becomes a record."""

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedheal.core.clock import Clock
from fedheal.federation.cohort import Cohort
from fedheal.federation.replies import EvaluateReply
from fedheal.federation.round_summary import summarise_evaluations
from fedheal.federation.run_folder import KnownClients
from fedheal.flower.node_registry import OpenRequests, ReceivedReply
from fedheal.methods.server_step import StepOutcome, mean_train_loss
from fedheal.runs.schema import RoundRecord

log = logging.getLogger("flwr.fedheal")


@dataclass
class FederationState(KnownClients):
    """What the strategy remembers about its clients."""

    federation: str = field(default_factory=lambda: secrets.token_hex(8))  # an id that clients save their state under
    tokens: dict[str, str] = field(default_factory=dict)  # of clients that keep a state; see `client_state`
    message_digests: dict[str, str] = field(default_factory=dict)  # of the last messages of its local terms
    nodes: dict[str, str] = field(default_factory=dict)  # node -> client: with node keys, ids outlive a run
    restarted: int = 0  # see `RoundInstructions`

    def find_lost_states(self, received: Iterable[ReceivedReply]) -> dict[str, int]:
        """Return the clients that continued from another state than that of their last accepted round, and its round.

        The client itself may not know: a new node that lost the client's token is told nothing about the client.
        """
        states = ((r.client, r.state_round) for r in received if r.problem is None)
        return {c: n for c, n in states if n is not None and c in self.accepted and n != self.accepted[c]}


def restore_federation(**saved: Any) -> FederationState:
    """Return the state that a checkpoint holds."""
    saved.setdefault("tokens", dict.fromkeys(saved["accepted"], ""))  # of a version without tokens
    return FederationState(**saved)


@dataclass
class OpenRound:
    """A round under way."""

    number: int
    requests: OpenRequests
    connected: frozenset[int]
    bytes_sent: int = 0  # to all nodes
    notes: dict[str, Any] = field(default_factory=dict)  # known before the replies; joins the report
    clock: Clock = field(default_factory=Clock)
    cohort: int = field(init=False)  # clients that were asked
    replied: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    train_loss: float | None = None
    report: dict[str, Any] = field(default_factory=lambda: {"skipped": {}, "missing": []})
    evaluation_requests: OpenRequests = field(default_factory=lambda: OpenRequests({}))
    evaluations: list[EvaluateReply] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cohort = len(self.requests.nodes)

    @property
    def is_empty(self) -> bool:
        """Whether clients were asked to train and the model stays as it was."""
        return bool(self.requests.nodes) and (not any(self.weights.values()) or "unmoved" in self.report)

    def record_training(
        self, received: Sequence[ReceivedReply], cohort: Cohort, outcome: StepOutcome, federation: FederationState
    ) -> None:
        """Record which clients counted, were skipped or did not reply, in the round and in the federation's state."""
        aggregated, accepted = outcome.aggregated, outcome.accepted
        problems = {reply.client: reply.problem for reply in received if reply.problem is not None}
        skipped = problems | cohort.skipped | {str(c): str(why) for c, why in aggregated.report["skipped"].items()}
        for client, reason in skipped.items():
            log.warning("round %d: '%s' is skipped: %s", self.number, client, reason)
        far_norms = cohort.find_far_norms()
        for client, how_far in far_norms.items():
            log.warning(
                "round %d: the update of '%s' has %s; max_norm='auto' leaves such out", self.number, client, how_far
            )
        asked, heard = self.requests.nodes, {reply.node for reply in received}
        self.replied = len({reply.node for reply in received if not reply.message.has_error()} & asked.keys())
        # A name that has moved to another node counts once.
        names_heard = {reply.client for reply in received if reply.problem is None}
        unheard = {node: name for node, name in asked.items() if node not in heard}
        missing = sorted(name for name in unheard.values() if name not in names_heard)
        self.cohort = len(asked) - len(unheard) + len(missing)
        if missing:
            log.warning("round %d: no reply from %s", self.number, ", ".join(missing))
        self.report = dict(aggregated.report) | {"skipped": skipped, "missing": missing}
        if far_norms:
            self.report["far_norms"] = far_norms
        self._record_lost_states(received, outcome, federation)
        if outcome.is_refused:
            log.warning("round %d: the model stays as it was: %s", self.number, outcome.refusal)
            self.report["unmoved"] = outcome.refusal
        self.weights = dict(zip(cohort.updates.clients, aggregated.weights.tolist(), strict=True))
        self.train_loss = mean_train_loss(cohort.updates, accepted)
        federation.message_digests |= cohort.message_digests
        federation.accepted |= dict.fromkeys(outcome.absorbed, self.number)
        federation.tokens |= {
            reply.client: reply.token for reply in received if reply.client in outcome.absorbed and reply.token
        }
        federation.client_domains |= {reply.client: reply.domain for reply in received if reply.client in accepted}

    def _record_lost_states(
        self, received: Sequence[ReceivedReply], outcome: StepOutcome, federation: FederationState
    ) -> None:
        lost = {}
        for client, number in federation.find_lost_states(received).items():
            start = f"continued with that of round {number}" if number else "continued without one"
            lost[client] = f"it has no state of round {federation.accepted[client]}, its last accepted one, and {start}"
        effect = "; the sums over all clients' controls begin anew, and every client discards its own"
        for client, what in lost.items():
            log.warning("round %d: '%s': %s%s", self.number, client, what, effect if outcome.is_restarted else "")
        if lost:
            self.report["lost_states"] = lost
        if outcome.is_restarted:
            federation.restarted = self.number

    def to_record(self, client_domains: Mapping[str, str]) -> RoundRecord:
        """Return the round's record, with the domains of its clients."""
        clients = {*self.weights, *(evaluation.client for evaluation in self.evaluations)}
        return RoundRecord(
            round=self.number,
            cohort=self.cohort,
            replied=self.replied,
            weights=self.weights,
            train_loss=self.train_loss,
            report=self.report | self.notes,
            seconds=self.clock.seconds,
            client_domains={client: client_domains[client] for client in sorted(clients & client_domains.keys())},
            **summarise_evaluations(self.evaluations),
        )
