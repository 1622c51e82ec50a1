"""From a round's sound replies to one cohort of `Updates`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedheal.flower.identity import Heard
from fedheal.flower.replies import Admission, Refused, Trained, Unmeasured, difference, trained
from fedheal.layout import Layout, Packed
from fedheal.types import Reply, Updates


@dataclass(frozen=True)
class Cohort:
    """The updates that can be aggregated, what else their clients sent, and who was left out and why."""

    updates: Updates
    read: Mapping[str, Trained]
    skipped: dict[str, str]
    unmeasured: str | None = None  # a needed metric that nobody sent


class Intake:
    """Reads replies into a matrix whose memory is kept from round to round: asking for it anew costs more than filling it."""

    def __init__(self, layout: Layout, admission: Admission, budget: int | None = None) -> None:
        self.layout, self.admission, self.budget = layout, admission, budget
        self._matrix: NDArray[Any] = np.empty((0, 0), np.float32)

    def cohort(self, sound: Iterable[Heard], model: Packed) -> Cohort:
        read: dict[str, Trained] = {}
        skipped: dict[str, str] = {}
        lacking: list[str] = []
        for one in sound:
            try:
                read[one.client] = trained(one, self.layout, self.admission)
            except Refused as why:
                skipped[one.client] = str(why)
                lacking += [why.metric] if isinstance(why, Unmeasured) else []
        unmeasured = lacking[0] if lacking and not read else None
        self._same_messages(read, skipped)
        ordered = dict(sorted(read.items()))
        updates = self._updates(ordered, model, skipped)
        return Cohort(updates, ordered, skipped | dict(updates.refused), unmeasured)

    def _same_messages(self, read: dict[str, Trained], skipped: dict[str, str]) -> None:
        """What the terms tell the server must look alike: who differs from most others is left out."""
        looks = {client: _look(one) for client, one in read.items()}
        if len(set(looks.values())) > 1:
            usual = Counter(looks.values()).most_common(1)[0][0]
            for client in [client for client, look in looks.items() if look != usual]:
                skipped[client] = "what its local method tells the server is unlike that of most clients"
                del read[client]

    def _updates(self, read: Mapping[str, Trained], model: Packed, skipped: dict[str, str]) -> Updates:
        size, dtype = self.layout.sizes().params, model.params.numpy().dtype
        spills = self.budget is not None and len(read) * size * dtype.itemsize > self.budget
        rows = 1 if spills else len(read)
        if len(self._matrix) < rows or self._matrix.shape[1] != size or self._matrix.dtype != dtype:
            self._matrix = np.empty((rows, size), dtype)
        if spills:  # one after another through one row, which `collect` takes to a file
            replies = (self._reply(one, model, self._matrix[0], skipped) for one in read.values())
            sound = (reply for reply in replies if reply is not None)
            return Updates.collect(sound, self.budget, on_bad_update="skip", layout=self.layout)
        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:  # numpy lets go of the lock
            made = list(pool.map(lambda one, row: self._reply(one, model, row, skipped), read.values(), self._matrix))
        taken = [reply for reply in made if reply is not None]
        places = [place for place, reply in enumerate(made) if reply is not None]
        deltas = self._matrix[: len(made)] if len(taken) == len(made) else self._matrix[places]
        names = sorted({name for reply in taken for name in reply.metrics})
        return Updates(
            [reply.client for reply in taken],
            torch.from_numpy(deltas),
            [reply.num_examples for reply in taken],
            _stacked([reply.buffers for reply in taken]),
            _stacked([reply.counters for reply in taken]),
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


def _look(one: Trained) -> tuple[Any, ...]:
    return tuple(
        tuple(sorted((name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in group.items()))
        for group in one.messages
    )


def _stacked(vectors: list[Any]) -> torch.Tensor | None:
    return torch.from_numpy(np.stack(vectors)) if vectors and vectors[0] is not None else None
