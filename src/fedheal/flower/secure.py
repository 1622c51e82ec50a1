"""FedHEAL with secure aggregation: the server sees the sum of the clients' updates, and no single one.

Change one line on each side::

    from fedheal.flower.secure import SecureFedHEAL, SecureSumMod

    strategy = SecureFedHEAL(folder="runs/hospitals")       # in the ServerApp, in place of FedHEAL(...)
    app = ClientApp(mods=[SecureSumMod()])                  # in the ClientApp, which uses fedheal.flower.client as before

Clients train, mask their own updates (FPHL) and send the squared norm of what they keep. FAEL turns these scalars into
weights. Then SecAgg+ sums `u k D` and `u k` over the clients, and the server divides. `docs/secure.md` says what the server
sees, what this costs, and which checks it gives up.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedheal import methods
from fedheal.aggregate import Aggregator, chain, combine, reduce
from fedheal.aggregate.aggregator import Reducer
from fedheal.aggregate.draft import Draft, UpdateNorms
from fedheal.aggregate.fedheal_stages import BETA, TAU, fael_weights
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Floats
from fedheal.core.checks import check_among
from fedheal.core.layout import VARIANCE, Layout, Packed
from fedheal.core.parameter import Parameter
from fedheal.core.state import Nothing, State
from fedheal.core.updates import Updates
from fedheal.federation.cohort import Cohort
from fedheal.flower.node_registry import ReceivedReply
from fedheal.flower.presets import check_preset_arguments
from fedheal.flower.reply_reader import read_train_reply
from fedheal.flower.round_log import NodeRound
from fedheal.flower.secure_cohort import ScalarCohortBuilder, leave_out, select_clients
from fedheal.flower.secure_mod import BUFFER_NORM, DISTANCE, SecureSumMod, order_to_record
from fedheal.flower.secure_protocol import NO_REPLY, SumOutcome, sum_vectors
from fedheal.flower.secure_vector import (
    MAX_CLIENTS,
    SecureSumError,
    SecureSums,
    SumOrder,
    choose_range,
    find_extreme_weights,
)
from fedheal.flower.silent_nodes import SUM
from fedheal.flower.strategy import FairStrategy
from fedheal.methods import Method
from fedheal.methods.server_step import ServerStep

__all__ = ["SecureFedHEAL", "SecureStrategy", "SecureSumError", "SecureSumMod"]

THRESHOLD = Parameter("threshold", 0.5, "share of the clients that must stay until the end of a sum", gt=0, le=1)


@functools.partial(check_preset_arguments, own=("placement",))
def SecureFedHEAL(
    *,
    tau: float = TAU.default,
    beta: float = BETA.default,
    fael: str | bool = "momentum",
    threshold: float = THRESHOLD.default,
    stage_timeout: float = 300.0,
    **settings: Any,
) -> "SecureStrategy":
    """FedHEAL whose server sees sums only. Clients need `SecureSumMod`.

    Args:
        tau: As for `fedheal.aggregate.fedheal`.
        beta: As for `fedheal.aggregate.fedheal`.
        fael: `"momentum"`, or False to weight clients by their examples.
        threshold: The share of a sum's clients that must stay until its end; never fewer than 2.
        stage_timeout: How many seconds each of the four stages of a sum waits for replies.
        settings: The settings of `FairStrategy`. `min_replies` is at least 2, which is the default.

    Raises:
        ValueError: A parameter is out of range.

    >>> SecureFedHEAL(tau=0.4).name
    'fedavg+fedheal:tau=0.4 (secure aggregation)'
    """
    check_among("fael", fael, ("momentum", False))
    method = methods.get("fedheal", tau=tau, beta=beta, fael=fael)
    weights = chain(read_distances(), *([fael_weights(beta)] if fael else []))
    summed = Method(local=(), aggregator=Aggregator(weights), name=f"{method.name} (secure aggregation)")
    return SecureStrategy(summed, tau=tau, threshold=threshold, stage_timeout=stage_timeout, **settings)


def read_distances() -> Stage:
    """Return the stage that takes the norms of the masked updates from the clients' metric `distance`."""

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        squares = draft.metric(DISTANCE)[:, None]
        return replace(draft, norms=UpdateNorms(squares, np.zeros(squares.shape, np.int64))), state

    return Stage(lambda layout: Nothing(), apply, frozenset({DISTANCE}), gives=frozenset())


