"""Which client each node is, and whether a message is a valid reply to this round.

A client's name is the `client` in its reply's ConfigRecord `fedheal`, which `fedheal.flower.client` puts there. Else it
is `partition-<id>` if the reply holds a `partition-id` or Flower's simulation says so, else `node-<id>`. Only
`node-<id>` does not survive a node's restart. A reply that names less than an earlier reply of its node (for example a
stock evaluation) keeps the known name and domain. A node keeps the first name it gives in a run: otherwise it could
fill the state with a new client each round.

Several nodes may use a name one after another: a site that restarts without a key has a new id each time. The earlier
nodes are remembered. So a node that was away gets its name back from a node that used it meanwhile.
"""

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flwr.app import Error, Message, Metadata
from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid

from fedheal.core.errors import shorten_list
from fedheal.federation.reply_limits import MAX_ERROR, MAX_NAME, escape_text, find_bad_name
from fedheal.flower.messages import CLIENT_INFO
from fedheal.flower.reply_size import ReplyLimits

log = logging.getLogger("flwr.fedheal")

# Remembered for a name: the first and the latest. A site may restart without a key any number of times.
MAX_NODES = 8
MAX_LISTED = 3  # nodes in a reason


@dataclass(frozen=True)
class ReceivedReply:
    """A reply and its sender; `problem` says why it cannot count."""

    message: Message
    node: int
    client: str
    domain: str
    is_named: bool  # whether the client gave its name
    problem: str | None = None
    token: str = ""  # see `client_state`
    state_round: int | None = None  # the round whose state the client continued from, 0: none; None: it keeps none


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
    """The clients' names by node, in the order in which the nodes first used them."""

    def __init__(self, names: Mapping[int, str] | None = None, limits: ReplyLimits | None = None) -> None:
        self.names, self.limits = dict(names or {}), limits or ReplyLimits()
        self.partition_names: dict[int, str] = {}  # of a simulation's nodes, for clients that send no name
        self._named_in_this_run: set[int] = set()  # not saved: a resume may correct a name

    def name_partitions(self, grid: Grid, nodes: Iterable[int]) -> None:
        """Name the nodes of Flower's simulation, which registers them in the order of their partitions; no others.

        Node ids are new in every simulation. With the partitions' names a resumed one has the same clients.
        """
        if isinstance(grid, InMemoryGrid) and any(node not in self.partition_names for node in nodes):
            registered = sorted((info.registered_at, info.node_id) for info in grid.get_nodes())
            if len({moment for moment, _ in registered}) == len(registered):  # else the order is unknown
                self.partition_names = {node: f"partition-{i}" for i, (_, node) in enumerate(registered)}

    def get_name(self, node: int) -> str:
        return self.names.get(node) or self.partition_names.get(node, f"node-{node}")

    def track_requests(self, messages: Sequence[Message]) -> OpenRequests:
        """Note which nodes these messages go to."""
        sent = [message.metadata for message in messages]
        return OpenRequests({m.dst_node_id: self.get_name(m.dst_node_id) for m in sent}, sent)

    def identify_replies(
        self,
        replies: Iterable[Message],
        round_number: int,
        requests: OpenRequests,
        client_domains: Mapping[str, str],
        connected: frozenset[int],
    ) -> list[ReceivedReply]:
        """Identify the senders of a round's replies, in the order of names.

        Replies of nodes that were not asked, that reply twice, or that use another node's name get a problem. A name
        belongs to the first of the connected nodes that used it, so a node that was away gets it back. Another node may
        use it while the owner is gone, or for a round in which the owner was asked and is silent. For example, a node
        that restarts without a key gets a new id, and its old id never replies. While the owner is connected and was
        not asked, a restart cannot be told from a second site with the same name. An error of the owner counts as
        silence if its client replies from another node: the owner has died.
        """
        identified = (self._identify(message, round_number, requests, client_domains) for message in replies)
        ordered = sorted(identified, key=lambda reply: (reply.client, reply.node))
        replies_by_node, owners = Counter(reply.node for reply in ordered), self._find_owners(connected)
        nodes_by_name: dict[str, set[int]] = {}
        for reply in ordered:
            if not reply.message.has_error() and reply.node in requests.nodes:
                nodes_by_name.setdefault(reply.client, set()).add(reply.node)

        def check(reply: ReceivedReply) -> ReceivedReply:
            if reply.message.has_error():
                return reply
            if reply.node not in requests.nodes:
                return replace(reply, problem=f"node {reply.node} was not asked in this round")
            if replies_by_node[reply.node] > 1:
                times = replies_by_node[reply.node]
                return replace(reply, problem=f"node {reply.node} replied {times} times in this round")
            owner, users = owners.get(reply.client), nodes_by_name[reply.client]
            is_silent = owner in requests.nodes and owner not in users
            if owner is None or is_silent:
                if len(users) == 1:
                    return reply
                why = f"as {_list_nodes(sorted(users - {reply.node}))}"
            elif owner == reply.node:
                return reply
            else:
                why = f"but node {owner} uses this name"
            problem = f"it calls itself '{reply.client}', {why}: give each site its own name"
            return replace(reply, client=f"node-{reply.node}", is_named=False, problem=problem)

        checked = [check(reply) for reply in ordered]
        valid = {reply.client for reply in checked if reply.problem is None}
        return [reply for reply in checked if not (reply.message.has_error() and reply.client in valid)]

    def _identify(
        self, message: Message, round_number: int, requests: OpenRequests, client_domains: Mapping[str, str]
    ) -> ReceivedReply:
        node = message.metadata.src_node_id
        if message.has_error():
            # The SuperLink reports a dead node under an id of its own.
            node = requests.node_by_message.get(message.metadata.reply_to_message_id, node)
            client = self.get_name(node)
            failure = f"its node reports an error: {describe_error(message.error)}"
            return ReceivedReply(message, node, client, domain=client, is_named=True, problem=failure)
        known = self.names.get(node)
        if (excess := self.limits.find_excess(message.content)) is not None:  # not even its name is read
            client = self.get_name(node)
            return ReceivedReply(message, node, client, client_domains.get(client, client), False, excess)
        info: Mapping[str, Any] = message.content.config_records.get(CLIENT_INFO, {})
        client, is_named = self._find_name(message, info, node)
        given_domain = info.get("domain")
        domain = given_domain if isinstance(given_domain, str) and given_domain else client_domains.get(client, client)
        bad_name = find_bad_name("name", client) or find_bad_name("domain", domain)
        if bad_name is None and known not in (None, client) and node in self._named_in_this_run:
            bad_name = f"its node is '{known}' and now calls itself '{client}': a node keeps its name during a run"
        usual = client_domains.get(client, client)
        if bad_name is None and usual not in (client, domain) and node in self._named_in_this_run:
            bad_name = f"its domain is '{usual}' and now '{domain}': a client keeps its domain during a run"
        default = re.fullmatch(r"node-(\d+)", client) if bad_name is None else None
        if default and int(default[1]) != node and int(default[1]) in requests.nodes:
            bad_name = f"it calls itself '{client}', as another node is called that gives no name"
        if bad_name is not None:
            client, is_named = self.get_name(node), False
            domain = client_domains.get(client, client)
        problem = bad_name or _find_staleness(message, info.get("round", round_number), round_number, requests)
        token = escape_text(info.get("token", ""), MAX_NAME)
        state_round = info.get("state_round")
        state_round = state_round if isinstance(state_round, int) else None
        return ReceivedReply(message, node, client, domain, is_named, problem, token, state_round)

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
        return self.get_name(node), False

    def remember(self, replies: Iterable[ReceivedReply], connected: Collection[int]) -> None:
        """Remember the names of valid replies. Of nodes that had these names and are gone, forget all but `MAX_NODES`."""
        users: dict[str, list[int]] = {}
        for node, client in self.names.items():
            users.setdefault(client, []).append(node)
        for reply in replies:
            if reply.problem is not None:
                continue
            if not reply.is_named and reply.node not in {**self.names, **self.partition_names}:
                problem = f"node {reply.node} sends no client name and is called '{reply.client}'"
                risk = "if it restarts without a node key, it is a new client without history"
                log.warning("%s: %s; fedheal.flower.client.reply sends a name", problem, risk)
            if self.names.get(reply.node) != reply.client:
                others = users.get(reply.client, [])
                if others:  # after a resume new nodes are usual
                    level = logging.WARNING if others[-1] in self._named_in_this_run else logging.INFO
                    log.log(
                        level, "'%s' replies from node %d, before from node %d", reply.client, reply.node, others[-1]
                    )
                self.names.pop(reply.node, None)  # a node that changes its name comes after those that have used it
                self.names[reply.node] = reply.client
                self._forget_some([n for n in others if self.names.get(n) == reply.client], connected)
            if reply.is_named:
                self._named_in_this_run.add(reply.node)

    def _forget_some(self, earlier: Sequence[int], connected: Collection[int]) -> None:
        """Forget the nodes that used a name earlier, are gone and are too many; the first one of them stays."""
        gone = [node for node in earlier if node not in connected]
        for node in gone[1:][: max(0, len(earlier) + 1 - MAX_NODES)]:
            del self.names[node]
            self._named_in_this_run.discard(node)

    def _find_owners(self, connected: Collection[int]) -> dict[str, int]:
        """Return, for each name, the first of the connected nodes that used it."""
        return {client: node for node, client in reversed(self.names.items()) if node in connected}


