"""One cohort's updates: a matrix with a row per client, filled from replies one client at a time.

K clients send a matrix of updates `[K, G]`, `delta = local - global` as in the paper. Rows are kept in memory up to a
budget; the rest goes to a temporary file, which is deleted with the matrix. Every aggregator works on either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedheal.core.arrays import Array, Floats, Integers, as_tensor
from fedheal.core.checks import check_type
from fedheal.core.errors import add_article
from fedheal.core.layout import Layout, Packed
from fedheal.core.row_store import RowStore, view_as_matrix

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NO_UPDATE = torch.empty(0)

Metric = float | Tensor


class Reply(NamedTuple):
    """One client's reply; a plain tuple `(client, delta, num_examples)` works as well.

    Attributes:
        client: The client's id.
        delta: Local minus global parameters, `[G]`.
        num_examples: How many examples the client trained on.
        buffers: The client's float buffers, `[B]`; None keeps the model's.
        counters: The client's counters, `[C]`; None keeps the model's.
        metrics: Numbers by name, for example the `loss` of the received model. A tensor with one number may be one.
        domain: The client's domain, if it is known.
    """

    client: str | int
    delta: Array
    num_examples: float
    buffers: Array | None = None
    counters: Array | None = None
    metrics: Mapping[str, Metric] = {}
    domain: str | None = None


@dataclass(frozen=True, init=False)
class Updates:
    """One cohort's updates, one row per client.

    Args:
        clients: Ids that stay the same between rounds; ints become strings.
        deltas: `[K, G]`, local minus global parameters.
        num_examples: `[K]`.
        buffers: `[K, B]`, the local values, or None to keep the model's.
        counters: `[K, C]`, likewise.
        metrics: Name -> `[K]`, for example the `loss` of the received model.
        refused: Clients whose reply does not fit into the matrix, with the reason.
        domains: The domain of each client, "" if it is unknown; None if all are.

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
        if isinstance(domains, str) or not all(isinstance(domain, str) for domain in domains or ()):
            raise TypeError(f"domains = {domains!r}: give a list with one name per client")
        if domains is not None and len(domains) != len(ids):
            raise ValueError(f"domains has {len(domains)} names for {len(ids)} clients")
        vars(self).update(  # the dataclass is frozen
            clients=ids,
            deltas=_matrix("deltas", deltas, ids),
            num_examples=_column("num_examples", num_examples, ids).cpu(),
            buffers=None if buffers is None else _matrix("buffers", buffers, ids),
            counters=None if counters is None else _matrix("counters", counters, ids),
            metrics=_Columns({name: _column(f"metrics['{name}']", v, ids) for name, v in (metrics or {}).items()}),
            refused=dict(refused or {}),
            domains=None if domains is None else tuple(domains),
        )

    def select(self, rows: Tensor) -> Updates:
        """Return the updates of these rows, in this order."""
        columns = {name: column[rows] for name, column in self.metrics.items()}
        buffers, counters = (None if matrix is None else matrix[rows] for matrix in (self.buffers, self.counters))
        places = rows.tolist()
        return Updates(
            [self.clients[row] for row in places],
            self.deltas[rows],
            self.num_examples[rows],
            buffers,
            counters,
            columns,
            domains=None if self.domains is None else [self.domains[row] for row in places],
        )

    @property
    def no_rows(self) -> Tensor:
        """An empty matrix of the length, dtype and device of the updates; to read it does not need the updates themselves."""
        return self.deltas[:0]

    def average_rows(self, rows: Integers, weights: Floats) -> Tensor | None:
        """Return the model moved by the mean of these rows, if that is known without the matrix; here it is not.

        Args:
            rows: The rows that count, in the order of their sum.
            weights: Their weights, not all 0.

        Returns:
            The new parameters, or None: take the mean of `deltas` then.
        """
        return None

    def find_diverged_rows(self) -> dict[int, str]:
        """Return the rows that are too long for a training that converges, each with the reason; here none is checked.

        In a simulation a training that diverges is a result. In a federation it is one client's fault.
        """
        return {}

    @staticmethod
    def from_modules(
        received: nn.Module,
        clients: Mapping[str | int, tuple[nn.Module, float]],
        metrics: Mapping[str, Sequence[float]] | None = None,
        domains: Sequence[str] | None = None,
    ) -> Updates:
        """Make updates from the modules that clients have trained, with their buffers and counters.

        Args:
            received: The global module that every client started from.
            clients: Each client's trained module and its number of examples, `{client: (module, num_examples)}`.
            metrics: Name -> a number a client, in the order of `clients`.
            domains: The domain of each client, in the order of `clients`.

        Returns:
            The updates, on the device of `received`; pack that for `Aggregator.apply`.

        Raises:
            ValueError: A client's module has other names, shapes or dtypes than `received`, or is not a copy of its own.

        >>> received, trained = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
        >>> _ = trained(torch.tensor([[1.0], [3.0]]))  # moves the running mean by 0.1 * 2
        >>> Updates.from_modules(received, {"a": (trained, 2)}).buffers
        tensor([[0.2000, 1.1000]])
        """
        check_type("clients", clients, Mapping, "give {client: (module, num_examples)}")
        layout = Layout.of(received)
        before = layout.pack(received.state_dict())
        modules = [received, *(given[0] for given in clients.values() if isinstance(given, tuple) and len(given) == 2)]
        if len({id(module) for module in modules}) < len(modules):
            raise ValueError(
                "two clients, or a client and the global model, are one module: train a copy for each client"
            )
        trained = [_pack_client(layout, client, given) for client, given in clients.items()]
        sizes, device = layout.sizes(), before.params.device
        return Updates(
            clients,
            [packed.params.to(device) - before.params for packed in trained],
            [num_examples for _, num_examples in clients.values()],
            buffers=[packed.buffers.to(device) for packed in trained] if sizes.buffers and trained else None,
            counters=[packed.counters.to(device) for packed in trained] if sizes.counters and trained else None,
            metrics=metrics,
            domains=domains,
        )

    @staticmethod
    def collect(
        replies: Iterable[Reply | tuple[Any, ...]],
        budget: int | None = None,
        on_bad_update: str = "raise",
        layout: Layout | None = None,
        folder: str | None = None,
        keep: bool = False,
    ) -> Updates:
        """Collect replies `(client, delta, num_examples, buffers, counters, metrics, domain)` one at a time.

        Args:
            replies: The last four parts of a reply are optional. A metric that a client did not send is NaN.
            budget: Bytes of updates to hold in memory; the rest goes to a temporary file. None: all in memory.
            on_bad_update: "raise", or "skip" to leave out replies that do not fit and name them in `refused`.
            layout: What every reply must fit; by default the first good reply, which also sets the dtype.
            folder: Where the temporary file goes.
            keep: Whether to take rows, buffers and counters without a copy; nobody else may write to them then.

        Raises:
            ValueError: A reply does not fit, and `on_bad_update` is "raise".

        >>> Updates.collect([("a", np.ones(3), 10), ("b", np.zeros(3), 5)], budget=0).deltas.tolist()
        [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
        """
        collector = Collector(budget, on_bad_update, layout, folder, keep)
        for reply in replies:
            collector.add(reply)
        return collector.finish()


