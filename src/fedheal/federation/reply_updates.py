"""A cohort's updates as its replies hold them: the matrix of updates is written only if the aggregation reads it.

A plain weighted mean does not. It is taken straight from the replies' arrays, in the pass that also measures the updates.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedheal.core.arrays import Floats, Integers
from fedheal.core.layout import Layout, Packed
from fedheal.core.updates import Updates
from fedheal.federation import mean_kernel
from fedheal.federation.model_arrays import widen_bfloat16
from fedheal.federation.replies import TrainReply
from fedheal.federation.reply_limits import find_diverged

# Numbers of a model that all clients are compared with before the next ones: a megabyte of float32.
BLOCK = 1 << 18

Block = tuple[str, slice, slice]  # an array's name, a part of it, and its place in the vector of parameters


def split_parameters(layout: Layout) -> list[Block]:
    """Split the parameters into parts of at most `BLOCK` numbers."""
    # A tied tensor appears once. A complex number is two real ones.
    places = {(entry.start, entry.stop): entry.name for entry in layout.entries if entry.kind == "param"}
    return [
        (name, slice(i - start, min(i + BLOCK, stop) - start), slice(i, min(i + BLOCK, stop)))
        for (start, stop), name in places.items()
        for i in range(start, stop, BLOCK)
    ]


def write_deltas(
    blocks: Iterable[Block], replies: Sequence[TrainReply], model: NDArray[Any], rows: NDArray[Any], pool: Executor
) -> dict[str, float]:
    """Write local minus global parameters into the rows; return the finite ones of their norms by client.

    Every client's part of one block comes before the next block: so much of the model stays in a core's cache.
    """
    flat = [{name: view_flat(array) for name, array in reply.arrays.items()} for reply in replies]

    def write_block(block: Block) -> list[float]:
        name, part, place = block
        squares = []
        with np.errstate(over="ignore", invalid="ignore"):  # the aggregator names updates that are not finite
            for reply, arrays, row in zip(replies, flat, rows, strict=True):
                delta = row[place]
                start = 0 if reply.is_difference else model[place]
                np.subtract(arrays[name][part], start, out=delta, casting="same_kind")
                if reply.mask is not None:
                    np.multiply(delta, reply.mask[place], out=delta)  # what the client says it dropped does not count
                squares.append(float(np.dot(delta, delta)))
        return squares

    norms = {}
    for reply, row, squares in zip(replies, rows, zip(*pool.map(write_block, blocks), strict=True), strict=True):
        norm = math.sqrt(total) if math.isfinite(total := sum(squares)) else _measure_slowly(row)
        if math.isfinite(norm):
            norms[reply.client] = norm
    return norms


def view_flat(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as one vector; a complex number is two real ones."""
    flat = array.reshape(-1)
    return flat.view(flat.real.dtype) if np.iscomplexobj(flat) else flat


def _measure_slowly(row: NDArray[Any]) -> float:
    """Return a norm whose square may be infinite in the row's own dtype only."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.linalg.norm(row.astype(np.float64)))


def average_replies(
    blocks: Iterable[Block], replies: Sequence[TrainReply], model: NDArray[Any], weights: Floats, pool: Executor
) -> tuple[NDArray[Any], list[float]] | None:
    """Return the model moved by the weighted mean of the updates, and their norms, in one pass that writes no update.

    The result has the bits of `write_deltas` and the kernel's mean. Return None if this does not work here: a reply is
    not float32, or has a mask, or its update cannot be squared.
    """
    flat = [{name: view_flat(array) for name, array in reply.arrays.items()} for reply in replies]
    names = {name for name, *_ in blocks}
    arrays = [a for each in flat for name, a in each.items() if name in names]
    is_plain = all(a.dtype == np.float32 and a.flags.aligned for a in arrays)
    if not is_plain or any(reply.mask is not None for reply in replies):
        return None
    padding = -len(replies) % 4
    share = np.array([not reply.is_difference for reply in replies] + [True] * padding, model.dtype)
    padded_weights = np.append(weights, np.zeros(padding))
    after = np.empty_like(model)
    mean_kernel.compile_kernel()

    def average(block: Block) -> Floats:
        name, part, place = block
        own = [mean_kernel.freeze(each[name][part]) for each in flat] + [mean_kernel.freeze(model[place])] * padding
        return mean_kernel.average_block(own, model[place], share, padded_weights, after[place])

    squares = np.sum(list(pool.map(average, blocks)), axis=0)[: len(replies)]
    return (after, np.sqrt(squares).tolist()) if np.isfinite(squares).all() else None


def read_extras(
    layout: Layout, arrays: Mapping[str, NDArray[Any]], model: Packed
) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
    """Return the local buffers and counters as vectors."""
    parts: dict[str, dict[int, NDArray[Any]]] = {"param": {}, "buffer": {}, "counter": {}}
    for entry in layout.entries:
        if entry.kind != "param" and entry.start != entry.stop:
            parts[entry.kind].setdefault(entry.start, arrays[entry.name].reshape(-1))  # a tied tensor appears once
    buffers, counters = list(parts["buffer"].values()), list(parts["counter"].values())
    return (
        np.concatenate(buffers).astype(model.buffers.numpy().dtype) if buffers else None,
        np.concatenate(counters).astype(np.int64) if counters else None,
    )


class UpdateWriter:
    """Writes updates into a matrix that is reused from round to round: allocating it anew costs more than filling it."""

    def __init__(self, layout: Layout, budget: int | None) -> None:
        self.layout, self.budget, self.blocks = layout, budget, split_parameters(layout)
        self._matrix = torch.empty(0, 0)

    def write(self, replies: Sequence[TrainReply], params: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return the matrix, and the finite norms by client. Beyond the budget it is written row by row into a file."""
        model = widen_bfloat16(params)
        size, dtype = len(model), model.dtype
        exceeds_budget = self.budget is not None and len(replies) * size * dtype.itemsize > self.budget
        num_rows = 1 if exceeds_budget else len(replies)
        if len(self._matrix) < num_rows or self._matrix.dtype != dtype:
            self._matrix = torch.empty(num_rows, size, dtype=dtype)
        norms: dict[str, float] = {}

        def write_rows(some: Sequence[TrainReply]) -> Tensor:
            rows = self._matrix[: len(some)]
            norms.update(write_deltas(self.blocks, some, model.numpy(), rows.numpy(), pool))
            return rows.to(params.dtype)

        with make_pool() as pool:
            if not exceeds_budget:
                return write_rows(replies), norms
            rows = ((reply.client, write_rows([reply])[0], reply.num_examples) for reply in replies)
            return Updates.collect(rows, self.budget).deltas, norms


