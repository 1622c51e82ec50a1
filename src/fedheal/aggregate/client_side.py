"""FPHL where the data is: a client masks its own update, the server needs only two sums.

Whether an entry is kept depends on the client's own history, its update and tau. With `u` any positive multiple of its
weight (the same for all clients), the server adds up `u * kept * D` and `u * kept` and divides. Plain sums over clients
let FPHL run under secure aggregation, or over very many clients without sign counts on the server. `docs/design.md` says
what the sums reveal.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate import kernels
from fedheal.aggregate.draft import Draft
from fedheal.aggregate.fedheal_stages import TAU, VARIANT
from fedheal.aggregate.masks.consistency import ConsistencyState, consistency_mask
from fedheal.aggregate.validate import NON_FINITE, BadUpdate, NonFinite
from fedheal.aggregate.weights.distance import compute_distances
from fedheal.core.arrays import Array, as_tensor
from fedheal.core.layout import Layout, Packed
from fedheal.core.state import State, expect
from fedheal.core.updates import FLOATS, Updates


class Share(NamedTuple):
    """A client's part of FPHL.

    Attributes:
        masked: The update, with 0 where an entry is not kept.
        kept: Which entries the client keeps.
        distance: The client's distance, for FAEL.
    """

    masked: Tensor
    kept: Tensor
    distance: float


def client_share(
    delta: Array,
    state: State | None = None,
    tau: float = TAU.default,
    variant: str = VARIANT.default,
    layout: Layout | None = None,
) -> tuple[Share, ConsistencyState]:
    """Mask one client's update by its own history.

    Args:
        delta: The client's update, local minus global parameters, as a flat vector.
        state: What the last call gave; None before the client's first round.
        tau: The least consistency of an entry that is kept.
        variant: `"paper"` or `"released"`.
        layout: Needed only for the distance of `variant="released"`, which is summed over tensors.

    Returns:
        The client's share, and its new state, which stays with the client.

    Raises:
        ValueError: The update is not finite (`BadUpdate`), no vector of floats, or does not fit the layout or the state.

    >>> share, state = client_share(np.array([1.0, -2.0]))
    >>> share.masked.tolist(), share.kept.tolist(), share.distance
    ([1.0, -2.0], [True, True], 5.0)
    """
    TAU.check(tau)
    VARIANT.check(variant)
    update = as_tensor(delta, "delta")
    if update.ndim != 1 or update.dtype not in FLOATS:
        raise ValueError(f"delta is {update.dtype} of shape {tuple(update.shape)}: give a vector of floats")
    layout = layout or Layout.flat(len(update))
    if layout.sizes().params != len(update):
        raise ValueError(f"delta has length {len(update)}; the layout has {layout.sizes().params} parameters")
    stage = consistency_mask(tau, variant)
    updates = Updates(["me"], update[None], [1])
    model = Packed(torch.zeros_like(update), torch.empty(0), torch.empty(0, dtype=torch.int64))
    kernel = kernels.choose_kernel("auto", updates.deltas)
    draft = Draft(sizes=layout.sizes(), model=model, updates=updates, rows=np.zeros(1, np.int64), kernel=kernel)
    try:
        draft, after = stage.apply(draft, stage.init(layout) if state is None else state)
    except NonFinite:
        raise BadUpdate({"me": NON_FINITE}) from None
    kept = kernels.reference.compute_mask(draft.mask, 0, update, 0, len(update))
    distance = compute_distances(draft.measure_norms(), variant)
    return Share(update * kept, kept, float(distance[0])), expect(after, ConsistencyState)


def combine(model: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Make the new parameters from the two sums over clients.

    Args:
        model: The global parameters `[G]`.
        numerator: The sum of `u * kept * D`.
        denominator: The sum of `u * kept`. An entry where it is 0 does not move.

    Returns:
        The new global parameters `[G]`.

    >>> combine(torch.zeros(2), torch.tensor([3.0, 0.0]), torch.tensor([2.0, 0.0])).tolist()
    [1.5, 0.0]
    """
    moved = denominator > 0
    return (model + torch.where(moved, numerator / denominator.where(moved, 1.0), 0.0)).to(model.dtype)
