"""A round's cohort before its updates are summed: scalars and counters, and no update of any client."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray

from fedheal.core.layout import Packed
from fedheal.core.state import RunState
from fedheal.core.updates import Updates
from fedheal.federation.cohort import Cohort, CohortBuilder
from fedheal.federation.message_checks import SeenMessages
from fedheal.federation.replies import MissingRequirement, RejectedReply, TrainReply
from fedheal.federation.reply_limits import EXTRA_FACTOR, MAX_COUNTER, MAX_METRIC, find_counter_jump, find_diverged
from fedheal.flower.messages import view_array
from fedheal.flower.node_registry import ReceivedReply
from fedheal.flower.reply_reader import read_train_metrics
from fedheal.flower.secure_mod import BUFFER_NORM, COUNTERS, DISTANCE


class ScalarCohortBuilder(CohortBuilder[ReceivedReply]):
    """Reads replies without a model: the rows of the cohort's matrix are zeros that take no memory."""

    def build(
        self,
        received: Iterable[ReceivedReply],
        state: RunState,
        seen: SeenMessages | None = None,
        count_clients: Callable[[Collection[str]], int] = len,
    ) -> Cohort:
        """Build the cohort from the clients' scalars. There are no messages of local terms."""
        replies: dict[str, TrainReply] = {}
        counters: dict[str, NDArray[Any]] = {}
        skipped: dict[str, str] = {}
        missing: list[str] = []
        for reply in received:
            try:
                replies[reply.client], counters[reply.client] = self._read(reply, state.model)
            except RejectedReply as error:
                skipped[reply.client] = str(error)
                missing += [error.needed] if isinstance(error, MissingRequirement) else []
        missing_requirement = missing[0] if missing and not replies else None
        norms = {client: math.sqrt(reply.metrics[DISTANCE]) for client, reply in replies.items()}
        too_long = self._find_too_long(norms)
        if self.requirements.skips_diverged:
            too_long |= find_diverged(norms, state.model.params)
        if self.layout.sizes().buffers:
            buffer_norms = {client: reply.metrics[BUFFER_NORM] for client, reply in replies.items()}
            too_long |= find_far_buffers(buffer_norms, float(state.model.buffers.double().norm()))
        skipped |= too_long
        replies = {client: reply for client, reply in sorted(replies.items()) if client not in too_long}
        updates = self._stack(replies, counters, state.model)
        return Cohort(updates, replies, skipped, missing_requirement, get_norms=lambda: norms)

    def _read(self, reply: ReceivedReply, model: Packed) -> tuple[TrainReply, NDArray[Any]]:
        """Return a reply's scalars and counters. Raise RejectedReply if they cannot count."""
        content, sizes = reply.message.content, self.layout.sizes()
        if others := sorted(set(content.array_records) - {COUNTERS}):
            needed = "clients with SecureSumMod() in their app's mods"
            raise MissingRequirement(f"it sends {others[:3]} without masks, which is not used", needed)
        num_examples, metrics = read_train_metrics(content, self.requirements)
        for name in (DISTANCE, BUFFER_NORM) if sizes.buffers else (DISTANCE,):
            if not 0 <= metrics.get(name, -1.0) < math.inf:
                raise RejectedReply(f"its metric '{name}' must be a number from 0, got {metrics.get(name)}")
            if metrics[name] > MAX_METRIC:
                raise RejectedReply(f"its metric '{name}' = {metrics[name]:g} is beyond {MAX_METRIC:g}")
        scalars = TrainReply(reply.client, reply.domain, {}, num_examples, metrics, (), None)
        return scalars, self._read_counters(content, model) if sizes.counters else np.zeros(0, np.int64)

    def _read_counters(self, content: RecordDict, model: Packed) -> NDArray[Any]:
        size = self.layout.sizes().counters
        try:
            counters = view_array(content.array_records[COUNTERS]["counters"])
        except (KeyError, ValueError):
            raise RejectedReply("its counters are missing or cannot be read") from None
        is_right = counters.shape == (size,) and counters.dtype == np.int64
        if not (is_right and (abs(counters.astype(np.float64)) <= MAX_COUNTER).all()):
            raise RejectedReply(f"its counters must be {size} whole numbers up to {MAX_COUNTER}, as int64")
        sent = model.counters.numpy()
        for entry in (entry for entry in self.layout.entries if entry.kind == "counter"):
            part = slice(entry.start, entry.stop)
            most = 1 if entry.dtype == torch.bool else torch.iinfo(entry.dtype).max
            if counters[part].max(initial=0) > most:
                raise RejectedReply(f"its '{entry.name}' counts beyond {entry.dtype}")
            if jump := find_counter_jump(entry.name, sent[part], counters[part]):
                raise RejectedReply(jump)
        return counters

    def _stack(self, replies: Mapping[str, TrainReply], counters: Mapping[str, NDArray[Any]], model: Packed) -> Updates:
        rows, sizes = len(replies), self.layout.sizes()
        names = sorted({name for reply in replies.values() for name in reply.metrics})
        return Updates(
            replies,
            torch.zeros(1, 1).expand(rows, sizes.params),
            [reply.num_examples for reply in replies.values()],
            buffers=model.buffers.expand(rows, -1) if sizes.buffers else None,
            counters=np.stack([counters[client] for client in replies]) if sizes.counters and replies else None,
            metrics={name: [reply.metrics.get(name, math.nan) for reply in replies.values()] for name in names},
            domains=[reply.domain for reply in replies.values()],
        )


