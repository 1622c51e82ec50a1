"""A model with a complex parameter, and the same model whose parameter is a real one of two parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Waves(nn.Module):
    """An odd number of real parameters comes first, so that the complex one begins at an odd place of the flat vector."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(0)
        self.bias = nn.Parameter(torch.zeros(classes))
        self.turn = nn.Parameter(0.05 * torch.randn(192, classes, generator=chance, dtype=torch.complex64))

    def weight(self) -> Tensor:
        return self.turn

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1).to(torch.complex64) @ self.weight()).real + self.bias


class TwoParts(Waves):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.turn = nn.Parameter(torch.view_as_real(self.turn.detach()).clone())

    def weight(self) -> Tensor:
        return torch.view_as_complex(self.turn)
