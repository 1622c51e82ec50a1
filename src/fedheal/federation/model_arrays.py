"""Models as named arrays: what they must hold, and bfloat16, which numpy does not have."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedheal.core.layout import Entry, Kind, Layout

# Without the module, only its name tells a float buffer from a parameter: these are torch's.
BUFFER_NAMES = ("running_mean", "running_var")


def infer_tensor_layout(tensors: Mapping[str, Tensor]) -> Layout:
    """Infer a layout from a `state_dict`: integers are counters, and torch's names tell float buffers from parameters.

    >>> infer_tensor_layout({"w": torch.zeros(3), "bn.running_mean": torch.zeros(2)}).sizes()
    Sizes(tensors=(('w', 3),), buffers=2, counters=0)
    """
    entries: list[Entry] = []
    ends: dict[Kind, int] = {"param": 0, "buffer": 0, "counter": 0}
    for name, values in tensors.items():
        kind: Kind = "counter"
        if values.is_floating_point():
            kind = "buffer" if name.endswith(BUFFER_NAMES) else "param"
        elif values.is_complex():
            raise ValueError(f"'{name}' holds complex numbers: give the module itself as `model`")
        start = ends[kind]
        ends[kind] = start + values.numel()
        entries.append(Entry(name, kind, tuple(values.shape), values.dtype, start, ends[kind]))
    if not ends["param"]:
        raise ValueError("the initial arrays hold no float parameters: give the model's whole state_dict")
    return Layout(tuple(entries))


def match_bfloat16(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert between float32 and bfloat16 where the layout says so: a wrapper or a stock client may not keep them apart."""
    dtypes = {entry.name: entry.dtype for entry in layout.entries}
    pair = (torch.float32, torch.bfloat16)
    return {k: t.to(dtypes[k]) if t.dtype in pair and dtypes.get(k) in pair else t for k, t in tensors.items()}


def widen_bfloat16(tensor: Tensor) -> Tensor:
    """Return bfloat16 as float32, which numpy has; any other tensor as it is."""
    return tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else tensor
