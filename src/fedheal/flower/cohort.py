"""Put a round's valid replies together into one cohort of `Updates`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedheal.core.layout import Layout, Packed
from fedheal.core.state import RunState
from fedheal.core.updates import Reply, Updates
from fedheal.flower.messages import widen_bfloat16
from fedheal.flower.node_registry import ReceivedReply
from fedheal.flower.replies import (
    MissingRequirement,
    RejectedReply,
    ReplyRequirements,
    TrainReply,
    read_train_reply,
    write_delta,
)
from fedheal.local.term import Arrays, ServerContext, Term


@dataclass(frozen=True)
class Cohort:
    """The updates to aggregate, the replies they come from, and the skipped clients with the reasons."""

    updates: Updates
    replies: Mapping[str, TrainReply]
    skipped: dict[str, str]
    missing_requirement: str | None = None  # what the method needs, if no reply has it
    message_digests: dict[str, str] = field(default_factory=dict)  # by client; see `digest_messages`

    def skip_all(self, reason: str) -> Cohort:
        """Return the cohort with every client skipped."""
        nobody = Updates([], self.updates.deltas[:0], [], domains=[])
        skipped = self.skipped | dict.fromkeys(map(str, self.updates.clients), reason)
        return Cohort(nobody, {}, skipped, message_digests=self.message_digests)


class CohortBuilder:
    """Reads replies into a matrix that is reused from round to round: allocating it anew costs more than filling it."""

    def __init__(
        self, layout: Layout, requirements: ReplyRequirements, terms: Sequence[Term] = (), budget: int | None = None
    ) -> None:
        self.layout, self.requirements, self.terms, self.budget = layout, requirements, terms, budget
        self._matrix = torch.empty(0, 0)

    def build(self, received: Iterable[ReceivedReply], state: RunState, known_digests: Mapping[str, str]) -> Cohort:
        """Build the cohort. `known_digests`: of each client's last usable messages."""
        replies: dict[str, TrainReply] = {}
        skipped: dict[str, str] = {}
        missing: list[str] = []
        for reply in received:
            try:
                replies[reply.client] = read_train_reply(reply, self.layout, self.requirements)
            except RejectedReply as error:
                skipped[reply.client] = str(error)
                missing += [error.needed] if isinstance(error, MissingRequirement) else []
        if self.terms:
            missing += self._skip_unusable_messages(replies, state, known_digests, skipped)
        missing_requirement = missing[0] if missing and not replies else None
        digests = {client: digest_messages(reply.messages) for client, reply in replies.items()} if self.terms else {}
        _skip_unusual_messages(replies, {**known_digests, **digests}, skipped)
        replies = dict(sorted(replies.items()))
        updates = self._collect_updates(replies, state.model, skipped)
        return Cohort(updates, replies, skipped | dict(updates.refused), missing_requirement, digests)

    def _skip_unusable_messages(
        self, replies: dict[str, TrainReply], state: RunState, known_digests: Mapping[str, str], skipped: dict[str, str]
    ) -> list[str]:
        """Skip clients whose messages the server's terms cannot absorb; return what is needed instead."""
        errors: dict[str, str | None] = dict.fromkeys(known_digests.values())  # these were usable before
        missing = []
        for client, reply in list(replies.items()):
            digest = digest_messages(reply.messages)
            if digest not in errors:
                errors[digest] = find_absorb_error(self.terms, self.layout, state, reply.messages)
            if errors[digest] is not None:
                skipped[client] = f"the server cannot use the messages of its local terms ({errors[digest]})"
                missing.append(f"messages of the clients' local terms that the server can use ({errors[digest]})")
                del replies[client]
        return missing

    def _collect_updates(self, replies: Mapping[str, TrainReply], model: Packed, skipped: dict[str, str]) -> Updates:
        """Write the updates into the matrix, or through one row into a file if they exceed the budget."""
        wide = Packed(widen_bfloat16(model.params), widen_bfloat16(model.buffers), model.counters)
        size, dtype = self.layout.sizes().params, wide.params.dtype
        exceeds_budget = self.budget is not None and len(replies) * size * dtype.itemsize > self.budget
        num_rows = 1 if exceeds_budget else len(replies)
        if len(self._matrix) < num_rows or self._matrix.shape[1] != size or self._matrix.dtype != dtype:
            self._matrix = torch.empty(num_rows, size, dtype=dtype)

        def make_update(reply: TrainReply, row: Tensor) -> Reply | None:
            return self._make_update(reply, wide, row, skipped)

        if exceeds_budget:
            updates = (make_update(reply, self._matrix[0]) for reply in replies.values())
            return self._collect(updates, model, self.budget, keep=False)
        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:  # numpy releases the GIL
            return self._collect(pool.map(make_update, replies.values(), self._matrix), model, None, keep=True)

    def _collect(self, updates: Iterable[Reply | None], model: Packed, budget: int | None, keep: bool) -> Updates:
        narrow = (_match_dtypes(model, update) for update in updates if update is not None)
        return Updates.collect(narrow, budget, on_bad_update="skip", layout=self.layout, keep=keep)

    def _make_update(self, reply: TrainReply, model: Packed, row: Tensor, skipped: dict[str, str]) -> Reply | None:
        """Write a client's update into its row; return None if its norm is too large."""
        max_norm, delta = self.requirements.max_norm, row.numpy()
        buffers, counters = write_delta(self.layout, reply.arrays, model, delta)
        if reply.mask is not None:
            np.multiply(delta, reply.mask, out=delta)  # entries that the client says it dropped do not count
        if max_norm is not None and (norm := float(np.linalg.norm(delta))) > max_norm:
            skipped[reply.client] = f"its update has norm {norm:g}, more than max_norm = {max_norm:g}"
            return None
        return Reply(reply.client, row, reply.num_examples, buffers, counters, reply.metrics, reply.domain)


