"""What travels between the parts: one cohort's updates, the draft that the stages fill, what comes out.

Frozen dataclasses. A cohort of K clients sends one matrix of updates `[K, G]`, `delta = local - global` as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedheal.layout import Layout, Packed, Sizes

Array = Tensor | NDArray[Any]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Reply(NamedTuple):
    """What one client sends back; a plain tuple `(client, delta, num_examples)` will do as well."""

    client: str | int
    delta: Array
    num_examples: float
    buffers: Array | None = None
    counters: Array | None = None
    metrics: Mapping[str, float] = {}
    domain: str | None = None


@dataclass(frozen=True, init=False)
class Updates:
    """One cohort's updates, a row a client.

    `clients`: stable ids (ints become strings). `deltas [K, G]`. `num_examples [K]`. `buffers [K, B]` and
    `counters [K, C]`: the local *values*, or `None` where the model's own stay. `metrics`: name -> `[K]`, for example the
    `loss` of the received model. `refused`: clients whose reply could not even be put into the matrix, with the reason.
    `domains`: the domain of each client, `""` where it did not say, or `None` where nobody did.

    >>> Updates(["a", 7], np.zeros((2, 3)), [10, 20]).clients
    ('a', '7')
    """

    clients: tuple[str, ...]
    deltas: Tensor
    num_examples: Tensor
    buffers: Tensor | None
    counters: Tensor | None
    metrics: Mapping[str, Tensor]
    refused: Mapping[str, str]
    domains: tuple[str, ...] | None

    def __init__(
        self,
        clients: Iterable[str | int],
        deltas: Array | Sequence[Array],
        num_examples: Array | Sequence[float],
        buffers: Array | Sequence[Array] | None = None,
        counters: Array | Sequence[Array] | None = None,
        metrics: Mapping[str, Array | Sequence[float]] | None = None,
        refused: Mapping[str, str] | None = None,
        domains: Sequence[str] | None = None,
    ) -> None:
        ids = tuple(client_id(c) for c in clients)
        put = object.__setattr__
        put(self, "clients", ids)
        put(self, "deltas", _matrix("deltas", deltas, ids))
        put(self, "num_examples", _column("num_examples", num_examples, ids))
        put(self, "buffers", None if buffers is None else _matrix("buffers", buffers, ids))
        put(self, "counters", None if counters is None else _matrix("counters", counters, ids))
        put(self, "metrics", {name: _column(f"metrics['{name}']", v, ids) for name, v in (metrics or {}).items()})
        put(self, "refused", dict(refused or {}))
        put(self, "domains", None if domains is None else _names("domains", domains, ids))

    @staticmethod
    def collect(
        replies: Iterable[Reply | tuple[Any, ...]],
        budget: int | None = None,
        on_bad_update: str = "raise",
        layout: Layout | None = None,
        folder: str | None = None,
        keep: bool = False,
    ) -> Updates:
        """Take one reply at a time into a matrix; see `fedheal.collect.collect`."""
        from fedheal.collect import collect  # it makes Updates, so it cannot be imported first

        return collect(replies, budget, on_bad_update, layout, folder, keep)


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
    arrival. `weights [k]` and `kept` belong to these rows; `None` means example shares, and everything. `standing [k]`: what
    each client weighs whoever else came, where the weights were shared out among this cohort only; `None` means the weights
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
    standing: Floats | None = None
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


def normalised(values: Floats) -> Floats:
    """Shares that sum to 1, or zeros; numbers whose sum would overflow are no exception."""
    top = values.max(initial=0.0)
    return (values / top) / (values / top).sum() if top > 0 else np.zeros_like(values)


@dataclass(frozen=True)
class TermState:
    """What a term of local training keeps: with the server (`shared`) and with each client that has taken part (`slots`)."""

    shared: Mapping[str, Tensor]
    slots: Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class RunState:
    """Everything that survives a round; a checkpoint is this and nothing else."""

    round: int  # rounds done
    seed: int
    model: Packed
    aggregator: Any
    server: Any
    terms: tuple[TermState, ...] = ()
    sent: int = 0  # bytes, server to clients
    received: int = 0

    def to_arrays(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        arrays = {f"model.{name}": getattr(self.model, name) for name in ("params", "buffers", "counters")}
        json: dict[str, Any] = {"round": self.round, "seed": self.seed, "sent": self.sent, "received": self.received}
        for name in ("aggregator", "server"):
            inner, json[name] = getattr(self, name).to_arrays()
            arrays |= {f"{name}.{key}": value for key, value in inner.items()}
        json["terms"] = [list(term.slots) for term in self.terms]  # the clients, since an id may hold any character
        for i, term in enumerate(self.terms):
            arrays |= {f"terms.{i}.shared.{key}": value for key, value in term.shared.items()}
            for j, slot in enumerate(term.slots.values()):
                arrays |= {f"terms.{i}.slots.{j}.{key}": value for key, value in slot.items()}
        return arrays, json


@dataclass(frozen=True)
class RoundRecord:
    """What a round leaves behind: a line of `rounds.jsonl`. Accuracies (percent) are there in evaluated rounds."""

    round: int
    cohort: int  # clients asked
    replied: int
    weights: Mapping[str, float]
    train_loss: float | None
    report: Mapping[str, Any]  # the aggregator's
    seconds: Mapping[str, float]  # train, aggregate, evaluate
    domains: Mapping[str, float] | None = None
    clients: Mapping[str, float] | None = None
    fairness: Mapping[str, float] | None = None
    client_fairness: Mapping[str, float] | None = None
    validation: Mapping[str, float] | None = None  # per domain, on examples held out of its clients' training data


def client_id(client: object) -> str:
    """A client's id as a string; only strings and integers name a client."""
    if isinstance(client, str):
        return client
    if isinstance(client, (int, np.integer)) and not isinstance(client, bool):
        return str(int(client))
    raise TypeError(
        f"client id {client!r} is a {type(client).__name__}: use a string or an integer that stays the same"
    )


