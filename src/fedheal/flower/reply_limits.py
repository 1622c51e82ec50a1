"""Bounds on what a client sends, checked before anything of it is kept, shown or recorded."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

from flwr.app import RecordDict

from fedheal.core.layout import Layout

MAX_NAME = 200  # characters of a client's or domain's name
MAX_KEY = 1000  # characters of the name of a record, an array or a metric
MAX_TEXT = 300  # characters of a client's text in logs and records
MAX_ERROR = 200  # characters of a client's exception, whose text may hold its data
MAX_RECORDS = 64
MAX_SMALL_BYTES = 2**20  # of names, metrics and configs together

# A gradient, control variate or activation of a million belongs to a training that has diverged, and its mean over the clients
# would make every other site diverge, too. Class counts, at most a client's examples, may be larger.
MAX_MESSAGE = 1e6  # in a message of a local term

MAX_METRIC = 1e10  # of a metric that the aggregation needs: sums and squares of it stay finite

MAX_COUNTER = 2**53  # of an integer array: the largest one wins in the global model, and must leave room to count on

NORM_FACTOR = 10.0  # times the cohort's median: a norm above that is warned of, and left out with max_norm="auto"
MIN_NORMS = 3  # between two clients nobody can say which one is far off


def escape_text(value: object, most: int = MAX_TEXT) -> str:
    r"""Return a client's text on one line, shortened, with characters that cannot be printed escaped.

    >>> escape_text("a\nb\x1b[2J")
    'a\\nb\\x1b[2J'
    >>> escape_text("a" * 50, most=8)
    'aaaaa...'
    """
    text = str(value)
    text = text if len(text) <= most else text[: most - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def find_bad_name(kind: str, name: str) -> str | None:
    """Return why a client may not be called that, or None."""
    if len(name) > MAX_NAME:
        return f"its {kind} has {len(name)} characters, at most {MAX_NAME} are allowed"
    return None if name.isprintable() else f"its {kind} '{escape_text(name)}' has characters that cannot be printed"


@dataclass(frozen=True)
class ReplyLimits:
    """How much a reply may hold."""

    max_bytes: int = 2**30
    max_arrays: int = 2**16

    @classmethod
    def from_layout(cls, layout: Layout, num_terms: int, max_bytes: int | None = None) -> Self:
        """Derive limits from the model.

        By default a reply may hold the model in float64, which a stock client may send, as much again for each local term,
        and 16 MiB.
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
        small: list[Mapping[str, Any]] = [*content.config_records.values(), *content.metric_records.values()]
        num_bytes = sum(len(name) + _count_bytes(value) for record in small for name, value in record.items())
        if num_bytes > MAX_SMALL_BYTES:
            return f"its metrics and configs hold {num_bytes} bytes, at most {MAX_SMALL_BYTES} are allowed"
        return None


def _count_bytes(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return sum(8 + _count_bytes(item) for item in value) if isinstance(value, list) else 8


def find_far_norms(norms: Mapping[str, float]) -> dict[str, str]:
    """Return the clients whose norm is far above the median of the cohort's, with the reason.

    >>> find_far_norms({"a": 1.0, "b": 2.0, "c": 50.0})
    {'c': 'norm 50, 25 times the median of this round'}
    """
    ordered = sorted(norms.values())
    median = ordered[(len(ordered) - 1) // 2] if len(ordered) >= MIN_NORMS else 0.0
    return {
        client: f"norm {norm:.4g}, {norm / median:.3g} times the median of this round"
        for client, norm in norms.items()
        if median > 0 and norm > NORM_FACTOR * median
    }
