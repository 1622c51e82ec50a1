"""FPHL on the clients: the server divides two sums and keeps a handful of numbers per client.

The clients mask their own updates (`fedheal.aggregate.client_share`) and send which entries they kept. The weights are
FAEL's. The same stage as on the server computes them, on the masked updates. Only the mean is the quotient of two sums
(`combine`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedheal.aggregate import combine, reduce
from fedheal.aggregate.aggregator import Reducer
from fedheal.aggregate.draft import Draft
from fedheal.core.arrays import Floats
from fedheal.core.layout import Packed


def make_masked_mean(masks: Mapping[str, NDArray[np.uint8]]) -> Reducer:
    """Return a reducer that averages each entry over the clients that kept it: `sum u k D / sum u k`."""

    def reduce_masked(draft: Draft, weights: Floats) -> tuple[Packed, dict[str, Any]]:
        numerator = torch.zeros(draft.sizes.params, dtype=torch.float64)
        denominator = torch.zeros_like(numerator)
        for row, client, weight in zip(draft.rows, draft.clients, weights, strict=True):
            numerator += weight * draft.updates.deltas[row]  # masked already
            denominator += weight * torch.from_numpy(masks[client])
        step = combine(torch.zeros_like(numerator), numerator, denominator)
        model, report = reduce.mean(replace(draft, step=step), weights)
        kept = {client: float(masks[client].mean()) for client in draft.clients}
        return model, report | {"kept": kept, "unkept": float((denominator == 0).double().mean())}

    return reduce_masked
