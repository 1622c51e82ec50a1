"""Array types, and small functions on arrays that every package shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = Tensor | NDArray[Any]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def tensor_of(array: Array | Sequence[Any], name: str = "the array") -> Tensor:
    """A tensor over the same memory where that can be, numpy arrays that may not be written to included."""
    if isinstance(array, Tensor):
        return array.detach()
    found = np.asarray(array)
    if found.dtype.kind not in "fiubc" or found.dtype in (np.longdouble, np.clongdouble):
        raise TypeError(f"{name} is an array of dtype {found.dtype}, which does not hold numbers that torch knows")
    if not found.flags.writeable:
        found = found.view()
        try:
            found.flags.writeable = True  # torch has no read-only tensors; nothing here writes to an input
        except ValueError:
            found = found.copy()
    if not found.dtype.isnative:
        found = found.astype(found.dtype.newbyteorder("="))
    regular = all(s >= 0 and s % found.itemsize == 0 for s in found.strides)
    return torch.from_numpy(found if regular else found.copy())


def normalised(values: Floats) -> Floats:
    """Shares that sum to 1, or zeros; numbers whose sum would overflow are no exception."""
    top = values.max(initial=0.0)
    return (values / top) / (values / top).sum() if top > 0 else np.zeros_like(values)
