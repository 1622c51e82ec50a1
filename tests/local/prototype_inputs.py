"""Batches, contexts and messages by hand, for the methods with prototypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedheal.local.fedproc import FedProc
from fedheal.local.prototypes import Prototypes
from fedheal.local.term import Batch, Context
from local.quadratic import absorb_updates, make_packed, make_term_context, vector

AXES = {"prototypes": torch.tensor([[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]), "known": torch.tensor([1, 1, 0])}


def make_context(shared: dict[str, Tensor], term: Prototypes | None = None, **keys: Any) -> Context:
    """Return a context that the term has prepared."""
    term = term or FedProc()  # which prepares all that the others read
    ctx = make_term_context(term, make_packed(0.0), shared=shared, classes=3, **keys)
    term.prepare(ctx, ctx.received)
    return ctx


def make_batch(z: list[list[float]], y: list[int], ce: float = 2.0, last: bool = False) -> Batch:
    features = torch.tensor(z, requires_grad=True)
    return Batch(torch.zeros(len(y), 1), torch.tensor(y), torch.zeros(len(y), 3), torch.tensor(ce), features, last)


def make_message(*rows: tuple[list[float], float]) -> dict[str, Tensor]:
    """Return a client's message: each class's prototype and number of samples."""
    return {"prototypes": torch.tensor([row for row, _ in rows]), "count": torch.tensor([n for _, n in rows])}


def absorb_messages(
    term: Prototypes, messages: list[dict[str, Tensor]], shared: dict[str, Tensor], weights: list[float]
):
    locals_ = {str(i): vector(0.0) for i in range(len(messages))}
    return absorb_updates(term, make_packed(0.0), locals_, messages, shared, weights=weights)[1]
