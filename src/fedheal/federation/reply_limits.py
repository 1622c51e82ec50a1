"""Bounds on what a client sends, checked before anything of it is kept, shown or recorded."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_NAME = 200  # characters of a client's or domain's name
MAX_TEXT = 300  # characters of a client's text in logs and records
MAX_ERROR = 200  # characters of a client's exception, whose text may hold its data

# A gradient, control variate or activation of a million belongs to a training that has diverged. Its mean over the
# clients would make every other site diverge, too. Class counts, at most a client's examples, may be larger.
MAX_MESSAGE = 1e6  # in a message of a local term

MAX_METRIC = 1e10  # of a metric that the aggregation needs: sums and squares of it stay finite

# Of an integer array the largest value wins in the global model. If one client could raise it at will, the others, who count on
# from there, would soon be beyond any bound.
MAX_COUNTER = 2**53
MAX_COUNTER_STEP = 10**9  # in one round: more batches than a client trains

MAX_BUFFER = 1e15  # of a running statistic: squares of it stay finite in float32

NORM_FACTOR = 10.0  # times the cohort's median: a norm above that is warned of, and left out with max_norm="auto"
# An update that is longer than these allow is that of a training that has diverged, unless the operator sets `max_norm`. A new
# site may move much further than sites that have nothing left to learn, but not by several times the model itself.
DIVERGED_FACTOR = 1000.0  # times the median of the others', or times the model's norm
DIVERGED_SHARE = 10.0  # at least so many times the model's norm
SMALLEST_ENTRY = 0.1  # the norm of a model that starts near zero counts as if its entries were of this size
# As NORM_FACTOR, for buffers and for the messages of local terms: these differ more between clients of different domains.
EXTRA_FACTOR = 1000.0
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


def find_counter_jump(name: str, sent: NDArray[Any], received: NDArray[Any]) -> str | None:
    """Return why a counter that a client sends back cannot be right, or None. A smaller one changes nothing.

    >>> find_counter_jump("num_batches_tracked", np.array(5), np.array(2**53))
    "its 'num_batches_tracked' counts 9007199254740987 more than the server sent, and at most 1000000000 are allowed"
    """
    step = int((received.reshape(-1).astype(np.int64) - sent.astype(np.int64)).max(initial=0))
    if step <= MAX_COUNTER_STEP:
        return None
    return f"its '{name}' counts {step} more than the server sent, and at most {MAX_COUNTER_STEP} are allowed"


def find_far_norms(norms: Mapping[str, float], factor: float = NORM_FACTOR) -> dict[str, str]:
    """Return the clients whose norm is far above the median of the cohort's, with the reason.

    Norms that are not finite are left out: the aggregator names these clients.

    >>> find_far_norms({"a": 1.0, "b": 2.0, "c": 50.0})
    {'c': 'norm 50, 25 times the median of this round'}
    """
    norms = {client: norm for client, norm in norms.items() if math.isfinite(norm)}
    ordered = sorted(norms.values())
    median = ordered[(len(ordered) - 1) // 2] if len(ordered) >= MIN_NORMS else 0.0
    return {
        client: f"norm {norm:.4g}, {norm / median:.3g} times the median of this round"
        for client, norm in norms.items()
        if median > 0 and norm > factor * median
    }


def find_diverged(norms: Mapping[str, float], model: Tensor) -> dict[str, str]:
    """Return the clients whose training has diverged, by the norms of their updates, with the reason.

    If that is more than half of them, what they were sent may be the cause, so the others are left out, too. An update that
    is not finite has diverged as well: the aggregator names its client.

    Args:
        norms: By client, the norm of its update, which may be infinite.
        model: The parameters that the clients were sent.

    >>> model = torch.full((64,), 10.0)
    >>> print(find_diverged({"a": 1.0, "b": 2.0, "c": 5e4}, model)["c"])
    its training has diverged: its update has norm 5e+04, the median of the others is 2,
    the model's norm 80; max_norm sets another limit
    >>> find_diverged({"a": 1e-6, "b": 1e-6, "newcomer": 50.0}, model)
    {}
    """
    finite = {client: norm for client, norm in norms.items() if math.isfinite(norm)}
    ordered = sorted(finite.values())
    smallest = SMALLEST_ENTRY * math.sqrt(model.numel())
    medians = {client: _find_median_of_others(ordered, norm) for client, norm in finite.items()}
    suspects = [c for c, norm in finite.items() if norm > DIVERGED_FACTOR * min(medians[c], smallest)]
    model_norm = measure_norm(model) if suspects else 0.0  # without suspects the pass over the model is saved
    reference, reasons = max(model_norm, smallest), {}
    for client in suspects:
        norm, median = norms[client], medians[client]
        if norm > max(DIVERGED_SHARE * reference, DIVERGED_FACTOR * min(median, reference)):
            others = f"the median of the others is {median:.3g}, " if median < math.inf else ""
            reasons[client] = (
                f"its training has diverged: its update has norm {norm:.4g}, {others}the model's norm {model_norm:.3g}; "
                "max_norm sets another limit"
            )
    diverged = len(reasons) + len(norms) - len(finite)
    if 2 * diverged <= len(norms):
        return reasons
    most = f"the training of {diverged} of {len(norms)} clients has diverged, which what they were sent may have caused"
    return dict.fromkeys(finite, most) | reasons


def _find_median_of_others(ordered: Sequence[float], norm: float) -> float:
    """Return the upper median of sorted norms without this one; infinity if there are fewer than two others.

    With the upper median, clients that hardly move cannot exclude the others unless they are at least half of all.
    """
    if len(ordered) < MIN_NORMS:
        return math.inf
    middle = (len(ordered) - 1) // 2
    return ordered[middle if middle < bisect_left(ordered, norm) else middle + 1]


def measure_norm(vector: Tensor) -> float:
    """Return the norm of a vector, whose square may be infinite in its own dtype."""
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))
