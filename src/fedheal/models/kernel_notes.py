"""What kernels find out about a tensor while they make it, noted at the tensor for the kernels that follow."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def set_note(tensor: Tensor, name: str, value: Any) -> None:
    """Note a value at a tensor, for as long as nobody changes it."""
    setattr(tensor, f"noted_{name}", (value, tensor._version))


def get_note(tensor: Tensor, name: str) -> Any:
    """Return the value that was noted, or None if there is none or the tensor was changed since."""
    value, version = getattr(tensor, f"noted_{name}", (None, 0))
    return value if version == tensor._version else None


@dataclass(frozen=True)
class Moments:
    """The mean and the sum of squared deviations of every channel in each chunk of a client's positions.

    Attributes:
        values: `[clients, 2, chunks, channels]`.
        chunks: The number of chunks.
        rows: The positions of a chunk.
    """

    values: Tensor
    chunks: int
    rows: int

    @staticmethod
    def allocate(clients: int, chunks: int, rows: int, channels: int, device: torch.device) -> "Moments":
        """Return memory that a kernel fills."""
        return Moments(torch.empty(clients, 2, chunks, channels, device=device), chunks, rows)
