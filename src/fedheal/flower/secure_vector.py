"""What a client adds to a secure sum, as whole numbers, and what the server makes of the sum.

A client with weight `u`, update `D` and mask `k` adds `s k D / R`, `s k` and `s B / Q`. Here `s = u / max u`, `B` is the change
of its float buffers, and `R` and `Q` are the round's ranges. All lie in [-1, 1] and are rounded to multiples of `2 / LEVELS`.
`R` is a power of two that is at least the largest norm of a masked update in the round, so no entry is ever clipped. `Q` is
the same for the buffers. `docs/secure.md` derives `compute_error_bound`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedheal.core.arrays import Floats

LEVELS = 2**30  # Flower rounds to int32
MODULUS = 2**48  # Flower sends int64: larger than its default, this costs nothing and leaves room for more clients
MAX_CLIENTS = MODULUS // LEVELS - 1
CLIP = 1.0


class SecureSumError(ValueError):
    """A secure sum that failed or cannot be right. `dropped`: the nodes that left it, and why."""

    def __init__(self, reason: str, dropped: Mapping[int, str] | None = None) -> None:
        super().__init__(reason)
        self.dropped = dict(dropped or {})


@dataclass(frozen=True)
class SumOrder:
    """What the server tells a client for its part in a sum."""

    round: int
    share: float  # s
    update_range: float  # R
    buffer_range: float  # Q


def choose_range(norms: Iterable[float]) -> float:
    """Return the smallest power of two that is at least every norm; 1 if all are 0.

    >>> choose_range([0.3, 2.5]), choose_range([4.0]), choose_range([0.0])
    (4.0, 4.0, 1.0)
    """
    largest = max(norms, default=0.0)
    return 2.0 ** math.ceil(math.log2(largest)) if largest > 0 else 1.0


def find_extreme_weights(weights: Mapping[str, float]) -> dict[str, str]:
    """Return the clients to leave out so that the smallest weight is large enough for a sum, with the reason.

    If it is large enough, no client is left out. Otherwise clients far above or below the median are left out.

    >>> find_extreme_weights({"a": 1.0, "b": 2.0, "c": 1e-9})
    {'c': 'its weight is 1e-09 times the median of this round, too far from it for a secure sum'}
    >>> find_extreme_weights({"a": 1.0, "b": 2.0, "c": 1e-6})
    {}
    """
    most = 0.5 * LEVELS / max(len(weights), 1)  # times the smallest weight, so that rounding does not hide it
    positive = sorted(weight for weight in weights.values() if weight > 0)
    if not positive or max(positive) < most * min(weights.values()):
        return {}
    median = positive[(len(positive) - 1) // 2]
    ratios = {client: weight / median for client, weight in weights.items()}
    factor = 0.9 * math.sqrt(most)
    return {
        client: f"its weight is {ratio:.3g} times the median of this round, too far from it for a secure sum"
        for client, ratio in ratios.items()
        if not 1 / factor < ratio < factor
    }


def encode_share(order: SumOrder, delta: Floats, kept: NDArray[np.bool_], buffers: Floats) -> Floats:
    """Return a client's part of the sum, as multiples of `2 / LEVELS`, which Flower does not round again.

    Raises:
        SecureSumError: An entry is beyond the range, and would be clipped.
    """
    parts = (order.share * delta / order.update_range, order.share * kept, order.share * buffers / order.buffer_range)
    vector = np.concatenate(parts)
    largest = float(np.abs(vector).max(initial=0.0))
    if not largest <= CLIP * (1 + 1e-9):  # also if it is NaN
        raise SecureSumError(
            f"an entry is {largest:g} times the range that the server gives: it would be clipped, and is not sent"
        )
    return np.clip(np.rint(vector * (LEVELS / 2)) / (LEVELS / 2), -CLIP, CLIP)


@dataclass(frozen=True)
class SecureSums:
    """The sums of one round, and what was decided for it."""

    shares: dict[str, float]  # client -> s, of the clients in the sums
    weights: dict[str, float]  # client -> u, which sum to 1
    update_range: float
    buffer_range: float
    totals: Floats  # [2 G + B]

    def compute_error_bound(self) -> float:
        """Return how far, at most, an entry of the new parameters is from the mean without quantisation.

        Each of n clients rounds by at most `1 / LEVELS`. The mean is `R X / Y` with `|X| <= Y`, and an entry that anybody
        keeps has `Y >= min s`. So the error is at most `2 R n / (LEVELS min s - n)`.

        Raises:
            SecureSumError: The smallest share is too small for so many clients: rounding could hide it.
        """
        num_clients, resolved = len(self.shares), LEVELS * min(self.shares.values())
        if not resolved > 2 * num_clients:
            raise SecureSumError(
                f"the smallest weight is {min(self.shares.values()):g} of the largest: too small to be summed"
            )
        return 2 * self.update_range * num_clients / (resolved - num_clients)

    def decode(self, num_params: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums `sum s k D`, `sum s k` and the mean change of the buffers.

        Raises:
            SecureSumError: The sums cannot come from honest clients: a mean exceeds the range, or a weight the total.
        """
        numerator, denominator, buffers = np.split(self.totals, [num_params, 2 * num_params])
        total, slack = math.fsum(self.shares.values()), 2 * len(self.shares) / LEVELS
        is_plausible = (np.abs(numerator) <= denominator + slack).all() and (denominator <= total + slack).all()
        if not (is_plausible and (np.abs(buffers) <= total + slack).all()):
            raise SecureSumError("the sum is beyond what its clients can add up to: a client's vector is wrong")
        change = torch.from_numpy(buffers * (self.buffer_range / total))
        return torch.from_numpy(numerator * self.update_range), torch.from_numpy(denominator), change

    def measure_exposure(self, denominator: Tensor) -> float:
        """Return the share of entries that, by their denominator, one client alone has kept: the server sees its entry."""
        shares = np.unique(list(self.shares.values()))
        values, tolerance = denominator.numpy(), len(self.shares) / LEVELS
        nearest = shares[np.clip(np.searchsorted(shares, values - tolerance), 0, len(shares) - 1)]
        return float((np.abs(values - nearest) <= tolerance).mean())
