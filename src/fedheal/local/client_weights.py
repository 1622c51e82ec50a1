"""The weights of all clients seen so far, absent ones included.

Normalised weights say nothing about absent clients: a client that is alone in a cohort has weight 1. A term that must weigh
absent clients keeps each client's last unnormalised weight (`ServerContext.unnormalised_weights`) among its shared values.
"""

from __future__ import annotations

import math

from torch import Tensor

from fedheal.core.parameter import Parameter
from fedheal.local.term import Arrays, ServerContext

PREFIX = "q."
FAIR_CONTROLS = Parameter(
    "fair_controls",
    description="what weighs the controls: uniform, or p, the average's weights",
    source="the original rules",
    default="uniform",
    choices=("uniform", "p"),
)


def remembered(shared: Arrays) -> dict[str, Tensor]:
    """What a term has kept: the last unnormalised_weights by client, each under a name of its own."""
    return {name: value for name, value in shared.items() if name.startswith(PREFIX)}


def brought(ctx: ServerContext) -> dict[str, Tensor]:
    """This cohort's, under the same names."""
    return {f"{PREFIX}{c}": q.clone() for c, q in zip(ctx.updates.clients, ctx.unnormalised_weights, strict=True)}


def total(standings: Arrays) -> float:
    """Their sum, in whatever order they come: a restored state has another."""
    return math.fsum(float(q) for q in standings.values())
