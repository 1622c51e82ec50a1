"""Nodes that did not reply in time: each costs one timeout, and is asked nothing else until it answers a short query.

Nobody waits for the answer. It is looked for whenever nodes are chosen. A node that answers and times out again, such as one
whose training crashes, rests for more rounds after every timeout in a row (exponential back-off).
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

log = logging.getLogger("flwr.fedheal")

# Errors that the SuperLink reports in the place of a node: message, reply or node unavailable.
NOT_FROM_NODE = (3, 4, 5)

MAX_REST = 32  # rounds
SUM = "sum"  # stands for the messages of a secure sum
# A node rests from training if it times out in training, or in what comes before or after it in a round.
RELATED = {
    MessageType.TRAIN: (MessageType.TRAIN, MessageType.QUERY, SUM),
    MessageType.EVALUATE: (MessageType.EVALUATE,),
}

MakeQueries = Callable[[Iterable[int]], Sequence[Message]]


class SilentNodes:
    """The silent nodes, and the queries they have not answered."""

    def __init__(self) -> None:
        self._checks: dict[int, int] = {}  # node -> how often it was looked for since it fell silent
        self._queries: dict[str, int] = {}  # id of an open query -> node
        self._timeouts: dict[tuple[int, str], int] = {}  # node and kind of message -> timeouts in a row
        self._last_rests: dict[tuple[int, str], int] = {}  # likewise -> the last round in which it rests

    @property
    def nodes(self) -> frozenset[int]:
        return frozenset(self._checks)

    def record_replies(self, asked: Iterable[int], replied: Collection[int], kind: str, number: int) -> None:
        """Note which nodes are silent from now on, and how long they rest when they answer.

        Args:
            asked: The nodes that messages of this kind went to.
            replied: Those of them that replied in time.
            kind: The type of the messages: a node may evaluate, and never train.
            number: The round.
        """
        for node in asked:
            key = node, kind
            if node in replied:
                self._timeouts.pop(key, None)
                continue
            self._checks.setdefault(node, 0)
            self._timeouts[key] = count = self._timeouts.get(key, 0) + 1
            rest = min(2 ** (count - 1), MAX_REST) if count > 1 else 0  # one timeout may be bad luck
            self._last_rests[key] = number + rest
            if rest:
                log.warning("node %d has timed out %d times in a row, and rests for %d rounds", node, count, rest)

    def leave_out_resting(self, nodes: Sequence[int], kind: str, number: int, needed: int) -> list[int]:
        """Return the nodes that do not rest from messages of this kind; all of them if fewer than needed are left."""
        rested = [n for n in nodes if all(self._last_rests.get((n, k), 0) < number for k in RELATED[kind])]
        return rested if len(rested) >= needed else list(nodes)

    def list_responsive(self, grid: Grid, make_queries: MakeQueries) -> list[int]:
        """Return the connected nodes without the silent ones. Ask the silent ones for a sign of life, ever more rarely."""
        connected = list(grid.get_node_ids())
        known = frozenset(connected)
        for node in self._checks.keys() - known:
            self._remove(node)  # when it is connected again, it has restarted
        self._timeouts, self._last_rests = (
            {key: count for key, count in counts.items() if key[0] in known}
            for counts in (self._timeouts, self._last_rests)
        )
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
