"""A round's aggregation in progress: the draft that stages fill in, and the masks that it may hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedheal.core.arrays import Floats, Integers, upload
from fedheal.core.layout import Packed, Sizes
from fedheal.core.updates import Updates


@dataclass(frozen=True, kw_only=True)
class CountMask:
    """Which entries of a cohort's updates count, as sign counts and thresholds: no mask is stored.

    Client i's sign counts are `counts[slots[i]]` and include this round. With `up = sign * D >= 0`, an entry is kept
    where `counts >= at_least[i]` if it goes up, and where `counts < below[i]` if it goes down.
    """

    counts: Tensor  # [slots, G (+ B + C)]
    slots: Integers
    at_least: Integers
    below: Integers
    sign: int


@dataclass(frozen=True, kw_only=True)
class SoftMask:
    """A `CountMask` for histories that fade and for entries that count by degree.

    Of client i's history of length `total[i]`, `agree` counts the rounds with the direction of this round's update. It
    is the count if the entry goes up, else the total less the count. The counts include this round; with `past` it is
    taken out again. An entry is kept where `agree >= need[i]` and counts for 1 or, if `soft`, for `agree / total[i]` (1
    without a history).
    """

    counts: Tensor  # [slots, G (+ B + C)], integers or float32
    slots: Integers
    total: Floats
    need: Floats
    past: bool
    sign: int
    soft: bool


Mask = CountMask | SoftMask


@dataclass(frozen=True)
class UpdateNorms:
    """Per client and parameter tensor: the squared norm of the masked update, and how many entries are kept."""

    squares: Floats  # [k, tensors]
    kept: Integers  # [k, tensors]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A round's aggregation while the stages fill it in."""

    sizes: Sizes
    model: Packed  # before the round
    updates: Updates
    rows: Integers  # the accepted rows of `updates`, sorted by client id, so that the order of arrival changes nothing
    kernel: ModuleType  # goes over the updates
    donate: bool = False  # whether the memory of the old state may be reused
    weights: Floats | None = None  # [k], in the order of `rows`; None means example shares
    unnormalised_weights: Floats | None = None  # [k], before they are normalised over this cohort; None means `weights`
    mask: Mask | None = None  # which entries of the updates count; None means all
    norms: UpdateNorms | None = None  # of the masked updates, where a stage has measured them
    scale: float = 1.0  # a factor on the mean update of the parameters
    step: Tensor | None = None  # [G], float64: the update of the parameters, where it is no (masked) mean
    running: tuple[Integers, Integers] | None = None  # buffers that are means and variances, for their total variance
    report: Mapping[str, Any] = field(default_factory=dict)  # JSON-ready

    @property
    def clients(self) -> tuple[str, ...]:
        return tuple(self.updates.clients[row] for row in self.rows)

    @property
    def num_examples(self) -> Floats:
        return self.updates.num_examples.numpy()[self.rows]

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains of the accepted clients. A stage that reads them must name `"domain"` in its `needs`."""
        if self.updates.domains is None:
            raise ValueError(f"the updates have no domains: name 'domain' {_show_needs('domain')}")
        return tuple(self.updates.domains[row] for row in self.rows)

    def metric(self, name: str) -> Floats:
        """Return this metric of the accepted clients, which a stage must name in its `needs`. Raise ValueError without it."""
        if name not in self.updates.metrics:
            others = f", only {', '.join(self.updates.metrics)}" if self.updates.metrics else ""
            raise ValueError(f"the updates have no metric '{name}'{others}: name it {_show_needs(name)}")
        return self.updates.metrics[name].numpy()[self.rows]

    def key_by_client(self, column: Floats) -> dict[str, float]:
        return dict(zip(self.clients, column.tolist(), strict=True))

    def measure_norms(self) -> UpdateNorms:
        """Return the norms that a stage has measured, or measure those of the whole updates."""
        return self.norms or self.kernel.measure(self.updates.deltas, self.rows, self.sizes.lengths)

    def select_rows(self, matrix: Tensor) -> Tensor:
        """Return the accepted rows of a matrix with a row per client, in new memory."""
        return matrix[upload(torch.from_numpy(self.rows), matrix.device)]

    def view_rows(self, matrix: Tensor) -> Tensor:
        """Return the accepted rows for reading: the matrix itself, without a copy, if all rows are accepted in order."""
        return matrix if self.takes_all_rows else self.select_rows(matrix)

    @cached_property
    def takes_all_rows(self) -> bool:
        """Whether all clients are accepted, in the order of the updates."""
        return np.array_equal(self.rows, np.arange(len(self.updates.clients)))


def _show_needs(name: str) -> str:
    return f"in the stage's `needs`, as in needs=frozenset({{{name!r}}})"
