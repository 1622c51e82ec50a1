"""What the strategy keeps about clients beside the run's state, and about the round under way until it becomes a record."""

import logging
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedheal.federation.cohort import Cohort
from fedheal.federation.open_round import OpenRound
from fedheal.federation.run_folder import KnownClients
from fedheal.flower.node_registry import OpenRequests, ReceivedReply
from fedheal.methods.server_step import StepOutcome

log = logging.getLogger("flwr.fedheal")


@dataclass
class FederationState(KnownClients):
    """What the strategy remembers about its clients."""

    federation: str = field(default_factory=lambda: secrets.token_hex(8))  # an id that clients save their state under
    tokens: dict[str, str] = field(default_factory=dict)  # of clients that keep a state; see `client_state`
    message_digests: dict[str, str] = field(default_factory=dict)  # by client; see `SeenMessages`
    used_digest: str = ""  # likewise
    nodes: dict[str, str] = field(default_factory=dict)  # node -> client: with node keys, ids outlive a run
    restarted: int = 0  # see `RoundInstructions`

    def find_lost_states(self, received: Iterable[ReceivedReply]) -> dict[str, int]:
        """Return the clients that continued from another state than that of their last accepted round, and its round.

        The client itself may not know: a new node that lost the client's token is told nothing about the client.
        """
        states = ((r.client, r.state_round) for r in received if r.problem is None)
        return {c: n for c, n in states if n is not None and c in self.accepted and n != self.accepted[c]}

    def forget_digests(self, connected: Collection[str]) -> None:
        """Forget the digests of clients that never counted and are not connected."""
        names = {*self.accepted, *connected}
        self.message_digests = {client: digest for client, digest in self.message_digests.items() if client in names}

    def select_valid(self, lost: Iterable[str]) -> list[str]:
        """Return the lost states that still counted. A state from before the last restart is void already."""
        return [client for client in lost if self.accepted[client] > self.restarted]


def restore_federation(**saved: Any) -> FederationState:
    """Return the state that a checkpoint holds."""
    saved.setdefault("tokens", dict.fromkeys(saved["accepted"], ""))  # of a version without tokens
    if "used_digest" not in saved:  # likewise
        counts = Counter(d for client, d in saved.get("message_digests", {}).items() if client in saved["accepted"])
        saved["used_digest"] = counts.most_common(1)[0][0] if counts else ""
    return FederationState(**saved)


@dataclass(kw_only=True)
class NodeRound(OpenRound):
    """A round under way, with the messages to nodes that are open in it."""

    requests: OpenRequests
    connected: frozenset[int]
    bytes_sent: int = 0  # to all nodes
    evaluation_requests: OpenRequests = field(default_factory=lambda: OpenRequests({}))

    def record_training(
        self, received: Sequence[ReceivedReply], cohort: Cohort, outcome: StepOutcome, federation: FederationState
    ) -> None:
        """Record the server step in the round and in the federation's state."""
        asked, heard = self.requests.nodes, {reply.node for reply in received}
        self.replied = len({reply.node for reply in received if not reply.message.has_error()} & asked.keys())
        # A name that has moved to another node counts once.
        names_heard = {reply.client for reply in received if reply.problem is None}
        unheard = {node: name for node, name in asked.items() if node not in heard}
        missing = sorted(name for name in unheard.values() if name not in names_heard)
        self.cohort = len(asked) - len(unheard) + len(missing)
        problems = {reply.client: reply.problem for reply in received if reply.problem is not None}
        self.record_step(cohort, outcome, problems, missing)
        self._record_lost_states(received, outcome, federation)
        federation.message_digests |= cohort.message_digests
        if outcome.absorbed and cohort.message_digests:
            federation.used_digest = cohort.message_digests[outcome.absorbed[0]]
        federation.accepted |= dict.fromkeys(outcome.absorbed, self.number)
        federation.tokens |= {
            reply.client: reply.token for reply in received if reply.client in outcome.absorbed and reply.token
        }
        domains = {reply.client: reply.domain for reply in received if reply.client in outcome.accepted}
        federation.client_domains |= domains

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
