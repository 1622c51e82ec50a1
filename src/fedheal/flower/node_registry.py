"""Which client each node is, and whether a message is a valid reply to this round.

A client's name is the `client` in its reply's ConfigRecord `fedheal` (`fedheal.flower.client` puts it there), else
`partition-<id>` if the reply holds a `partition-id`, else `node-<id>`. Only the last does not survive a node's restart. A
reply that names less than an earlier one of its node (for example a stock evaluation) keeps the known name and domain.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flwr.app import Message, Metadata

from fedheal.flower.messages import CLIENT_INFO

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

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        self.names = dict(names or {})

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
            problem = f"its node reports an error: {lines[-1][:300] if lines else f'code {message.error.code}'}"
            return ReceivedReply(message, node, client, domain=client, is_named=True, problem=problem)
        content = message.content
        info: Mapping[str, Any] = content.config_records.get(CLIENT_INFO, {})
        records: list[Mapping[str, Any]] = [*content.config_records.values(), *content.metric_records.values()]
        partition = next((record["partition-id"] for record in reversed(records) if "partition-id" in record), None)
        name, known_name, is_named = info.get("client"), self.names.get(node), True
        if isinstance(name, str) and name:
            client = name
        elif isinstance(partition, (int, float, str)) and (known_name or "partition-").startswith("partition-"):
            client = f"partition-{partition:g}" if isinstance(partition, float) else f"partition-{partition}"
        else:
            client, is_named = known_name or f"node-{node}", False
        domain = info.get("domain")
        if not (isinstance(domain, str) and domain):
            domain = client_domains.get(client, client)
        reply_round, stale = info.get("round", round_number), None
        if requests.node_by_message and message.metadata.reply_to_message_id not in requests.node_by_message:
            stale = "it answers a message that was not sent in this round"
        elif reply_round != round_number:
            stale = f"it answers round {reply_round}, this is round {round_number}"
        return ReceivedReply(message, node, client, domain=domain, is_named=is_named, problem=stale)

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

    def _nodes_by_client(self) -> dict[str, int]:
        return {client: node for node, client in self.names.items()}
