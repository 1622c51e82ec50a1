"""Nodes that did not reply in time: each costs one timeout, and is asked nothing else until it answers a short query.

Nobody waits for the answer. It is looked for whenever nodes are chosen. A node that answers queries and times out again rests
longer after every timeout in a row, from messages of that kind: one whose training crashes may still evaluate.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

log = logging.getLogger("flwr.fedheal")

# Errors that the SuperLink reports in the place of a node: message, reply or node unavailable.
NOT_FROM_NODE = (3, 4, 5)

MAX_REST = 64  # looks for a node, of which a round has one for training and one for evaluation

MakeQueries = Callable[[Iterable[int]], Sequence[Message]]


class SilentNodes:
    """The silent nodes, and the queries they have not answered."""

    def __init__(self) -> None:
        self._checks: dict[int, int] = {}  # node -> how often it was looked for since it fell silent
        self._queries: dict[str, int] = {}  # id of an open query -> node
        self._answered: set[int] = set()  # silent nodes that have answered, and rest
        self._timeouts: dict[tuple[int, str], int] = {}  # node and kind of message -> timeouts in a row

    @property
    def nodes(self) -> frozenset[int]:
        return frozenset(self._checks.keys() - self._answered)

    def add(self, nodes: Iterable[int]) -> None:
        self._checks |= {node: 0 for node in nodes if node not in self._checks}

    def record_replies(self, asked: Iterable[int], replied: Collection[int], kind: str) -> None:
        """Count the timeouts in a row of the nodes that were asked, and add those that did not reply.

        Args:
            asked: The nodes that messages of this kind went to.
            replied: Those of them that replied in time.
            kind: The type of the messages: a node may evaluate, and never train.
        """
        for node in asked:
            if node in replied:
                self._timeouts.pop((node, kind), None)
            else:
                self._timeouts[node, kind] = self._timeouts.get((node, kind), 0) + 1
                self._checks[node] = 0
                self._answered.discard(node)

    def list_responsive(self, grid: Grid, make_queries: MakeQueries, kind: str) -> list[int]:
        """Return the connected nodes without those that are silent, or rest from messages of this kind.

        Ask the silent ones for a sign of life, ever more rarely.
        """
        connected = list(grid.get_node_ids())
        known = frozenset(connected)
        # A node that is gone has restarted when it is connected again.
        self._timeouts = {key: count for key, count in self._timeouts.items() if key[0] in known}
        for node in self._checks.keys() - known:
            self._remove(node)
        if not self._checks:
            return connected
        waiting = {node: checks for node, checks in self._checks.items() if node not in self._answered}
        due = [node for node, checks in waiting.items() if checks & (checks - 1) == 0]  # 0, 1, 2, 4, 8, ...
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
                    self._answered.add(node)
        kinds = {other for _, other in self._timeouts}
        for node in [node for node in self._answered if all(self._has_rested(node, other) for other in kinds)]:
            self._remove(node)
        rested = {node for node in self._answered if self._has_rested(node, kind)}
        return [node for node in connected if node not in self._checks or node in rested]

    def _has_rested(self, node: int, kind: str) -> bool:
        """Return whether a node was looked for often enough: 0, 4, 8, 16, ... times after 1, 2, 3, 4, ... timeouts in a row."""
        timeouts = self._timeouts.get((node, kind), 0)
        return timeouts < 2 or self._checks[node] >= min(2**timeouts, MAX_REST)

    def _remove(self, node: int) -> None:
        del self._checks[node]
        self._answered.discard(node)
        self._queries = {query: other for query, other in self._queries.items() if other != node}
