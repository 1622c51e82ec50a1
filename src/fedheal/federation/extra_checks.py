"""Checks of what a reply holds beside its parameters: counters, buffers, metrics and the messages of local terms."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedheal.aggregate.validate import POSITIVE
from fedheal.core.layout import VARIANCE, Entry, Layout, Packed
from fedheal.federation.model_arrays import widen_bfloat16
from fedheal.federation.replies import RejectedReply, TrainReply
from fedheal.federation.reply_limits import (
    EXTRA_FACTOR,
    MAX_BUFFER,
    MIN_NORMS,
    find_counter_jump,
    find_far_norms,
    measure_norm,
)
from fedheal.federation.reply_updates import view_flat
from fedheal.local.term import Arrays

COUNTS = frozenset({"measured_rounds"})  # these metrics differ by far between veterans and newcomers
# Running statistics of features in other units differ by less, and so do the steps of clients with little data.
UNUSABLE_FACTOR = 1e6


def check_extras(reply: TrainReply, layout: Layout, model: Packed) -> None:
    """Check a client's counters and buffers against those it was sent.

    Args:
        reply: The client's reply.
        layout: The model's layout.
        model: The model that the client was sent.

    Raises:
        RejectedReply: A counter jumps or does not fit its dtype, or a buffer is far out of range. The aggregator names buffers
            that are not finite.
    """
    counters, buffers = model.counters.numpy(), widen_bfloat16(model.buffers).numpy()
    for entry in layout.entries:
        values, place = reply.arrays[entry.name], slice(entry.start, entry.stop)
        problem = None
        if entry.kind == "counter" and values.size:
            problem = _find_bad_counter(entry, values, counters[place])
        elif entry.kind == "buffer" and values.size:
            problem = _find_bad_buffer(entry, values, buffers[place])
        if problem:
            raise RejectedReply(problem)


def _find_bad_counter(entry: Entry, values: NDArray[Any], sent: NDArray[Any]) -> str | None:
    if entry.dtype != torch.bool and int(values.max()) > torch.iinfo(entry.dtype).max:
        return f"its '{entry.name}' holds {int(values.max())}, beyond {entry.dtype}"
    return find_counter_jump(entry.name, sent, values)


def _find_bad_buffer(entry: Entry, values: NDArray[Any], sent: NDArray[Any]) -> str | None:
    if entry.name.endswith(VARIANCE) and (values < 0).any():
        return f"its '{entry.name}' holds a negative variance"
    with np.errstate(over="ignore"):  # a wider float may hold what float64 does not
        sizes = np.abs(view_flat(values).astype(np.float64))
    # A constant may stay, such as a mask of huge numbers.
    most = np.maximum(np.abs(sent.astype(np.float64)), MAX_BUFFER)
    beyond = sizes[(sizes > most) & np.isfinite(sizes)]
    return f"its '{entry.name}' holds {beyond.max():g}, beyond {MAX_BUFFER:g}" if beyond.size else None


def measure_buffer_moves(replies: Mapping[str, TrainReply], layout: Layout, model: Packed) -> dict[str, float]:
    """Return by client how far its buffers moved from those of the model that it was sent, as a norm."""
    buffers = widen_bfloat16(model.buffers).numpy()
    entries = [entry for entry in layout.entries if entry.kind == "buffer"]

    def measure_move(reply: TrainReply) -> float:
        moves = (view_flat(reply.arrays[e.name]) - buffers[e.start : e.stop] for e in entries)
        with np.errstate(over="ignore", invalid="ignore"):  # the aggregator names buffers that are not finite
            return math.hypot(*(float(np.linalg.norm(move.astype(np.float64))) for move in moves))

    return {client: measure_move(reply) for client, reply in replies.items()}


def find_unusable_extras(
    replies: Mapping[str, TrainReply], moved: Mapping[str, float], model: Packed, needs: Sequence[str] = ()
) -> dict[str, str]:
    """Return the clients whose buffers or needed metrics would make the model useless for all, with the reason.

    Args:
        replies: The replies of the round.
        moved: By client, how far its buffers moved.
        model: The model that the clients were sent.
        needs: The metrics that the method needs.
    """
    finite = {client: norm for client, norm in moved.items() if math.isfinite(norm)}  # the aggregator names the others
    than = f"more than {UNUSABLE_FACTOR:g} times the median of this round and the norm of the buffers it was sent"
    huge = _find_outliers(finite, least=measure_norm(model.buffers) or 1.0)  # all may be 0, and only few may move
    unusable = {client: f"its buffers moved by {moved[client]:g}, {than}" for client in huge}
    for name in sorted(POSITIVE.intersection(needs)):
        values = {c: reply.metrics[name] for c, reply in replies.items() if reply.metrics.get(name, 0.0) > 0}
        tiny = _find_outliers({client: 1 / value for client, value in values.items()})
        than = f"less than the median of this round by a factor of more than {UNUSABLE_FACTOR:g}"
        unusable |= {client: f"its metric '{name}' = {values[client]:g} is {than}" for client in tiny}
    return unusable


def _find_outliers(values: Mapping[str, float], least: float = 0.0) -> list[str]:
    """Return the clients whose value is more than `UNUSABLE_FACTOR` times the cohort's upper median, and than `least`.

    They are fewer than half.
    """
    ordered = sorted(values.values())
    limit = UNUSABLE_FACTOR * max(ordered[len(ordered) // 2], least) if len(ordered) >= MIN_NORMS else math.inf
    return [client for client, value in values.items() if value > limit]


def find_far_extras(
    replies: Mapping[str, TrainReply], moved: Mapping[str, float], needs: Sequence[str] = ()
) -> dict[str, str]:
    """Return the clients with buffers, messages, examples or metrics far beyond the cohort's median, with the reason.

    Args:
        replies: The replies of the round.
        moved: By client, how far its buffers moved.
        needs: The metrics that the method needs.
    """
    sent = {client: _measure_messages(reply.messages) for client, reply in replies.items()}
    far = {client: f"buffers with {why}" for client, why in find_far_norms(moved, EXTRA_FACTOR).items()}
    far |= {client: f"messages with {why}" for client, why in find_far_norms(sent, EXTRA_FACTOR).items()}
    far |= find_far_examples({client: float(reply.num_examples) for client, reply in replies.items()})
    for name in sorted(set(needs) - COUNTS):
        far |= find_far_metrics(name, {c: reply.metrics[name] for c, reply in replies.items() if name in reply.metrics})
    return far


def find_far_examples(examples: Mapping[str, float]) -> dict[str, str]:
    """Return the clients whose number of examples is far above the cohort's median, with the reason.

    >>> find_far_examples({"a": 100.0, "b": 300.0, "c": 1e9})
    {'c': '1e+09 examples, far above the median of this round'}
    """
    return {
        client: f"{examples[client]:g} examples, far above the median of this round"
        for client in find_far_norms(examples, EXTRA_FACTOR)
    }


def find_far_metrics(name: str, values: Mapping[str, float]) -> dict[str, str]:
    """Return the clients whose metric is far from the cohort's median, with the reason.

    >>> find_far_metrics("loss", {"a": 0.5, "b": 2.0, "c": 1e9})
    {'c': "the metric 'loss' = 1e+09, far above the median of this round"}
    """
    if name in POSITIVE:  # methods divide by it, so a small one counts as much as a large one
        large, inverse = values, {client: 1 / value for client, value in values.items() if value > 0}
    else:  # among sites with losses near 0, one that has still to learn is a thousand times above the median
        large, inverse = {client: max(abs(value), 1.0) for client, value in values.items()}, {}
    far = dict.fromkeys(find_far_norms(large, EXTRA_FACTOR), "above")
    far |= dict.fromkeys(find_far_norms(inverse, EXTRA_FACTOR), "below")
    return {c: f"the metric '{name}' = {values[c]:g}, far {where} the median of this round" for c, where in far.items()}


def _measure_messages(groups: Sequence[Arrays]) -> float:
    tensors = (tensor for group in groups for tensor in group.values())
    floats = (tensor if tensor.is_floating_point() else tensor.abs().double() for tensor in tensors)  # ids are integers
    return math.hypot(*map(measure_norm, floats))
