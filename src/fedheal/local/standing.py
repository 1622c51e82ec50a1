"""Who counts how much among all clients seen so far, those absent included.

A cohort's shares do not say it: whoever comes alone has all of them. `ServerContext.standing` is each client's weight before
it was made a share, and a term that must weigh absent clients too keeps the last one of each among what it shares.
"""

from __future__ import annotations

import math

from torch import Tensor

from fedheal.local.term import Arrays, ServerContext

PREFIX = "q."


def remembered(shared: Arrays) -> dict[str, Tensor]:
    """What a term has kept: the last standing by client, each under a name of its own."""
    return {name: value for name, value in shared.items() if name.startswith(PREFIX)}


def brought(ctx: ServerContext) -> dict[str, Tensor]:
    """This cohort's, under the same names."""
    return {f"{PREFIX}{c}": q.clone() for c, q in zip(ctx.updates.clients, ctx.standing, strict=True)}


def total(standings: Arrays) -> float:
    """Their sum, in whatever order they come: a restored state has another."""
    return math.fsum(float(q) for q in standings.values())