def _pack_client(layout: Layout, client: object, given: Any) -> Packed:
    """Return a client's trained module as vectors; name the client in errors."""
    actual = given if isinstance(given, tuple) else (given,)
    if len(actual) != 2 or not isinstance(actual[0], nn.Module):
        kinds = " and ".join(add_article(type(item).__name__) for item in actual) or "an empty tuple"
        raise TypeError(f"client '{client}' comes with {kinds}: give (module, num_examples)")
    try:
        _number("num_examples", given[1])
        return layout.pack(given[0].state_dict())
    except ValueError as error:
        raise ValueError(f"client '{client}': {error}") from None


def client_id(client: object) -> str:
    """Return a client's id as a string; only strings and integers are ids."""
    if isinstance(client, str):
        return client
    if isinstance(client, (int, np.integer)) and not isinstance(client, bool):
        return str(int(client))
    remedy = "use a string or an integer that stays the same"
    raise TypeError(f"client id {client!r} is {add_article(type(client).__name__)}: {remedy}")


def _matrix(name: str, value: Array | Sequence[Array], clients: tuple[str, ...]) -> Tensor:
    if not isinstance(value, (Tensor, np.ndarray)):
        if not isinstance(value, Sequence):
            raise TypeError(
                f"{name} is {add_article(type(value).__name__)}: give a matrix, or a list with one vector per client"
            )
        for client, row in zip(clients, value, strict=False):
            if isinstance(row, Mapping | Packed | nn.Module):
                remedy = "give its flat parameters, local minus global, or use Updates.from_modules"
                raise TypeError(f"{name}: the row of client '{client}' is {add_article(type(row).__name__)}: {remedy}")
        rows = [as_tensor(row, name) for row in value]
        shapes = [tuple(row.shape) for row in rows]
        for client, shape in zip(clients, shapes, strict=False):
            if len(shape) != 1 or shape != shapes[0]:
                raise ValueError(
                    f"{name}: the row of client '{client}' has shape {shape}, the first has {shapes[0]}; "
                    "Updates.collect(..., on_bad_update='skip') leaves such clients out"
                )
        value = torch.stack(rows) if rows else torch.zeros(0, 0)
    matrix = as_tensor(value, name)
    if matrix.ndim != 2 or matrix.shape[0] != len(clients):
        shape, k = tuple(matrix.shape), len(clients)
        raise ValueError(f"{name} has shape {shape}; {k} clients need ({k}, length)")
    return matrix


