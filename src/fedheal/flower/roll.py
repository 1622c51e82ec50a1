"""Which client each node is, as far as the server has heard."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from flwr.app import Message

from fedheal.flower.node_registry import Asked, Heard, heard, told_apart

log = logging.getLogger("flwr.fedheal")


class Roll:
    """Nodes' names. A name has one node: where it moves, the old one's entry goes."""

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        self.names = dict(names or {})

    def asked(self, messages: Sequence[Message]) -> Asked:
        """Whom these messages go to."""
        nodes = [message.metadata.dst_node_id for message in messages]
        return Asked({n: self.names.get(n, f"node-{n}") for n in nodes}, [message.metadata for message in messages])

    def heard(
        self,
        replies: Iterable[Message],
        number: int,
        asked: Asked,
        client_domains: Mapping[str, str],
        connected: frozenset[int],
    ) -> list[Heard]:
        """Everyone who replied in round `number`, told apart and in the order of names."""
        arrived = (heard(message, number, asked, self.names, client_domains) for message in replies)
        return told_apart(arrived, asked, self._holders(), connected)

    def learn(self, found: Iterable[Heard]) -> None:
        """Remember who is who; who is in trouble is not believed."""
        holders = self._holders()
        for one in found:
            if one.trouble is not None:
                continue
            if not one.named and one.node not in self.names:
                log.warning(
                    "node %d gives no name and is called '%s': if it restarts without a node key its history is lost; "
                    "fedheal.flower.client.reply sends a name",
                    one.node,
                    one.client,
                )
            if holders.get(one.client, one.node) != one.node:  # the name has moved
                self.names.pop(holders[one.client], None)
            self.names[one.node] = one.client

    def _holders(self) -> dict[str, int]:
        return {client: node for node, client in self.names.items()}
