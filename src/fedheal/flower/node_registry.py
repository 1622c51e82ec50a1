"""Which client each node is, and whether a message is a valid reply to this round.

A client's name is the `client` in its reply's ConfigRecord `fedheal` (`fedheal.flower.client` puts it there), else
`partition-<id>` if the reply holds a `partition-id`, else `node-<id>`. Only the last does not survive a node's restart. A
reply that names less than an earlier one of its node (for example a stock evaluation) keeps the known name and domain. A node
keeps the first name it gives in a run: otherwise it could fill the state with a new client each round.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flwr.app import Message, Metadata

from fedheal.flower.messages import CLIENT_INFO
from fedheal.flower.reply_limits import ReplyLimits, escape_text, find_bad_name

log = logging.getLogger("flwr.fedheal")


@dataclass(frozen=True)
class ReceivedReply:
    """A reply and its sender; `problem` says why it cannot count."""

    message: Message
    node: int
    client: str
    domain: str
    is_named: bool  # whether the client gave its name
    problem: str | None = None


@dataclass(frozen=True)
class OpenRequests:
    """The nodes that a round asked, with their clients' names as far as known, and the messages' metadata."""

    nodes: Mapping[int, str]
    metadata: Sequence[Metadata] = ()

    @cached_property
    def node_by_message(self) -> dict[str, int]:
        """Message id -> node. Read it only after sending, which is when a message gets its id."""
        return {message.message_id: message.dst_node_id for message in self.metadata if message.message_id}


class NodeRegistry:
    """The clients' names by node. A name has one node: when it moves, the old node's entry goes."""

    def __init__(self, names: Mapping[int, str] | None = None, limits: ReplyLimits | None = None) -> None:
        self.names, self.limits = dict(names or {}), limits or ReplyLimits()
        self._named_in_this_run: set[int] = set()  # a resume may correct a name

    def track_requests(self, messages: Sequence[Message]) -> OpenRequests:
        """Note which nodes these messages go to."""
        sent = [message.metadata for message in messages]
        return OpenRequests({m.dst_node_id: self.names.get(m.dst_node_id, f"node-{m.dst_node_id}") for m in sent}, sent)

    def identify_replies(
        self,
        replies: Iterable[Message],
        round_number: int,
        requests: OpenRequests,
        client_domains: Mapping[str, str],
        connected: frozenset[int],
    ) -> list[ReceivedReply]:
        """Identify the senders of a round's replies, in the order of names.

        Replies of nodes that were not asked, that reply twice, or that use another node's name get a problem. A name may move
        to another node once the last one that used it is gone, or was asked and is silent. While that is connected and was not
        asked, a restart cannot be told from a second site with the same name. An error of the last node counts as silence if
        its client replies from another node: the old node has died.
        """
        identified = (self._identify(message, round_number, requests, client_domains) for message in replies)
        ordered = sorted(identified, key=lambda reply: (reply.client, reply.node))
        replies_by_node, last_nodes = Counter(reply.node for reply in ordered), self._nodes_by_client()
        nodes_by_name: dict[str, set[int]] = {}
        for reply in ordered:
            if not reply.message.has_error():
                nodes_by_name.setdefault(reply.client, set()).add(reply.node)

        def find_problem(reply: ReceivedReply) -> str | None:
            if reply.message.has_error():
                return reply.problem
            if reply.node not in requests.nodes:
                return f"node {reply.node} was not asked in this round"
            if replies_by_node[reply.node] > 1:
                return f"node {reply.node} replied {replies_by_node[reply.node]} times in this round"
            last = last_nodes.get(reply.client, reply.node)
            last_is_unasked = last in connected and last not in requests.nodes
            rivals = nodes_by_name[reply.client] | ({last} if last_is_unasked else set())
            if len(rivals) > 1:
                nodes = " and ".join(map(str, sorted(rivals)))
                return f"nodes {nodes} both use this name: give each site its own name"
            return reply.problem

        checked = [replace(reply, problem=find_problem(reply)) for reply in ordered]
        valid = {reply.client for reply in checked if reply.problem is None}
        return [reply for reply in checked if not (reply.message.has_error() and reply.client in valid)]

    def _identify(
        self, message: Message, round_number: int, requests: OpenRequests, client_domains: Mapping[str, str]
    ) -> ReceivedReply:
        node = message.metadata.src_node_id
        if message.has_error():
            # The SuperLink reports a dead node under an id of its own.
            node = requests.node_by_message.get(message.metadata.reply_to_message_id, node)
            client = self.names.get(node, f"node-{node}")
            lines = str(message.error.reason or "").strip().splitlines()
            failure = f"its node reports an error: {escape_text(lines[-1]) if lines else f'code {message.error.code}'}"
            return ReceivedReply(message, node, client, domain=client, is_named=True, problem=failure)
        known = self.names.get(node)
        if (excess := self.limits.find_excess(message.content)) is not None:  # not even its name is read
            client = known or f"node-{node}"
            return ReceivedReply(message, node, client, client_domains.get(client, client), False, excess)
        info: Mapping[str, Any] = message.content.config_records.get(CLIENT_INFO, {})
        client, is_named = self._find_name(message, info, node)
        given_domain = info.get("domain")
        domain = given_domain if isinstance(given_domain, str) and given_domain else client_domains.get(client, client)
        bad_name = find_bad_name("name", client) or find_bad_name("domain", domain)
        if bad_name is None and known not in (None, client) and node in self._named_in_this_run:
            bad_name = f"its node is '{known}' and now calls itself '{client}': a node keeps its name during a run"
        if bad_name is not None:
            client, is_named = known or f"node-{node}", False
            domain = client_domains.get(client, client)
        problem = bad_name or _find_staleness(message, info.get("round", round_number), round_number, requests)
        return ReceivedReply(message, node, client, domain=domain, is_named=is_named, problem=problem)

    def _find_name(self, message: Message, info: Mapping[str, Any], node: int) -> tuple[str, bool]:
        """Return the sender's name, and whether the reply gives it."""
        content, known = message.content, self.names.get(node)
        records: list[Mapping[str, Any]] = [*content.config_records.values(), *content.metric_records.values()]
        partition = next((record["partition-id"] for record in reversed(records) if "partition-id" in record), None)
        name = info.get("client")
        if isinstance(name, str) and name:
            return name, True
        if isinstance(partition, (int, float, str)) and (known or "partition-").startswith("partition-"):
            return f"partition-{partition:g}" if isinstance(partition, float) else f"partition-{partition}", True
        return known or f"node-{node}", False

    def remember(self, replies: Iterable[ReceivedReply]) -> None:
        """Remember the names of valid replies."""
        nodes = self._nodes_by_client()
        for reply in replies:
            if reply.problem is not None:
                continue
            if not reply.is_named and reply.node not in self.names:
                problem = f"node {reply.node} sends no client name and is called '{reply.client}'"
                risk = "if it restarts without a node key its history is lost"
                log.warning("%s: %s; fedheal.flower.client.reply sends a name", problem, risk)
            if nodes.get(reply.client, reply.node) != reply.node:  # the name has moved
                self.names.pop(nodes[reply.client], None)
            self.names[reply.node] = reply.client
            if reply.is_named:
                self._named_in_this_run.add(reply.node)

    def _nodes_by_client(self) -> dict[str, int]:
        return {client: node for node, client in self.names.items()}


def _find_staleness(message: Message, reply_round: object, round_number: int, requests: OpenRequests) -> str | None:
    """Return why a reply does not belong to this round, or None."""
    if requests.node_by_message and message.metadata.reply_to_message_id not in requests.node_by_message:
        return "it answers a message that was not sent in this round"
    if reply_round != round_number:
        return f"it answers round {escape_text(reply_round, 20)}, this is round {round_number}"
    return None
