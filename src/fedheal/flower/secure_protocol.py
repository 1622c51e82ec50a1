"""The server's side of a secure sum: Flower's SecAgg+ workflow, run for one vector per client.

Flower's workflow belongs to its older API. Each sum gives it a `LegacyContext` of its own. So the strategy, its loop
and its run folder are as in the current API. Two things are added. The sum survives drop-outs before the vectors are
sent. (Flower's workflow then asks for shares of their keys, which nobody has.) A malformed reply counts as a drop-out
instead of ending the run.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import FitIns, Parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.serverapp import Grid

from fedheal.core.arrays import Floats
from fedheal.federation.reply_limits import escape_text
from fedheal.flower.node_registry import describe_error
from fedheal.flower.secure_masks import server_protocol
from fedheal.flower.secure_replies import ExpectedReply, count_reply_bytes
from fedheal.flower.secure_vector import CLIP, LEVELS, MODULUS, SecureSumError

log = logging.getLogger("flwr.fedheal")

NO_REPLY = "no reply"

Orders = Callable[[Sequence[int]], Mapping[int, RecordDict]]


@dataclass
class SumOutcome:
    """The sum of the vectors of `nodes`, who dropped out and why, and the bytes that the protocol took."""

    total: Floats
    nodes: tuple[int, ...]
    dropped: dict[int, str]
    bytes_sent: int
    bytes_received: int


def sum_vectors(
    grid: Grid, nodes: Collection[int], make_orders: Orders, length: int, *, number: int, threshold: int, timeout: float
) -> SumOutcome:
    """Sum one vector of each node, and see nothing but the sum.

    Args:
        grid: How nodes are reached.
        nodes: The nodes to sum over, at least two.
        make_orders: Called with the nodes that are left when keys are shared; returns what to send to each for its vector.
        length: The vectors' length.
        number: The round.
        threshold: How many nodes must stay until the end.
        timeout: How many seconds each of the four stages waits for replies.

    Raises:
        SecureSumError: Too few nodes are left, or the protocol failed.
    """
    checked = _CheckedGrid(grid, length)
    relay = _Relay(list(nodes))
    workflow = _Workflow(make_orders, threshold / len(nodes), timeout)
    records = RecordDict({MAIN_PARAMS_RECORD: ArrayRecord()})
    records[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: number})
    context = LegacyContext(Context(0, 0, {}, records, {}), strategy=cast(Any, relay), client_manager=cast(Any, relay))
    try:
        workflow(cast(Grid, checked), context)
    except SecureSumError:
        raise
    except Exception as error:  # the stages raise nearly anything if a client breaks the protocol
        raise SecureSumError(f"{type(error).__name__}: {escape_text(error)}", checked.dropped) from error
    if relay.mean is None:
        left = len(nodes) - len(checked.dropped)
        reason = f"{left} of {len(nodes)} clients were left, and {threshold} are needed"
        raise SecureSumError(reason, checked.dropped)
    total = relay.mean * len(relay.nodes)
    dropped = {node: why for node, why in checked.dropped.items() if node not in relay.nodes}
    return SumOutcome(total, tuple(relay.nodes), dropped, checked.bytes_sent, checked.bytes_received)


class _Workflow(server_protocol.SecAggPlusWorkflow):  # type: ignore[misc]  # a private copy has no types
    """Flower's workflow over all clients as neighbours, with orders for those that are left when keys are shared."""

    def __init__(self, make_orders: Orders, threshold: float, timeout: float) -> None:
        super().__init__(
            1.0,
            threshold,
            max_weight=1.0,
            clipping_range=CLIP,
            quantization_range=LEVELS,
            modulus_range=MODULUS,
            timeout=timeout,
        )
        self.make_orders = make_orders

    def setup_stage(self, grid: Any, context: Any, state: Any) -> bool:
        return super().setup_stage(grid, context, state) and self._forget_absent(state)

    def share_keys_stage(self, grid: Any, context: Any, state: Any) -> bool:
        return super().share_keys_stage(grid, context, state) and self._forget_absent(state)

    def collect_masked_vectors_stage(self, grid: Any, context: Any, state: Any) -> bool:
        state.nid_to_fitins = dict(self.make_orders(sorted(state.active_node_ids)))
        return bool(super().collect_masked_vectors_stage(grid, context, state))

    def _forget_absent(self, state: Any) -> bool:
        """Forget nodes that left: no mask of theirs is in the sum, and nobody has shares of their keys."""
        state.sampled_node_ids = set(state.active_node_ids)
        neighbours = state.nid_to_neighbours.items()
        state.nid_to_neighbours = {n: s & state.active_node_ids for n, s in neighbours if n in state.active_node_ids}
        return True


@dataclass
class _Relay:
    """Stands for the older API's strategy and its client manager: names the nodes, and takes the mean."""

    nodes: list[int]
    mean: Floats | None = None

    def num_available(self) -> int:
        return len(self.nodes)

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list[tuple[Any, FitIns]]:
        return [(SimpleNamespace(node_id=node), FitIns(Parameters([], ""), {})) for node in self.nodes]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> tuple[None, dict[str, Any]]:
        self.nodes = sorted(proxy.node_id for proxy, _ in results)
        self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        return None, {}


@dataclass
class _CheckedGrid:
    """Passes the protocol's messages on, and only well-formed replies back: who sends another one has dropped out."""

    grid: Grid
    length: int
    dropped: dict[int, str] = field(default_factory=dict)
    bytes_sent: int = 0
    bytes_received: int = 0

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        asked = {message.metadata.dst_node_id: message for message in messages}
        stages = {str(m.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]) for m in asked.values()}
        self.bytes_sent += sum(count_reply_bytes(message.content) for message in asked.values())
        stage = stages.pop()
        valid: dict[int, Message] = {}
        problems: dict[int, str] = {}
        for reply in self.grid.send_and_receive(asked.values(), timeout=timeout):
            node = reply.metadata.src_node_id
            if reply.has_error() or node not in asked:
                problems[node] = "it was not asked"
                if reply.has_error():
                    problems[node] = f"its node reports an error: {describe_error(reply.error)}"
                continue
            self.bytes_received += count_reply_bytes(reply.content)
            request = asked[node].content.config_records[RECORD_KEY_CONFIGS]
            expected = ExpectedReply(stage, node, asked.keys(), request, self.length)
            problem = "it replied twice" if node in valid else expected.find_problem(reply.content)
            if problem is None:
                valid[node] = reply
            else:
                problems[node] = problem
                log.warning("secure sum: node %d in stage '%s': %s", node, stage, problem)
        for node in problems.keys() & valid.keys():
            del valid[node]
        for node in asked.keys() - valid.keys():
            self.dropped.setdefault(node, f"in stage '{stage}': {problems.get(node, NO_REPLY)}")
        return list(valid.values())