class SecureStrategy(FairStrategy):
    """A `FairStrategy` that gets the clients' updates from a secure sum; see `SecureFedHEAL`."""

    def __init__(self, method: Method, *, tau: float, threshold: float, stage_timeout: float, **settings: Any) -> None:
        THRESHOLD.check(threshold)
        Parameter("stage_timeout", 1.0, gt=0).check(stage_timeout)
        Parameter("min_replies", 2, ge=2).check(settings.setdefault("min_replies", 2))
        self.threshold, self.stage_timeout = threshold, stage_timeout
        self._sums: SecureSums | None = None
        self._sum_bytes = 0
        super().__init__(method, placement="client", tau=tau, **settings)

    def begin(self, initial_arrays: ArrayRecord) -> ArrayRecord:
        """Return the model to start from; see `FairStrategy.begin`."""
        arrays = super().begin(initial_arrays)
        self.rounds.builder = ScalarCohortBuilder(self.rounds.layout, self.requirements, read_train_reply)
        return arrays

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the messages that ask nodes to train; their updates are summed in `aggregate_train`."""
        self._grid = grid
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord | None]:
        """Weigh the clients, sum their updates and return the new model, or the old one if the sum failed."""
        self._sums, self._sum_bytes = None, 0
        result = super().aggregate_train(server_round, replies)
        self.rounds.count_bytes(0, self._sum_bytes)
        return result

    def _build_cohort(self, valid: list[ReceivedReply], current: NodeRound) -> Cohort:
        cohort = super()._build_cohort(valid, current)
        if not cohort.updates.clients:
            return cohort
        cohort = leave_out(cohort, find_extreme_weights(self._weigh(cohort.updates)))
        cohort = self.rounds.skip_small_cohort(cohort)
        if not cohort.updates.clients:
            return cohort
        clients = {reply.node: reply.client for reply in valid if reply.client in cohort.replies}
        failure, dropped = "", {}
        try:
            outcome, self._sums = self._sum_updates(cohort.updates, clients, current.number)
            dropped, self._sum_bytes = outcome.dropped, outcome.bytes_received
            current.bytes_sent += outcome.bytes_sent
        except SecureSumError as error:
            failure, dropped = f"the secure sum failed: {error}", error.dropped
        stalled = {node for node, why in dropped.items() if why.endswith(NO_REPLY)}
        self._silent.record_replies(clients, clients.keys() - stalled, SUM, current.number)
        reasons = {clients[node]: f"it dropped out of the secure sum {why}" for node, why in dropped.items()}
        cohort = leave_out(cohort, reasons)
        return cohort.skip_all(failure) if failure else cohort

    def _sum_updates(self, updates: Updates, clients: Mapping[int, str], number: int) -> tuple[SumOutcome, SecureSums]:
        """Sum the updates of these clients. Raise SecureSumError if that fails."""
        if len(clients) > MAX_CLIENTS:
            raise SecureSumError(f"{len(clients)} clients are more than {MAX_CLIENTS}: use a smaller fraction_train")
        planned: list[SecureSums] = []

        def make_orders(nodes: Sequence[int]) -> dict[int, RecordDict]:
            plan = self._plan_sums(select_clients(updates, [clients[node] for node in nodes]))
            planned.append(plan)
            ranges = plan.update_range, plan.buffer_range
            return {n: order_to_record(SumOrder(number, plan.shares[clients[n]], *ranges)) for n in nodes}

        sizes = self.rounds.layout.sizes()
        threshold = max(2, math.ceil(self.threshold * len(clients)))
        length, timeout = 2 * sizes.params + sizes.buffers, min(self.stage_timeout, self._timeout)
        outcome = sum_vectors(
            self._grid, clients, make_orders, length, number=number, threshold=threshold, timeout=timeout
        )
        present, plan = [clients[node] for node in outcome.nodes], planned[0]
        total = math.fsum(plan.weights[client] for client in present)
        weights = {client: plan.weights[client] / total for client in present}
        shares = {client: plan.shares[client] for client in present}
        sums = replace(plan, weights=weights, shares=shares, totals=outcome.total)
        sums.decode(sizes.params)  # an implausible sum ends the round here, before any state changes
        return outcome, sums

    def _plan_sums(self, updates: Updates) -> SecureSums:
        """Weigh these clients, and choose the ranges of their vectors."""
        weights = self._weigh(updates)
        largest = max(weights.values())
        shares = {client: weight / largest for client, weight in weights.items()}
        norms = updates.metrics[DISTANCE].sqrt().tolist()
        # A client may send the metric although the model has no buffers: then nobody has checked it.
        buffer_norms = updates.metrics[BUFFER_NORM].tolist() if self.rounds.layout.sizes().buffers else []
        plan = SecureSums(shares, weights, choose_range(norms), choose_range(buffer_norms), np.zeros(0))
        plan.compute_error_bound()  # fails here, not after the sum, if the weights cannot be summed
        return plan

    def _weigh(self, updates: Updates) -> dict[str, float]:
        """Return the clients' weights in this round; the state stays as it is."""
        state = self.rounds.state
        # Sites may drop out of the sum: `threshold` says how many must stay, and not `min_replies`.
        aggregator = replace(self.rounds.aggregator, reduce=_keep_model, min_updates=1)
        weighed = aggregator.apply(state.model, updates, state.aggregator)
        return dict(zip(updates.clients, weighed.weights.tolist(), strict=True))

    def _make_step(self, cohort: Cohort) -> ServerStep:
        step = super()._make_step(cohort)
        if self._sums is None:
            return step
        stage = _fix_weights(step.aggregator.stage, self._sums.weights)
        reduce_sums = make_summed_mean(self._sums, self.rounds.layout)
        return replace(step, aggregator=replace(step.aggregator, stage=stage, reduce=reduce_sums, min_updates=1))


