"""Checks of what a reply holds beside its parameters: counters, buffers and the messages of local terms."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedheal.core.layout import Layout, Packed
from fedheal.federation.model_arrays import widen_bfloat16
from fedheal.federation.replies import RejectedReply, TrainReply
from fedheal.federation.reply_limits import EXTRA_FACTOR, MAX_BUFFER, find_counter_jump, find_far_norms
from fedheal.federation.reply_updates import view_flat
from fedheal.local.term import Arrays

VARIANCE = "running_var"  # as torch's BatchNorm calls it


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
        values = reply.arrays[entry.name]
        if entry.kind == "counter" and values.size:
            if entry.dtype != torch.bool and int(values.max()) > torch.iinfo(entry.dtype).max:
                raise RejectedReply(f"its '{entry.name}' holds {int(values.max())}, beyond {entry.dtype}")
            if jump := find_counter_jump(entry.name, counters[entry.start : entry.stop], values):
                raise RejectedReply(jump)
        elif entry.kind == "buffer" and values.size:
            if entry.name.endswith(VARIANCE) and (values < 0).any():
                raise RejectedReply(f"its '{entry.name}' holds a negative variance")
            sent, sizes = (np.abs(a.astype(np.float64)) for a in (buffers[entry.start : entry.stop], view_flat(values)))
            # A constant of the model, such as a mask of large negative numbers, may stay.
            beyond = sizes[(sizes > np.maximum(sent, MAX_BUFFER)) & np.isfinite(sizes)]
            if beyond.size:
                raise RejectedReply(f"its '{entry.name}' holds {beyond.max():g}, beyond {MAX_BUFFER:g}")


def find_far_extras(replies: Mapping[str, TrainReply], layout: Layout, model: Packed) -> dict[str, str]:
    """Return the clients whose buffers moved, or whose messages are, far beyond the cohort's median, with the reason."""
    buffers = widen_bfloat16(model.buffers).numpy()
    entries = [entry for entry in layout.entries if entry.kind == "buffer"]

    def measure_move(reply: TrainReply) -> float:
        moves = (view_flat(reply.arrays[e.name]) - buffers[e.start : e.stop] for e in entries)
        return math.hypot(*(float(np.linalg.norm(move)) for move in moves))

    moved = {client: measure_move(reply) for client, reply in replies.items()}
    finite = {client: norm for client, norm in moved.items() if math.isfinite(norm)}
    sent = {client: _measure_messages(reply.messages) for client, reply in replies.items()}
    far = {client: f"buffers with {why}" for client, why in find_far_norms(finite, EXTRA_FACTOR).items()}
    return far | {client: f"messages with {why}" for client, why in find_far_norms(sent, EXTRA_FACTOR).items()}


def _measure_messages(groups: Sequence[Arrays]) -> float:
    tensors = (tensor for group in groups for tensor in group.values())
    floats = (tensor if tensor.is_floating_point() else tensor.abs().double() for tensor in tensors)  # ids are integers
    return math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in floats))