def _column(name: str, value: Array | Sequence[float], clients: tuple[str, ...]) -> Tensor:
    given = as_tensor(value, name)
    if given.is_complex():
        raise TypeError(f"{name} is {given.dtype}: give real numbers")
    if given.shape != (len(clients),):
        raise ValueError(f"{name} has shape {tuple(given.shape)}; {len(clients)} clients need ({len(clients)},)")
    return given.to(torch.float64)


class _Columns(Mapping[str, Tensor]):
    """A column of numbers for each name. One on a GPU is copied to the CPU when it is first read: that waits for the GPU."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self._columns = columns

    def __getitem__(self, name: str) -> Tensor:
        column = self._columns[name] = self._columns[name].cpu()
        return column

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return repr(dict(self))


class Collector:
    """Collect the replies of one cohort as they arrive; see `Updates.collect` for the settings."""

    def __init__(
        self,
        budget: int | None = None,
        on_bad_update: str = "raise",
        layout: Layout | None = None,
        folder: str | None = None,
        keep: bool = False,
    ) -> None:
        if on_bad_update not in ("raise", "skip"):
            raise ValueError(f"on_bad_update = {on_bad_update!r}: use 'raise' or 'skip'")
        if budget is not None and budget < 0:
            raise ValueError(f"budget = {budget}: give a number of bytes, 0 or more")
        self._rows = RowStore(budget, folder, keep)
        self._skip = on_bad_update == "skip"
        self._expected: dict[str, int] | None = None
        if layout is not None:
            sizes = layout.sizes()
            lengths = {"update": sizes.params, "buffers": sizes.buffers, "counters": sizes.counters}
            self._expected = {name: length for name, length in lengths.items() if length or name == "update"}
        self._replies: list[Reply] = []  # without their updates, which live in `_rows` alone
        self._refused: dict[str, str] = {}

    def add(self, reply: Reply | tuple[Any, ...]) -> None:
        """Check a reply and add it to the matrix, or refuse it."""
        try:
            delta, rest = _read_reply(reply, copy=not self._rows.keep)
            extras = {"buffers": rest.buffers, "counters": rest.counters}
            lengths = {"update": delta.shape[0]} | {name: v.shape[0] for name, v in extras.items() if v is not None}
            self._expected = self._expected or lengths
            if lengths != self._expected:
                _compare(lengths, self._expected)
        except (TypeError, ValueError) as error:
            client = str(reply[0]) if isinstance(reply, Sequence) and reply else "?"
            if not self._skip:
                if self._rows.file is not None:
                    self._rows.file.close()
                raise ValueError(f"client '{client}': {error}") from None
            self._refused[client] = str(error)
            return
        self._rows.append(delta)
        self._replies.append(rest)

    def add_unchecked(self, reply: Reply) -> None:
        """Add a reply as it is; only for one that fedheal itself made for the layout."""
        assert isinstance(reply.delta, Tensor)
        self._rows.append(reply.delta)
        self._replies.append(reply._replace(delta=NO_UPDATE))

    def finish(self) -> Updates:
        """Return the cohort's updates; the collector must not be used again."""
        replies = self._replies
        domains = [reply.domain or "" for reply in replies]
        return Updates(
            clients=[reply.client for reply in replies],
            deltas=self._rows.to_matrix(),
            num_examples=[reply.num_examples for reply in replies],
            buffers=self._stack("buffers"),
            counters=self._stack("counters"),
            metrics=gather_metrics(replies),
            refused=self._refused,
            domains=domains if any(domains) else None,
        )

    def _stack(self, name: str) -> Tensor | None:
        vectors = [getattr(reply, name) for reply in self._replies]
        if not vectors or vectors[0] is None:
            return None
        whole = view_as_matrix(vectors) if self._rows.keep else None  # else each is a copy of its own
        return torch.stack(vectors) if whole is None else whole


