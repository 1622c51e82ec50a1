"""A round's aggregation in progress: the draft that stages fill in, and the masks that it may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import Tensor

from fedheal.core.arrays import Floats, Integers
from fedheal.core.layout import Packed, Sizes
from fedheal.core.updates import Updates


@dataclass(frozen=True)
class Kept:
    """Which entries of a cohort's updates count, without a mask in memory.

    Client i's sign counts stand in `counts[slots[i]]` and include this round. With `up = sign * D >= 0`, an entry is kept
    where `counts >= at_least[i]` if it goes up and where `counts < below[i]` if it goes down.
    """

    counts: Tensor  # [slots, G (+ B + C)]
    slots: Integers
    at_least: Integers
    below: Integers
    sign: int


@dataclass(frozen=True)
class Graded:
    """Like `Kept`, for histories that fade and for entries that count by degree.

    Of client i's history, which weighs `total[i]`, the part that goes the way of this round's update is `agree`: the count
    itself if it goes up, else what is left of the total. The counts include this round; with `past` it is taken out again.
    An entry is kept where `agree >= need[i]` and then counts for 1 or, if `soft`, for its consistency `agree / total[i]`
    (1 where there is no history).
    """

    counts: Tensor  # [slots, G (+ B + C)], whole numbers or float32
    slots: Integers
    total: Floats
    need: Floats
    past: bool
    sign: int
    soft: bool


Mask = Kept | Graded


@dataclass(frozen=True)
class Measured:
    """Per client and parameter tensor: the squared norm of what counts of its entries, and how many count."""

    squares: Floats  # [k, tensors]
    kept: Integers  # [k, tensors]


@dataclass(frozen=True)
class Draft:
    """A round's aggregation while the stages fill it in.

    `rows`: the accepted rows of `updates`, in the order of the clients' ids, so that nothing can depend on the order of
    arrival. `weights [k]` and `kept` belong to these rows; `None` means example shares, and everything.
    `unnormalised_weights [k]`: the weights before they are normalised over this cohort; `None` means the weights
    themselves. `scale` is how far along the mean update the parameters go. `step [G]`, float64: the update itself, where it is
    no (masked) mean.
    """

    sizes: Sizes
    model: Packed
    updates: Updates
    rows: Integers
    kernel: ModuleType
    donate: bool = False
    weights: Floats | None = None
    unnormalised_weights: Floats | None = None
    kept: Mask | None = None
    measured: Measured | None = None
    scale: float = 1.0
    step: Tensor | None = None
    report: Mapping[str, Any] = field(default_factory=dict)

    @property
    def clients(self) -> tuple[str, ...]:
        return tuple(self.updates.clients[row] for row in self.rows)

    @property
    def num_examples(self) -> Floats:
        return self.updates.num_examples.numpy()[self.rows]

    @property
    def domains(self) -> tuple[str, ...]:
        """Of the accepted clients; a stage that asks for them needs `"domain"`."""
        assert self.updates.domains is not None
        return tuple(self.updates.domains[row] for row in self.rows)

    def metric(self, name: str) -> Floats:
        return self.updates.metrics[name].numpy()[self.rows]
