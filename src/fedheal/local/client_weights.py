"""Sums over all clients, absent ones included: their weights, and their number.

Normalised weights say nothing about absent clients: a client that is alone in a cohort has weight 1. A term that must weigh
absent clients keeps each client's last unnormalised weight (`ServerContext.unnormalised_weights`) among its shared values.

A plain mean over all clients, `c = 1/M sum c_m`, must follow M, which grows and shrinks in a federation without a fixed
number of clients. A client that never took part has `c_m = 0`, so the sum stays and the mean is rescaled.
"""

import math

from torch import Tensor

from fedheal.core.parameter import Parameter
from fedheal.local.term import Arrays, ServerContext

PREFIX = "q."  # of the shared value that holds a client's weight
COUNT = "clients"  # the shared value that holds M, the number of clients that a mean is over
FAIR_CONTROLS = Parameter(
    "fair_controls",
    "uniform",
    "what weighs the controls: uniform, or p, the average's weights",
    "the original rules",
    choices=("uniform", "p"),
)


def get_stored_weights(shared: Arrays) -> dict[str, Tensor]:
    """Return the last unnormalised weight of each client from a term's shared values, by prefixed client id."""
    return {name: value for name, value in shared.items() if name.startswith(PREFIX)}


def update_weights(shared: Arrays, ctx: ServerContext) -> dict[str, Tensor]:
    """Return the stored weights after this round, in which the cohort's are replaced."""
    cohort = zip(ctx.updates.clients, ctx.unnormalised_weights, strict=True)
    return get_stored_weights(shared) | {f"{PREFIX}{client}": q.clone() for client, q in cohort}


def rescale_mean(shared: Arrays, name: str, clients: int) -> Tensor:
    """Return the mean over all clients of this name, rescaled if their number has changed."""
    count = int(shared.get(COUNT, clients))  # states of version 0.1 have none
    return shared[name] if count == clients else shared[name] * (count / clients)


def sum_weights(weights: Arrays) -> float:
    """Return the exact sum, which does not depend on the order: a restored state has another."""
    return math.fsum(float(q) for q in weights.values())


def share_out_weights(shared: Arrays, ctx: ServerContext) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Return the share left to known clients, the cohort's shares of all, and every client's last unnormalised weight."""
    known, weights = get_stored_weights(shared), update_weights(shared, ctx)
    known_total = sum_weights(known)
    new_total = sum_weights({name: q for name, q in weights.items() if name not in known})
    known_share = known_total / (known_total + new_total) if known_total > 0 else 0.0
    return known_share, ctx.unnormalised_weights / sum_weights(weights), weights