def find_far_buffers(norms: Mapping[str, float], model_norm: float) -> dict[str, str]:
    """Return the clients whose buffers would make the common range too coarse for the others', with the reason.

    A norm may be `EXTRA_FACTOR` times the cohort's median or the norm of the model's own buffers, whichever is larger. In first
    rounds all buffers may move far beyond the model's; in late ones they hardly move, and a newcomer's still may. With the
    model's norm a client that claims next to nothing cannot exclude the only other one.

    Args:
        norms: By client, the norm of its buffers' change.
        model_norm: The norm of the buffers that the clients were sent.

    >>> find_far_buffers({"a": 1.0, "b": 20.0, "c": 5e4}, model_norm=8.0)
    {'c': 'its buffers moved by 50000, more than 1000 times the median of this round and the norm of the buffers it was sent'}
    """
    ordered = sorted(norms.values())
    median = ordered[(len(ordered) - 1) // 2] if ordered else 0.0
    limit = EXTRA_FACTOR * (max(median, model_norm) or 1.0)  # nothing has moved yet, and all buffers are 0
    than = f"more than {EXTRA_FACTOR:g} times the median of this round and the norm of the buffers it was sent"
    return {client: f"its buffers moved by {norm:g}, {than}" for client, norm in norms.items() if norm > limit}


def leave_out(cohort: Cohort, reasons: Mapping[str, str]) -> Cohort:
    """Return the cohort without these clients."""
    left = [client for client in cohort.updates.clients if client not in reasons]
    replies = {client: cohort.replies[client] for client in left}
    return replace(
        cohort, updates=select_clients(cohort.updates, left), replies=replies, skipped=cohort.skipped | dict(reasons)
    )


def select_clients(updates: Updates, clients: Sequence[str]) -> Updates:
    """Return the updates of these clients, in the order of the cohort."""
    rows = [row for row, client in enumerate(updates.clients) if client in set(clients)]
    buffers, counters, domains = updates.buffers, updates.counters, updates.domains
    return Updates(
        [updates.clients[row] for row in rows],
        updates.deltas[:1].expand(len(rows), -1),
        updates.num_examples[rows],
        buffers=None if buffers is None else buffers[:1].expand(len(rows), -1),
        counters=None if counters is None else counters[rows],
        metrics={name: column[rows] for name, column in updates.metrics.items()},
        domains=None if domains is None else [domains[row] for row in rows],
    )