def tensor_of(array: Array | Sequence[Any], name: str = "the array") -> Tensor:
    """A tensor over the same memory where that can be, numpy arrays that may not be written to included."""
    if isinstance(array, Tensor):
        return array.detach()
    found = np.asarray(array)
    if found.dtype.kind not in "fiubc" or found.dtype in (np.longdouble, np.clongdouble):
        raise TypeError(f"{name} is an array of dtype {found.dtype}, which does not hold numbers that torch knows")
    if not found.flags.writeable:
        found = found.view()
        try:
            found.flags.writeable = True  # torch has no read-only tensors; nothing here writes to an input
        except ValueError:
            found = found.copy()
    if not found.dtype.isnative:
        found = found.astype(found.dtype.newbyteorder("="))
    regular = all(s >= 0 and s % found.itemsize == 0 for s in found.strides)
    return torch.from_numpy(found if regular else found.copy())


def _matrix(name: str, value: Array | Sequence[Array], clients: tuple[str, ...]) -> Tensor:
    if not isinstance(value, (Tensor, np.ndarray)):
        if not isinstance(value, Sequence):
            raise TypeError(f"{name} is a {type(value).__name__}: give a matrix, or a list with a vector a client")
        rows = [tensor_of(row, name) for row in value]
        shapes = [tuple(row.shape) for row in rows]
        for client, shape in zip(clients, shapes, strict=False):
            if len(shape) != 1 or shape != shapes[0]:
                raise ValueError(
                    f"{name}: the row of client '{client}' has shape {shape}, the first has {shapes[0]}; "
                    "Updates.collect(..., on_bad_update='skip') leaves such clients out"
                )
        value = torch.stack(rows) if rows else torch.zeros(0, 0)
    matrix = tensor_of(value, name)
    if matrix.ndim != 2 or matrix.shape[0] != len(clients):
        raise ValueError(
            f"{name} has shape {tuple(matrix.shape)}; {len(clients)} clients need ({len(clients)}, length)"
        )
    return matrix


def _names(name: str, value: Sequence[str], clients: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(value)
    if isinstance(value, str) or not all(isinstance(one, str) for one in names):
        raise TypeError(f"{name} = {value!r}: give a list with a name a client")
    if len(names) != len(clients):
        raise ValueError(f"{name} has {len(names)} names for {len(clients)} clients")
    return names


def _column(name: str, value: Array | Sequence[float], clients: tuple[str, ...]) -> Tensor:
    given = tensor_of(value, name)
    if given.is_complex():
        raise TypeError(f"{name} is {given.dtype}: real numbers are needed")
    column = given.to("cpu", torch.float64)
    if column.shape != (len(clients),):
        raise ValueError(f"{name} has shape {tuple(column.shape)}; {len(clients)} clients need ({len(clients)},)")
    return column
