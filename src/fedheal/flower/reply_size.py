"""Bounds on the size of a Flower reply."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

from flwr.app import RecordDict

from fedheal.core.layout import Layout

MAX_KEY = 1000  # characters of the name of a record, an array or a metric
MAX_RECORDS = 64
MAX_METRICS = 256  # names that change every round would fill the server's memory
MAX_NUMBERS = 4096  # of metrics that are lists, together: Flower's result keeps them for every round
MAX_SMALL_BYTES = 2**20  # of names, metrics and configs together


@dataclass(frozen=True)
class ReplyLimits:
    """How much a reply may hold."""

    max_bytes: int = 2**30
    max_arrays: int = 2**16

    @classmethod
    def from_layout(cls, layout: Layout, num_terms: int, max_bytes: int | None = None) -> Self:
        """Derive limits from the model.

        By default a reply may hold the model in float64, which a stock client may send. It may hold as much again for
        each local term, and 16 MiB.
        """
        model = sum(8 * (entry.stop - entry.start) for entry in layout.entries)  # tied tensors travel more than once
        return cls(max_bytes or model * (1 + num_terms) + 2**24, len(layout.entries) + 256 * (1 + num_terms))

    def find_excess(self, content: RecordDict) -> str | None:
        """Return what there is too much of in a reply, or None."""
        if len(content) > MAX_RECORDS:
            return f"it holds {len(content)} records, at most {MAX_RECORDS} are allowed"
        arrays = [item for record in content.array_records.values() for item in record.items()]
        if len(arrays) > self.max_arrays:
            return f"it holds {len(arrays)} arrays, at most {self.max_arrays} are allowed here"
        num_bytes = sum(len(array.data) for _, array in arrays)
        if num_bytes > self.max_bytes:
            return f"its arrays hold {num_bytes} bytes, more than max_reply_bytes = {self.max_bytes}"
        longest = max(map(len, chain(content, *content.values())), default=0)
        if longest > MAX_KEY:
            return f"the name of a record, array or metric has {longest} characters, at most {MAX_KEY} are allowed"
        metrics = sum(map(len, content.metric_records.values()))
        if metrics > MAX_METRICS:
            return f"it holds {metrics} metrics, at most {MAX_METRICS} are allowed"
        numbers = sum(
            len(v) for record in content.metric_records.values() for v in record.values() if isinstance(v, list)
        )
        if numbers > MAX_NUMBERS:
            return f"its metrics hold lists of {numbers} numbers, at most {MAX_NUMBERS} are allowed"
        small: list[Mapping[str, Any]] = [*content.config_records.values(), *content.metric_records.values()]
        num_bytes = sum(len(name) + _count_bytes(value) for record in small for name, value in record.items())
        if num_bytes > MAX_SMALL_BYTES:
            return f"its metrics and configs hold {num_bytes} bytes, at most {MAX_SMALL_BYTES} are allowed"
        return None


def _count_bytes(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return sum(8 + _count_bytes(item) for item in value) if isinstance(value, list) else 8
