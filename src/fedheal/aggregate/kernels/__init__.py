"""The loops over `[K, G]`, in interchangeable modules with one contract.

- `observe(deltas, rows, tensors, mask) -> UpdateNorms`: add this round's signs to the counts of a `CountMask`, in place, and
  measure the masked updates. Raises `NonFinite`, with the counts as they were, if a row holds NaN or infinity.
- `measure(deltas, rows, tensors) -> UpdateNorms`: measure the whole updates. Raises `NonFinite` likewise.
- `average(params, deltas, rows, weights, mask) -> (params [G], unkept)`: per entry `W + sum u k D / sum u k`, unmoved where
  nobody keeps it, and the number of such entries. Sums are in float64 and rounded once, to the dtype of `params`.
- `mask_block(deltas, rows, mask, start, stop) -> float64 [k, stop - start]`: a block of `k * D`, on the updates' device.

`rows` are sorted by client id and every sum runs in that order, so results do not depend on the order of arrival.
`tensors` are the lengths of the parameter tensors. Work goes in column blocks, so that temporaries stay small.
"""

from types import ModuleType

from torch import Tensor

from fedheal.aggregate.kernels import cpu, reference
from fedheal.core.import_path import import_triton_kernels

__all__ = ["check_kernel", "choose_kernel", "cpu", "reference"]

NAMES = ("cpu", "cuda", "reference")


def check_kernel(name: str) -> None:
    if name != "auto" and name not in NAMES:
        raise ValueError(f"kernel = {name!r}: use 'auto' or one of {list(NAMES)}")


def choose_kernel(name: str, deltas: Tensor) -> ModuleType:
    """Return the kernel of that name; for `auto` the fastest one for the updates' device."""
    check_kernel(name)
    device_type = deltas.device.type
    if name == "reference":
        return reference
    if name not in ("auto", device_type):
        raise ValueError(f"kernel = '{name}': the updates are on '{deltas.device}'; use 'auto' or 'reference'")
    if device_type == "cpu":
        return cpu
    fast = import_triton_kernels("fedheal.aggregate.kernels.cuda", device_type)
    if fast is None and name != "auto":
        raise ValueError(f"kernel = '{name}' needs Triton, which is not installed: use 'auto' or 'reference'")
    return fast or reference
