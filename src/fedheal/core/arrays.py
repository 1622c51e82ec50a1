"""Array types, and small functions on arrays that every package shares."""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = Tensor | NDArray[Any]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Up to this size CUDA copies host memory to a buffer of its own before the call returns; to pin the memory takes longer.
STAGED_BYTES = 1 << 14


def as_tensor(array: Array | Sequence[Any], name: str = "the array") -> Tensor:
    """Return a tensor that shares the array's memory where possible. Raise TypeError unless it holds numbers for torch."""
    if isinstance(array, Tensor):
        return array.detach() if array.requires_grad else array
    values = np.asarray(array)
    if values.dtype.kind not in "fiubc" or values.dtype in (np.longdouble, np.clongdouble):
        raise TypeError(f"{name} is an array of dtype {values.dtype}, which torch does not support: give numbers")
    if not values.flags.writeable:
        values = values.view()
        try:
            values.flags.writeable = True  # torch has no read-only tensors; nothing here writes to an input
        except ValueError:
            values = values.copy()
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    regular = all(s >= 0 and s % values.itemsize == 0 for s in values.strides)
    return torch.from_numpy(values if regular else values.copy())


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor's copy on the device, without waiting for it."""
    if device.type == "cuda" and values.nbytes > STAGED_BYTES:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def make_frame(records: Iterable[Mapping[str, Any]]) -> Any:
    """Return records as a pandas data frame. Raise ValueError if pandas is not installed."""
    try:
        pandas = importlib.import_module("pandas")  # optional
    except ImportError:
        raise ValueError("a data frame needs pandas: pip install pandas") from None
    return pandas.DataFrame.from_records(list(records))


def normalise_weights(values: Floats) -> Floats:
    """Return non-negative values scaled to sum 1, or zeros if all are 0; a sum that would overflow is no exception."""
    top = values.max(initial=0.0)
    if not top > 0:
        return np.zeros_like(values)
    scaled = values / top
    normalised: Floats = scaled / scaled.sum()
    return normalised