def _read_reply(given: Any, copy: bool) -> tuple[Tensor, Reply]:
    """Return the reply's update, and the rest of the reply in plain types; `copy`: with vectors in new memory."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(
            f"its reply is {add_article(type(given).__name__)}: give a Reply, or (client, delta, num_examples)"
        )
    least, most = len(Reply._fields) - len(Reply._field_defaults), len(Reply._fields)
    if not least <= len(given) <= most:
        raise TypeError(f"its reply has {len(given)} parts: give a Reply, or {least} to {most} of {Reply._fields}")
    reply = Reply(*given)
    delta = as_tensor(reply.delta, "its update")
    if delta.ndim != 1:
        raise ValueError(f"its update has shape {tuple(delta.shape)}, not one dimension")
    if delta.dtype not in FLOATS:
        raise ValueError(f"its update is {delta.dtype}; use float32, float64, bfloat16 or float16")
    if not isinstance(reply.metrics, Mapping):
        raise TypeError(f"its metrics are a {type(reply.metrics).__name__}, not a mapping of names to numbers")
    if reply.domain is not None and not isinstance(reply.domain, str):
        raise TypeError(f"its domain = {reply.domain!r} is not a name")
    return delta, Reply(
        client=client_id(reply.client),
        delta=NO_UPDATE,
        num_examples=_number("num_examples", reply.num_examples),
        buffers=_vector("buffers", reply.buffers, copy),
        counters=_vector("counters", reply.counters, copy),
        metrics={name: _metric(f"metrics['{name}']", value) for name, value in reply.metrics.items()},
        domain=reply.domain,
    )


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"its {name} = {value!r} is not a number") from None


def _metric(name: str, value: Any) -> Metric:
    """Return a number; a tensor on a GPU is not read yet, so that those of all clients can be read together."""
    if isinstance(value, Tensor) and value.is_cuda and value.ndim == 0 and not value.is_complex():
        return value.detach()
    return _number(name, value)


def gather_metrics(replies: Sequence[Reply]) -> dict[str, Tensor | list[float]]:
    """Return the clients' numbers by name, NaN where a client sent none.

    A column of tensors becomes one tensor, which is not read here, since that waits for a GPU.
    """
    names = sorted({name for reply in replies for name in reply.metrics})
    columns = {name: [reply.metrics.get(name, math.nan) for reply in replies] for name in names}
    return {name: _join_numbers(column) for name, column in columns.items()}


def _join_numbers(column: Sequence[Metric]) -> Tensor | list[float]:
    """Return numbers as a list, or as one tensor if all of them are tensors."""
    tensors = [number for number in column if isinstance(number, Tensor)]
    if tensors and len(tensors) == len(column):
        return torch.stack([tensor.to(tensors[0].device, torch.float64) for tensor in tensors])
    return [float(number) for number in column]


def _vector(name: str, value: Array | None, copy: bool) -> Tensor | None:
    if value is None:
        return None
    vector = as_tensor(value, f"its {name}")
    vector = vector.clone() if copy else vector
    if vector.ndim != 1:
        raise ValueError(f"its {name} have shape {tuple(vector.shape)}, not one dimension")
    if vector.is_complex() or vector.is_floating_point() != (name == "buffers"):
        raise ValueError(f"its {name} are {vector.dtype}: {'floats' if name == 'buffers' else 'integers'} are needed")
    return vector


def _compare(found: dict[str, int], expected: dict[str, int]) -> None:
    for name in sorted({*found, *expected}):
        if found.get(name) != expected.get(name):
            mine = f"have length {found[name]}" if name in found else "are missing"
            theirs = f"length {expected[name]}" if name in expected else "none"
            raise ValueError(f"its {name} {mine} where {theirs} is expected".replace("update have", "update has"))
