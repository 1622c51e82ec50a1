"""Which clients' updates are unusable, and why.

`find_bad_updates` finds what can be seen without reading updates and buffers. The kernels and a check of the new model
find NaN and infinity, and raise `BadRows` with the rows at fault. `Aggregator.apply` then rejects the round or leaves
these clients out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from fedheal.core.layout import Sizes
from fedheal.core.updates import FLOATS, Updates

NOT_NEGATIVE = frozenset({"loss", "train_loss", "accuracy_without"})
POSITIVE = frozenset({"steps", "lr", "reach"})
SMALLEST_POSITIVE = 1e-100  # methods divide by the square, which must stay finite
NON_FINITE = "its update holds NaN, infinity or numbers too large to square"
NON_FINITE_BUFFERS = "its buffers hold NaN or infinity"


class BadUpdate(ValueError):
    """Updates that cannot be used; `reasons` are the clients at fault, each with the reason."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        first, *more = (f"client '{client}': {why}" for client, why in reasons.items())
        others = f" (and {len(more)} more)" if more else ""
        super().__init__(f"{first}{others}; on_bad_update='skip' would leave such clients out")
        self.reasons = dict(reasons)

    def __reduce__(self) -> tuple[type[BadUpdate], tuple[dict[str, str]]]:
        """Pickle the reasons instead of the message, so that another process can raise it again."""
        return type(self), (self.reasons,)


class BadRows(Exception):
    """These rows of the updates cannot count, each for its reason. The state is still as it was."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__(f"rows {list(reasons)} cannot count")
        self.reasons = dict(reasons)


class NonFinite(BadRows):
    """These rows of the updates hold NaN or infinity, or entries whose squares overflow; or their buffers do."""

    def __init__(self, rows: Sequence[int], reason: str = NON_FINITE) -> None:
        super().__init__({int(row): reason for row in rows})

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(self.reasons)


def is_divergence(reason: str) -> bool:
    """Return whether an update is bad because training has diverged: it holds numbers that are not finite.

    >>> is_divergence(NON_FINITE_BUFFERS), is_divergence("its metric 'loss' is nan"), is_divergence("its id occurs twice")
    (True, True, False)
    """
    return reason.startswith((NON_FINITE, NON_FINITE_BUFFERS)) or reason.endswith((" is nan", " is inf", " is -inf"))


def find_bad_updates(updates: Updates, sizes: Sizes, needs: frozenset[str]) -> dict[int, str]:
    """Return the rows that cannot be used, each with the reason.

    Raise ValueError if no client at all sent a metric that is needed: that is the caller's mistake, not a client's.
    """
    if not updates.clients:
        return {}
    if "domain" in needs and updates.domains is None:
        raise ValueError("this aggregator needs the domain of each client: give Updates(..., domains=[...])")
    if missing := sorted(needs - set(updates.metrics) - {"domain"}):
        known = sorted(updates.metrics)
        raise ValueError(f"this aggregator needs the client metric '{missing[0]}'; the updates have {known}")
    if common_reason := _find_common_reason(updates, sizes):
        return dict.fromkeys(range(len(updates.clients)), common_reason)
    times = Counter(updates.clients)
    reasons: dict[int, str] = {}
    for row, (client, examples) in enumerate(zip(updates.clients, updates.num_examples.tolist(), strict=True)):
        if times[client] > 1:
            reasons[row] = f"its id occurs {times[client]} times in this cohort"
        elif client in updates.refused:
            why = updates.refused[client]
            reasons[row] = f"its id occurs again in this cohort, with a reply that is refused: {why}"
        elif not 0 < examples < float("inf"):
            reasons[row] = f"num_examples must be a positive number, got {examples:g}"
    if "domain" in needs:
        for row, domain in enumerate(updates.domains or ()):
            if not domain:
                reasons.setdefault(row, "it does not say which domain it belongs to")
    for name in sorted(needs - {"domain"}):
        for row, value in enumerate(updates.metrics[name].tolist()):
            if not math.isfinite(value):
                reasons.setdefault(row, f"its metric '{name}' is {value}")
            elif value < 0 and name in NOT_NEGATIVE:
                reasons.setdefault(row, f"its metric '{name}' must not be negative, got {value:g}")
            elif value < SMALLEST_POSITIVE and name in POSITIVE:
                reasons.setdefault(row, f"its metric '{name}' must be at least {SMALLEST_POSITIVE:g}, got {value:g}")
    return reasons


def find_non_finite_buffers(updates: Updates) -> list[int]:
    """Return the rows whose buffers hold NaN or infinity."""
    if updates.buffers is None or not updates.buffers.is_floating_point():
        return []
    rows: list[int] = torch.nonzero(~torch.isfinite(updates.buffers).all(dim=1)).flatten().tolist()
    return rows


def _find_common_reason(updates: Updates, sizes: Sizes) -> str | None:
    """Return a reason that holds for all rows, since they are one matrix."""
    if (dtype := updates.no_rows.dtype) not in FLOATS:
        return f"its update must be float32, float64, bfloat16 or float16, got {dtype}"
    if (length := updates.no_rows.shape[1]) != sizes.params:
        return f"its update has length {length}; the model has {sizes.params} parameters"
    if updates.buffers is not None and not updates.buffers.is_floating_point():
        return f"its buffers are {updates.buffers.dtype}, not floating point"
    if updates.counters is not None and (updates.counters.is_floating_point() or updates.counters.is_complex()):
        return f"its counters are {updates.counters.dtype}, not integers"
    for name, length in (("buffers", sizes.buffers), ("counters", sizes.counters)):
        matrix = getattr(updates, name)
        if matrix is not None and matrix.shape[1] != length:
            return f"its {name} have length {matrix.shape[1]}; the model has {length}"
    return None