class ReplyUpdates(Updates):
    """The updates in these replies, one row per client. With `skips_diverged`, those of diverged training are found."""

    def __init__(
        self, replies: Mapping[str, TrainReply], model: Packed, writer: UpdateWriter, skips_diverged: bool
    ) -> None:
        self._replies, self._model, self._writer = list(replies.values()), model, writer
        self._skips_diverged = skips_diverged
        self._norms: dict[str, float] | None = None
        wide = Packed(model.params, widen_bfloat16(model.buffers), model.counters)
        extras = [read_extras(writer.layout, reply.arrays, wide) for reply in self._replies]
        buffers, counters = zip(*extras, strict=True) if extras else ((None,), (None,))
        names = sorted({name for reply in self._replies for name in reply.metrics})
        super().__init__(
            replies,
            self.no_rows.new_empty(1, 1).expand(len(extras), len(model.params)),
            [reply.num_examples for reply in self._replies],
            buffers=None if buffers[0] is None else torch.from_numpy(np.stack(buffers)).to(model.buffers.dtype),
            counters=None if counters[0] is None else np.stack(counters),
            metrics={name: [reply.metrics.get(name, math.nan) for reply in self._replies] for name in names},
            domains=[reply.domain for reply in self._replies],
        )
        del vars(self)["deltas"]  # it is written when it is first read

    @cached_property
    def deltas(self) -> Tensor:
        matrix, self._norms = self._writer.write(self._replies, self._model.params)
        return matrix

    @property
    def no_rows(self) -> Tensor:
        return self._model.params.new_empty(0, len(self._model.params))

    @property
    def norms(self) -> dict[str, float]:
        """The finite norms of the updates, by client; measured by the first pass over them."""
        if self._norms is None:
            _ = self.deltas
        assert self._norms is not None
        return self._norms

    def find_diverged_rows(self) -> dict[int, str]:
        """Return the rows of clients whose training has diverged, with the reason."""
        if not self._skips_diverged:
            return {}
        norms = {client: self.norms.get(client, math.inf) for client in self.clients}
        diverged = find_diverged(norms, self._model.params)
        return {row: diverged[client] for row, client in enumerate(self.clients) if client in diverged}

    def average_rows(self, rows: Integers, weights: Floats) -> Tensor | None:
        """Return the mean without a matrix, if there is none yet and every client counts."""
        if "deltas" in vars(self) or self.no_rows.dtype != torch.float32 or len(rows) < len(self.clients):
            return None
        replies, model = [self._replies[row] for row in rows], self._model.params.numpy()
        with make_pool() as pool:
            averaged = average_replies(self._writer.blocks, replies, model, weights, pool)
        if averaged is None:
            return None
        params, norms = averaged
        self._norms = dict(zip((reply.client for reply in replies), norms, strict=True))
        return torch.from_numpy(params)


def make_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, torch.get_num_threads()))  # numpy and compiled functions release the GIL
