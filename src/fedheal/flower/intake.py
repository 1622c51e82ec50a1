"""From a round's sound replies to one cohort of `Updates`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedheal.core.layout import Layout, Packed
from fedheal.core.state import RunState
from fedheal.core.updates import Reply, Updates
from fedheal.flower import messages as wire
from fedheal.flower.node_registry import Heard
from fedheal.flower.replies import Admission, Refused, Trained, Unfit, difference, trained
from fedheal.flower.terms import look, trouble
from fedheal.local.term import Term


@dataclass(frozen=True)
class Cohort:
    """The updates that can be aggregated, what else their clients sent, and who was left out and why."""

    updates: Updates
    read: Mapping[str, Trained]
    skipped: dict[str, str]
    needed: str | None = None  # by the method, and no reply had it
    looks: dict[str, str] = field(default_factory=dict)  # of what the clients' terms tell the server

    def emptied(self, why: str) -> Cohort:
        """Nobody, because of `why`; how their messages look is known all the same."""
        nobody = Updates([], self.updates.deltas[:0], [], domains=[])
        skipped = self.skipped | dict.fromkeys(map(str, self.updates.clients), why)
        return Cohort(nobody, {}, skipped, looks=self.looks)


class Intake:
    """Reads replies into a matrix whose memory is kept from round to round: asking for it anew costs more than filling it."""

    def __init__(
        self, layout: Layout, admission: Admission, terms: Sequence[Term] = (), budget: int | None = None
    ) -> None:
        self.layout, self.admission, self.terms, self.budget = layout, admission, terms, budget
        self._matrix: NDArray[Any] = np.empty((0, 0), np.float32)

    def cohort(self, sound: Iterable[Heard], state: RunState, looks: Mapping[str, str]) -> Cohort:
        """`looks`: how each client's messages last looked, as far as the terms could use them."""
        read: dict[str, Trained] = {}
        skipped: dict[str, str] = {}
        lacking: list[str] = []
        for one in sound:
            try:
                read[one.client] = trained(one, self.layout, self.admission)
            except Refused as why:
                skipped[one.client] = str(why)
                lacking += [why.needed] if isinstance(why, Unfit) else []
        if self.terms:
            lacking += self._check_told(read, state, looks, skipped)
        needed = lacking[0] if lacking and not read else None
        seen = {client: look(one.messages) for client, one in read.items()} if self.terms else {}
        self._same_messages(read, {**looks, **seen}, skipped)
        ordered = dict(sorted(read.items()))
        updates = self._updates(ordered, state.model, skipped)
        return Cohort(updates, ordered, skipped | dict(updates.refused), needed, seen)

    def _check_told(
        self, read: dict[str, Trained], state: RunState, looks: Mapping[str, str], skipped: dict[str, str]
    ) -> list[str]:
        """Leave out whose terms' messages the server's terms cannot take in; what is needed instead."""
        found = dict.fromkeys(looks.values())  # could be used before
        lacking = []
        for client, one in list(read.items()):
            seen = look(one.messages)
            if seen not in found:
                found[seen] = trouble(self.terms, self.layout, state, one.messages)
            if found[seen] is not None:
                skipped[client] = f"what its local method tells the server cannot be used ({found[seen]})"
                lacking.append(f"from its clients' terms what the server's can use ({found[seen]})")
                del read[client]
        return lacking

    def _same_messages(self, read: dict[str, Trained], looks: Mapping[str, str], skipped: dict[str, str]) -> None:
        """What the terms tell the server must look alike: who differs from most clients, each as last heard, is left out."""
        usual = Counter(looks.values()).most_common(1)[0][0] if looks else None
        for client in [client for client in read if looks.get(client) != usual]:
            skipped[client] = "what its local method tells the server is unlike that of most clients"
            del read[client]

    def _updates(self, read: Mapping[str, Trained], model: Packed, skipped: dict[str, str]) -> Updates:
        exact, model = model, Packed(wire.widened(model.params), wire.widened(model.buffers), model.counters)
        size, dtype = self.layout.sizes().params, model.params.numpy().dtype
        spills = self.budget is not None and len(read) * size * dtype.itemsize > self.budget
        rows = 1 if spills else len(read)
        if len(self._matrix) < rows or self._matrix.shape[1] != size or self._matrix.dtype != dtype:
            self._matrix = np.empty((rows, size), dtype)
        if spills:  # one after another through one row, which `collect` takes to a file
            replies = (self._reply(one, model, self._matrix[0], skipped) for one in read.values())
            sound = (_of_kind(exact, reply) for reply in replies if reply is not None)
            return Updates.collect(sound, self.budget, on_bad_update="skip", layout=self.layout)
        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:  # numpy lets go of the lock
            made = list(pool.map(lambda one, row: self._reply(one, model, row, skipped), read.values(), self._matrix))
        taken = [reply for reply in made if reply is not None]
        places = [place for place, reply in enumerate(made) if reply is not None]
        deltas = self._matrix[: len(made)] if len(taken) == len(made) else self._matrix[places]
        names = sorted({name for reply in taken for name in reply.metrics})
        return Updates(
            [reply.client for reply in taken],
            torch.from_numpy(deltas).to(exact.params.dtype),
            [reply.num_examples for reply in taken],
            _stacked([reply.buffers for reply in taken], exact.buffers.dtype),
            _stacked([reply.counters for reply in taken], exact.counters.dtype),
            {name: [reply.metrics.get(name, float("nan")) for reply in taken] for name in names},
            domains=[str(reply.domain) for reply in taken],
        )

    def _reply(self, one: Trained, model: Packed, row: NDArray[Any], skipped: dict[str, str]) -> Reply | None:
        """A client's update, written into its row; nothing where it is too long."""
        bound = self.admission.max_norm
        buffers, counters = difference(self.layout, one.arrays, model, row)
        if one.kept is not None:
            np.multiply(row, one.kept, out=row)  # what a client says it did not keep does not count
        if bound is not None and (norm := float(np.linalg.norm(row))) > bound:
            skipped[one.client] = f"its update has norm {norm:g}, more than max_norm = {bound:g}"
            return None
        return Reply(one.client, torch.from_numpy(row), one.num_examples, buffers, counters, one.metrics, one.domain)


def _stacked(vectors: list[Any], dtype: torch.dtype) -> torch.Tensor | None:
    return torch.from_numpy(np.stack(vectors)).to(dtype) if vectors and vectors[0] is not None else None


def _of_kind(model: Packed, reply: Reply) -> Reply:
    """A reply in the dtypes of the model, as a simulation would have made it."""
    buffers = None if reply.buffers is None else torch.as_tensor(reply.buffers).to(model.buffers.dtype)
    return reply._replace(delta=torch.as_tensor(reply.delta).to(model.params.dtype), buffers=buffers)