def _list_nodes(nodes: Sequence[int]) -> str:
    """Return the words for nodes that do the same.

    >>> _list_nodes([7]), _list_nodes([7, 8]), _list_nodes([1, 2, 3, 4, 5])
    ('does node 7', 'do nodes 7, 8', 'do nodes 1, 2, 3 and 2 more')
    """
    words = shorten_list([str(node) for node in nodes], MAX_LISTED)
    return f"{'does node' if len(nodes) == 1 else 'do nodes'} {words}"


def describe_lost_clients(clients: Iterable[str], connected: Collection[int]) -> str | None:
    """Return a warning if a resumed run will not find clients again that were known by their nodes' ids only, else None.

    >>> describe_lost_clients(["clinic", "node-7"], {7})
    >>> describe_lost_clients(["clinic", "node-7"], {8})[:59]
    '1 of 2 clients were known by node ids that are gone (node-7'
    """
    known = list(clients)
    lost = [client for client in known if re.fullmatch(r"node-\d+", client) and int(client[5:]) not in connected]
    if not lost:
        return None
    shown = shorten_list(lost, MAX_LISTED)
    effect = "their nodes count as new clients, and this run differs from an uninterrupted one"
    remedy = "let clients send a name or 'partition-id', or give nodes keys"
    return f"{len(lost)} of {len(known)} clients were known by node ids that are gone ({shown}): {effect}; {remedy}"


def describe_error(error: Error) -> str:
    """Return the class of a client's exception and the first line of its text, or the last one of a traceback."""
    reason = str(error.reason or "").strip()
    named = re.match(r"<class '(?:[^']*\.)?([^'.]+)'>:<'(.*)'>$", reason, re.DOTALL)  # how Flower writes an exception
    lines = (named[2] if named else reason).strip().splitlines()
    if not lines:
        return named[1] if named else f"code {error.code}"
    is_traceback = not named or lines[0].startswith(("Traceback", "ray::"))
    line = lines[-1 if is_traceback else 0]
    return escape_text(f"{named[1]}: {line}" if named else line, MAX_ERROR)


def _find_staleness(message: Message, reply_round: object, round_number: int, requests: OpenRequests) -> str | None:
    """Return why a reply does not belong to this round, or None."""
    if requests.node_by_message and message.metadata.reply_to_message_id not in requests.node_by_message:
        return "it answers a message that was not sent in this round"
    if reply_round != round_number:
        return f"it answers round {escape_text(reply_round, 20)}, this is round {round_number}"
    return None
