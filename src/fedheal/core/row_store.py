"""Rows of a matrix that arrive one at a time, and may be more than fit into memory."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import IO

import numpy as np
import torch
from torch import Tensor

from fedheal.core.layout import ALIGNED


class RowStore:
    """Collect rows of one length and dtype: in a list while they fit the budget, then in a file.

    Args:
        budget: Bytes of rows to hold in memory; None: all of them.
        folder: Where the temporary file goes.
        keep: Whether to take rows without a copy; nobody else may write to them then.
    """

    def __init__(self, budget: int | None, folder: str | None, keep: bool) -> None:
        self.budget, self.folder, self.keep = budget, folder, keep
        self.held: list[Tensor] = []
        self.file: IO[bytes] | None = None
        self.count, self.length, self.dtype = 0, 0, torch.float32

    def append(self, row: Tensor) -> None:
        """Add a row. Raise OSError if the file cannot be written."""
        if self.count == 0:
            self.length, self.dtype = row.shape[0], row.dtype
        self.count += 1
        size = self.count * self.length * self.dtype.itemsize
        if self.file is None and self.budget is not None and size > self.budget:
            # Unbuffered, so that a full disk raises here; the mapping outlives the file.
            self.file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
            for held in self.held:
                self._write(held)
            self.held.clear()
        if self.file is None:
            self.held.append(row.to(self.dtype, copy=not self.keep))
        else:
            self._write(row.to(self.dtype))

    def to_matrix(self) -> Tensor:
        """Return the rows as a matrix; the store must not be used again."""
        if self.file is None:
            if self.keep and (whole := view_as_matrix(self.held)) is not None:
                return whole
            device = self.held[0].device if self.held else None
            made = torch.empty(self.count, self.length, dtype=self.dtype, device=device)
            for i in range(self.count):
                made[i] = self.held[i]
                self.held[i] = made[i]  # frees the row, so that at most one exists twice
            return made
        try:
            if self.length == 0:
                return torch.empty(self.count, 0, dtype=self.dtype)
            mapped = np.memmap(self.file, np.uint8, "r+", shape=(self.count, self.length * self.dtype.itemsize))
            return torch.from_numpy(mapped).view(self.dtype)
        finally:
            self.file.close()

    def _write(self, row: Tensor) -> None:
        assert self.file is not None
        try:
            left = row.contiguous().cpu().view(torch.uint8).numpy().data
            while len(left):
                left = left[self.file.write(left) :]
        except OSError as error:
            self.file.close()
            raise OSError(
                error.errno,
                f"the updates beyond the memory budget of {self.budget} bytes could not be written to "
                f"{self.folder or tempfile.gettempdir()} ({error.strerror}): give collect() a folder with "
                f"room for {self.length * self.dtype.itemsize} bytes a client",
            ) from error


def view_as_matrix(rows: Sequence[Tensor]) -> Tensor | None:
    """Return the matrix that these are the consecutive rows of, or None."""
    if not rows or not rows[0].numel():
        return None
    first, last, length = rows[0], rows[-1], rows[0].shape[0]
    step = (last.storage_offset() - first.storage_offset()) // (len(rows) - 1) if len(rows) > 1 else length
    if first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return None
    # Rows between the first and the last one of a storage belong to that storage, too.
    start, apart = first.data_ptr(), step * first.itemsize
    for i, row in enumerate(rows):
        if row.data_ptr() != start + i * apart or not row.is_contiguous() or row.dtype != first.dtype:
            return None
    return first.as_strided((len(rows), length), (step, 1)) if length <= step < length + ALIGNED else None