def make_summed_mean(sums: SecureSums, layout: Layout) -> Reducer:
    """Return a reducer that makes the new model from the two sums: `sum u k D / sum u k`."""
    variances = [e for e in layout.entries if e.kind == "buffer" and e.name.endswith(VARIANCE)]

    def reduce_sums(draft: Draft, weights: Floats) -> tuple[Packed, dict[str, Any]]:
        numerator, denominator, buffers = sums.decode(draft.sizes.params)
        step = combine(torch.zeros_like(numerator), numerator, denominator)
        model, report = reduce.mean(replace(draft, step=step), weights)
        before = draft.model.buffers
        about = {
            "clients": len(sums.shares),
            "range": sums.update_range,
            "bound": sums.compute_error_bound(),
            "kept_by_one": sums.measure_exposure(denominator),
        }
        report = report | {"unkept": float((denominator == 0).double().mean()), "secure_sum": about}
        after = (before + buffers).to(before.dtype)
        for entry in variances:  # rounding, or a hostile client, could make one negative: its root is NaN at every site
            after[entry.start : entry.stop].clamp_(min=0)
        return replace(model, buffers=after), report

    return reduce_sums


def _fix_weights(stage: Stage, weights: Mapping[str, float]) -> Stage:
    """Return the stage with the weights that the clients were given: one who left since would change them all."""

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        draft, after = stage.apply(draft, state)
        return replace(draft, weights=np.array([weights[client] for client in draft.clients])), after

    return replace(stage, apply=apply, parts=None)


def _keep_model(draft: Draft, weights: Floats) -> tuple[Packed, dict[str, Any]]:
    return draft.model, {}
