"""Who sent a reply, and whether it is an answer at all.

Who a client is: the `client` in its reply's ConfigRecord `fedheal` (`fedheal.flower.client` puts it there), else
`partition-<id>` where the reply holds a `partition-id`, else `node-<id>`. Only the last does not survive a node's restart.
A reply that gives less (say, of a stock evaluation) is its node's: the name and domain that are known of it stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flwr.app import Message, Metadata

from fedheal.flower import messages as wire


@dataclass(frozen=True)
class Heard:
    """A message that arrived, and who sent it; `trouble` says why it cannot count."""

    message: Message
    node: int
    client: str
    domain: str
    named: bool  # whether the client said who it is
    trouble: str | None = None


@dataclass(frozen=True)
class Asked:
    """Whom a round asked, by node, with the client's name as far as known; and the messages' metadata."""

    nodes: Mapping[int, str]
    messages: Sequence[Metadata] = ()

    @cached_property
    def ids(self) -> dict[str, int]:
        """Message -> node; to be asked once they are sent, which is when a message gets its id."""
        return {message.message_id: message.dst_node_id for message in self.messages if message.message_id}


def heard(
    message: Message, number: int, asked: Asked, known: Mapping[int, str], client_domains: Mapping[str, str]
) -> Heard:
    """Who sent this message, and whether it is an answer to round `number` at all.

    `known`: nodes' names so far; `client_domains`: clients' domains.
    """
    node = message.metadata.src_node_id
    if message.has_error():
        # Of a node that died the SuperLink itself reports, under an id of its own.
        node = asked.ids.get(message.metadata.reply_to_message_id, node)
        client = known.get(node, f"node-{node}")
        return Heard(message, node, client, client, True, f"its node reports an error: {_last_line(message)}")
    content = message.content
    about: Mapping[str, Any] = content.config_records.get(wire.ABOUT, {})
    name, partition = about.get("client"), None
    records: list[Mapping[str, Any]] = [*content.config_records.values(), *content.metric_records.values()]
    for record in records:
        partition = record.get("partition-id", partition)
    named, before = True, known.get(node)
    if isinstance(name, str) and name:
        client = name
    elif isinstance(partition, (int, float, str)) and (before is None or before.startswith("partition-")):
        client = f"partition-{partition:g}" if isinstance(partition, float) else f"partition-{partition}"
    else:
        client, named = before or f"node-{node}", False
    domain = about.get("domain")
    home = domain if isinstance(domain, str) and domain else client_domains.get(client, client)
    answered = about.get("round", number)
    stale = None if answered == number else f"it answers round {answered}, this is round {number}"
    if asked.ids and message.metadata.reply_to_message_id not in asked.ids:
        stale = "it answers a message that was not sent in this round"
    return Heard(message, node, client, home, named, stale)


def told_apart(
    arrived: Iterable[Heard], asked: Asked, holders: Mapping[str, int], connected: frozenset[int]
) -> list[Heard]:
    """The same, with trouble where a node was not asked, answers twice, or uses a name that another node has.

    `holders`: which node had a name last. A name may move to another node once its holder is gone, or was asked and is
    silent; while the holder is connected and was not asked, nobody can tell a restart from a second site of that name.
    An error of the holder is silence where its client answers from another node: the old node is what has died.
    """
    found = sorted(arrived, key=lambda one: (one.client, one.node))
    by_node: dict[int, int] = {}
    by_name: dict[str, set[int]] = {}
    for one in found:
        by_node[one.node] = by_node.get(one.node, 0) + 1
        if not one.message.has_error():
            by_name.setdefault(one.client, set()).add(one.node)

    def trouble(one: Heard) -> str | None:
        if one.message.has_error():
            return one.trouble
        if one.node not in asked.nodes:
            return f"node {one.node} was not asked in this round"
        if by_node[one.node] > 1:
            return f"node {one.node} answers {by_node[one.node]} times in this round"
        holder = holders.get(one.client, one.node)
        rivals = by_name[one.client] | ({holder} if holder in connected and holder not in asked.nodes else set())
        if len(rivals) > 1:
            return (
                f"nodes {' and '.join(map(str, sorted(rivals)))} both use this name: give each site a name of its own"
            )
        return one.trouble

    judged = [replace(one, trouble=trouble(one)) for one in found]
    sound = {one.client for one in judged if one.trouble is None}
    return [one for one in judged if not (one.message.has_error() and one.client in sound)]


def _last_line(message: Message) -> str:
    reason = str(message.error.reason or f"code {message.error.code}").strip().splitlines()
    return reason[-1][:300] if reason else f"code {message.error.code}"
