"""Nodes that did not reply in time: each costs one timeout, and is asked nothing else until it answers a short query.

Nobody waits for the answer. It is looked for whenever nodes are chosen.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

log = logging.getLogger("flwr.fedheal")

# Errors that the SuperLink reports in the place of a node: message, reply or node unavailable.
NOT_FROM_NODE = (3, 4, 5)

MakeQueries = Callable[[Iterable[int]], Sequence[Message]]


class SilentNodes:
    """The silent nodes, and the queries they have not answered."""

    def __init__(self) -> None:
        self._checks: dict[int, int] = {}  # node -> how often it was looked for since it fell silent
        self._queries: dict[str, int] = {}  # id of an open query -> node

    @property
    def nodes(self) -> frozenset[int]:
        return frozenset(self._checks)

    def add(self, nodes: Iterable[int]) -> None:
        self._checks |= {node: 0 for node in nodes if node not in self._checks}

    def list_responsive(self, grid: Grid, make_queries: MakeQueries) -> list[int]:
        """Return the connected nodes without the silent ones. Ask the silent ones for a sign of life, ever more rarely."""
        connected = list(grid.get_node_ids())
        for node in [node for node in self._checks if node not in connected]:
            self._remove(node)  # when it is connected again, it has restarted
        if not self._checks:
            return connected
        due = [node for node, checks in self._checks.items() if checks & (checks - 1) == 0]  # 0, 1, 2, 4, 8, ...
        self._checks = {node: checks + 1 for node, checks in self._checks.items()}
        if due:
            # A query may be lost with the node that took it: the earlier ones stay open beside it.
            queries = make_queries(due)
            grid.push_messages(queries)  # it leaves out the ids of those that it cannot send
            self._queries |= {query.metadata.message_id: query.metadata.dst_node_id for query in queries}
        for reply in grid.pull_messages(list(self._queries)) if self._queries else ():
            query = reply.metadata.reply_to_message_id
            if query in self._queries:
                node = self._queries.pop(query)
                if not (reply.has_error() and reply.error.code in NOT_FROM_NODE):
                    log.info("node %d answers again", node)
                    self._remove(node)
        return [node for node in connected if node not in self._checks]

    def _remove(self, node: int) -> None:
        del self._checks[node]
        self._queries = {query: other for query, other in self._queries.items() if other != node}
