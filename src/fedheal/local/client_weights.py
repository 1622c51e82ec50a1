"""The weights of all clients seen so far, absent ones included.

Normalised weights say nothing about absent clients: a client that is alone in a cohort has weight 1. A term that must weigh
absent clients keeps each client's last unnormalised weight (`ServerContext.unnormalised_weights`) among its shared values.
"""

from __future__ import annotations

import math

from torch import Tensor

from fedheal.core.parameter import Parameter
from fedheal.local.term import Arrays, ServerContext

PREFIX = "q."  # of the shared value that holds a client's weight
FAIR_CONTROLS = Parameter(
    "fair_controls",
    description="what weighs the controls: uniform, or p, the average's weights",
    source="the original rules",
    default="uniform",
    choices=("uniform", "p"),
)


def get_stored_weights(shared: Arrays) -> dict[str, Tensor]:
    """Return the last unnormalised weight of each client from a term's shared values, by prefixed client id."""
    return {name: value for name, value in shared.items() if name.startswith(PREFIX)}


def get_cohort_weights(ctx: ServerContext) -> dict[str, Tensor]:
    """Return the unnormalised weights of this round's clients, by prefixed client id."""
    return {f"{PREFIX}{c}": q.clone() for c, q in zip(ctx.updates.clients, ctx.unnormalised_weights, strict=True)}


def sum_weights(weights: Arrays) -> float:
    """Return the exact sum, which does not depend on the order: a restored state has another."""
    return math.fsum(float(q) for q in weights.values())
