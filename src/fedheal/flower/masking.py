"""FPHL on the clients: the server divides two sums and keeps a handful of numbers per client.

The clients mask their own updates (`fedheal.aggregate.client_share`) and say which entries they kept. The weights are FAEL's,
measured on what arrives, by the same stage as ever; only the mean is taken by the two sums of `combine`.
"""

from __future__ import annotations

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


def divided(kept: Mapping[str, NDArray[np.uint8]]) -> Reducer:
    """The mean over entries that their clients kept, as `sum u k D / sum u k`."""

    def reduced(draft: Draft, weights: Floats) -> tuple[Packed, dict[str, Any]]:
        numerator = torch.zeros(draft.sizes.params, dtype=torch.float64)
        denominator = torch.zeros_like(numerator)
        for row, client, u in zip(draft.rows, draft.clients, weights, strict=True):
            mask = torch.from_numpy(kept[client])
            numerator += u * draft.updates.deltas[row]  # the masked update
            denominator += u * mask
        step = combine(torch.zeros_like(numerator), numerator, denominator)
        made, told = reduce.mean(replace(draft, step=step), weights)
        shares = {client: float(kept[client].mean()) for client in draft.clients}
        return made, told | {"kept": shares, "unkept": float((denominator == 0).double().mean())}

    return reduced