def digest_messages(messages: Sequence[Arrays]) -> str:
    """Return a digest of the names, shapes and dtypes of a client's messages."""
    described = [sorted((name, list(t.shape), str(t.dtype)) for name, t in group.items()) for group in messages]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


def find_absorb_error(terms: Sequence[Term], layout: Layout, state: RunState, messages: Sequence[Arrays]) -> str | None:
    """Return the error if the terms cannot absorb these messages. It is tried out: only a term knows what it needs."""
    updates = Updates(["client"], torch.zeros(1, layout.sizes().params, dtype=state.model.params.dtype), [1])
    weights = torch.ones(1, dtype=torch.float64)
    context = ServerContext(
        round=state.round + 1,
        rounds=0,
        clients=1,
        updates=updates,
        weights=weights,
        unnormalised_weights=weights,
        layout=layout,
        slots={},
    )
    for term, message, before in zip(terms, messages, state.terms, strict=True):
        try:
            term.absorb(state.model, state.model, [message], before.shared, context)
        except Exception as error:  # terms need not check: missing or misshapen messages raise nearly anything
            return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def _skip_unusual_messages(replies: dict[str, TrainReply], digests: Mapping[str, str], skipped: dict[str, str]) -> None:
    """Skip clients whose messages differ in shape from those of most clients, each as last seen."""
    usual = Counter(digests.values()).most_common(1)[0][0] if digests else None
    for client in [client for client in replies if digests.get(client) != usual]:
        skipped[client] = "the messages of its local terms differ in names, shapes or dtypes from those of most clients"
        del replies[client]


def _match_dtypes(model: Packed, update: Reply) -> Reply:
    """Convert an update to the model's dtypes, as in a simulation."""
    buffers = None if update.buffers is None else torch.as_tensor(update.buffers).to(model.buffers.dtype)
    return update._replace(delta=torch.as_tensor(update.delta).to(model.params.dtype), buffers=buffers)
