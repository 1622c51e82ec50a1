"""Collect a cohort's replies one client at a time, in memory or in a memory-mapped file.

A federation with large models cannot hold every reply twice. `collect` keeps the rows in memory up to a budget and
beyond it writes them to a temporary file, which vanishes with the matrix. Every aggregator works on either.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from fedheal.layout import Layout, Sizes
from fedheal.types import Reply, Updates, client_id, tensor_of

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def collect(
    replies: Iterable[Reply | tuple[Any, ...]],
    budget: int | None = None,
    on_bad_update: str = "raise",
    layout: Layout | None = None,
    folder: str | None = None,
) -> Updates:
    """Fill one `Updates` from replies `(client, delta, num_examples, buffers, counters, metrics)`, the last three optional.

    `budget`: bytes of updates that may stay in memory (`None`: all); more goes to a temporary file in `folder`. Every
    reply must have the lengths of `layout`, or else of the first good reply, which also sets the dtype and which
    metrics there are. With `on_bad_update="skip"` replies that do not fit are left out and named in `Updates.refused`.

    >>> collect([("a", np.ones(3), 10), ("b", np.zeros(3), 5)], budget=0).deltas.tolist()
    [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    """
    if on_bad_update not in ("raise", "skip"):
        raise ValueError(f"on_bad_update = {on_bad_update!r}: use 'raise' or 'skip'")
    if budget is not None and budget < 0:
        raise ValueError(f"budget = {budget}: give a number of bytes, 0 or more")
    rows = _Rows(budget, folder)
    taken: list[Reply] = []
    refused: dict[str, str] = {}
    pattern = None if layout is None else _pattern(layout.sizes())
    for given in replies:
        reply = Reply(*given)
        client = client_id(reply.client)
        try:
            delta, rest = _read(reply)
            shape = _shape(delta, rest)
            pattern = pattern or shape
            _compare(shape, pattern, rest, taken)
        except (TypeError, ValueError) as flaw:
            if on_bad_update == "raise":
                raise ValueError(f"client '{client}': {flaw}") from None
            refused[client] = str(flaw)
            continue
        if taken and delta.dtype != rows.dtype:
            delta = delta.to(rows.dtype)
        rows.append(delta)
        taken.append(rest)  # the update itself lives in `rows` alone

    def extras(name: str) -> Tensor | None:
        values = [getattr(reply, name) for reply in taken]
        return torch.stack(values) if values and values[0] is not None else None

    return Updates(
        [r.client for r in taken],
        rows.matrix(),
        [r.num_examples for r in taken],
        extras("buffers"),
        extras("counters"),
        {name: [r.metrics[name] for r in taken] for name in (taken[0].metrics if taken else ())},
        refused,
    )


def _read(reply: Reply) -> tuple[Tensor, Reply]:
    """The reply's update, and the rest of it in plain types."""
    delta = tensor_of(reply.delta)
    if delta.ndim != 1:
        raise ValueError(f"its update has shape {tuple(delta.shape)}, not one dimension")
    if delta.dtype not in FLOATS:
        raise ValueError(f"its update is {delta.dtype}; float32, float64, bfloat16 and float16 will do")
    rest = Reply(
        client_id(reply.client),
        delta[:0],
        float(reply.num_examples),
        None if reply.buffers is None else tensor_of(reply.buffers).clone(),
        None if reply.counters is None else tensor_of(reply.counters).clone(),
        {name: float(value) for name, value in reply.metrics.items()},
    )
    return delta, rest


def _shape(delta: Tensor, rest: Reply) -> dict[str, tuple[int, ...]]:
    extras = {"buffers": rest.buffers, "counters": rest.counters}
    return {"update": tuple(delta.shape)} | {k: tuple(v.shape) for k, v in extras.items() if v is not None}


def _pattern(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    extras = {"buffers": sizes.buffers, "counters": sizes.counters}
    lengths = {"update": sizes.params} | {name: length for name, length in extras.items() if length}
    return {name: (length,) for name, length in lengths.items()}


def _compare(
    shape: dict[str, tuple[int, ...]], pattern: dict[str, tuple[int, ...]], rest: Reply, taken: list[Reply]
) -> None:
    # Buffers and counters may be missing altogether (the model's own then stay), but not from some replies only.
    expected = (
        pattern
        if not taken
        else {k: v for k, v in pattern.items() if k == "update" or getattr(taken[0], k) is not None}
    )
    for name in sorted({*shape, *(expected if taken else ["update"])}):
        if shape.get(name) != expected.get(name):
            raise ValueError(f"its {name} has shape {shape.get(name)} where {expected.get(name)} is expected")
    if taken and set(rest.metrics) != set(taken[0].metrics):
        raise ValueError(f"its metrics are {sorted(rest.metrics)}, the first reply's were {sorted(taken[0].metrics)}")


class _Rows:
    """Rows of one length and dtype: a list while they fit the budget, a file from then on."""

    def __init__(self, budget: int | None, folder: str | None) -> None:
        self.budget, self.folder = budget, folder
        self.held: list[Tensor] = []
        self.file: IO[bytes] | None = None
        self.count, self.length, self.dtype = 0, 0, torch.float32

    def append(self, row: Tensor) -> None:
        if self.count == 0:
            self.length, self.dtype = row.shape[0], row.dtype
        self.count += 1
        if self.file is None and self.budget is not None and self.count * row.nbytes > self.budget:
            self.file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  (lives as long as the matrix)
            for held in self.held:
                self._write(held)
            self.held.clear()
        if self.file is None:
            self.held.append(row.clone())
        else:
            self._write(row)

    def matrix(self) -> Tensor:
        if self.file is None:
            device = self.held[0].device if self.held else None
            made = torch.empty(self.count, self.length, dtype=self.dtype, device=device)
            for i in range(self.count):
                made[i] = self.held[i]
                self.held[i] = made[i]  # frees the row, so that at most one exists twice
            return made
        self.file.flush()
        if self.length == 0:
            return torch.empty(self.count, 0, dtype=self.dtype)
        mapped = np.memmap(self.file, np.uint8, "r+", shape=(self.count, self.length * self.dtype.itemsize))
        return torch.from_numpy(mapped).view(self.dtype)

    def _write(self, row: Tensor) -> None:
        assert self.file is not None
        try:
            self.file.write(row.contiguous().cpu().view(torch.uint8).numpy().data)
        except OSError as error:
            self.file.close()
            raise OSError(
                error.errno,
                f"the updates beyond the memory budget of {self.budget} bytes could not be written to "
                f"{self.folder or tempfile.gettempdir()} ({error.strerror}): give collect() a folder with "
                f"room for {self.length * self.dtype.itemsize} bytes a client",
            ) from error
