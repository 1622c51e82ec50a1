"""What makes a client's update unusable, as far as it can be told without reading the whole update.

NaN and infinity inside the updates are found by the kernels, in the pass that reads them anyway.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch

from fedheal.core.layout import Sizes
from fedheal.core.updates import FLOATS, Updates

NOT_NEGATIVE = frozenset({"loss", "train_loss"})
POSITIVE = frozenset({"steps", "lr", "reach"})


class BadUpdate(ValueError):
    """Updates that cannot be used; `reasons` names the clients."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        first, *more = (f"client '{client}': {why}" for client, why in reasons.items())
        others = f" (and {len(more)} more)" if more else ""
        super().__init__(f"{first}{others}; on_bad_update='skip' would leave such clients out")
        self.reasons = dict(reasons)

    def __reduce__(self) -> tuple[type[BadUpdate], tuple[dict[str, str]]]:
        """It is made of its reasons, not of its sentence, where it comes back from another process."""
        return type(self), (self.reasons,)


def flaws(updates: Updates, sizes: Sizes, needs: frozenset[str]) -> dict[int, str]:
    """Row -> what is wrong with it. A metric that no client sent is a mistake of the caller's, not of a client."""
    if not updates.clients:
        return {}
    if "domain" in needs and updates.domains is None:
        raise ValueError("this aggregator needs the domain of each client: give Updates(..., domains=[...])")
    missing = sorted(needs - set(updates.metrics) - {"domain"})
    if missing:
        raise ValueError(
            f"this aggregator needs the client metric '{missing[0]}'; the updates have {sorted(updates.metrics)}"
        )
    whole = _whole(updates, sizes)
    if whole:
        return dict.fromkeys(range(len(updates.clients)), whole)
    times = Counter(updates.clients)
    found: dict[int, str] = {}
    for row, client in enumerate(updates.clients):
        examples = float(updates.num_examples[row])
        if times[client] > 1:
            found[row] = f"its id stands {times[client]} times in this cohort"
        elif client in updates.refused:
            found[row] = f"its id stands in this cohort again, with a reply that is refused: {updates.refused[client]}"
        elif not 0 < examples < float("inf"):
            found[row] = f"num_examples = {examples:g}; a positive number is needed"
    if "domain" in needs:
        for row, domain in enumerate(updates.domains or ()):
            if not domain:
                found.setdefault(row, "it does not say which domain it belongs to")
    for name in sorted(needs - {"domain"}):
        for row, value in enumerate(updates.metrics[name].tolist()):
            if not math.isfinite(value):
                found.setdefault(row, f"its metric '{name}' is {value}")
            elif value < 0 and name in NOT_NEGATIVE:
                found.setdefault(row, f"its metric '{name}' is {value:g}; a number that is not negative is needed")
            elif value <= 0 and name in POSITIVE:
                found.setdefault(row, f"its metric '{name}' is {value:g}; a positive number is needed")
    if updates.buffers is not None:
        for row in _rows(~torch.isfinite(updates.buffers).all(dim=1)):
            found.setdefault(row, "its buffers hold NaN or infinity")
    return found


def _whole(updates: Updates, sizes: Sizes) -> str | None:
    """A flaw that all rows share, since they are one matrix."""
    if updates.deltas.dtype not in FLOATS:
        return f"its update is {updates.deltas.dtype}; float32, float64, bfloat16 and float16 will do"
    if updates.deltas.shape[1] != sizes.params:
        return f"its update has length {updates.deltas.shape[1]}; the model has {sizes.params} parameters"
    if updates.buffers is not None and not updates.buffers.is_floating_point():
        return f"its buffers are {updates.buffers.dtype}, not floating point"
    if updates.counters is not None and (updates.counters.is_floating_point() or updates.counters.is_complex()):
        return f"its counters are {updates.counters.dtype}, not integers"
    for name, length in (("buffers", sizes.buffers), ("counters", sizes.counters)):
        matrix = getattr(updates, name)
        if matrix is not None and matrix.shape[1] != length:
            return f"its {name} have length {matrix.shape[1]}; the model has {length}"
    return None


def _rows(mask: torch.Tensor) -> list[int]:
    return [int(row) for row in torch.nonzero(mask).flatten()]
