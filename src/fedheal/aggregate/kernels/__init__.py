"""The loops over `[K, G]`, in interchangeable modules with one contract.

- `observe(deltas, rows, tensors, counts, slots, at_least, below, sign) -> Measured`: add this round's signs to the counts,
  in place, and measure what is kept. Raises `NonFinite`, with the counts as they were, if a row holds NaN or infinity.
- `measure(deltas, rows, tensors) -> Measured`: the same without counts; everything is kept.
- `average(params, deltas, rows, weights, kept) -> (params [G], unkept)`: per entry `W + sum u k D / sum u k`, unmoved where
  nobody keeps it, and the number of such entries. Sums are kept in float64 and rounded once, to the dtype of `params`.
- `masked(deltas, rows, kept, start, stop) -> float64 [k, stop - start]`: a block of `k * D`, where the updates are.

`rows` are in the order of the clients' ids and every sum runs in that order, so results do not depend on the order of
arrival. `tensors` are the lengths of the parameter tensors. Work goes in column blocks: temporaries stay small.
"""

import importlib
from functools import cache
from types import ModuleType

from torch import Tensor

from fedheal.aggregate.kernels import cpu, reference
from fedheal.aggregate.kernels.reference import NonFinite

__all__ = ["NonFinite", "check", "choose", "cpu", "reference"]

NAMES = ("cpu", "cuda", "reference")


def check(name: str) -> None:
    if name != "auto" and name not in NAMES:
        raise ValueError(f"kernel = {name!r}: use 'auto' or one of {list(NAMES)}")


def choose(name: str, deltas: Tensor) -> ModuleType:
    """The kernel called `name`; `auto` is the fastest one for where the updates are."""
    check(name)
    where = deltas.device.type
    if name == "auto":
        return cpu if where == "cpu" else _fast(where) or reference
    if name == "reference":
        return reference
    if name != where:
        raise ValueError(f"kernel = '{name}': the updates are on '{deltas.device}'")
    chosen = cpu if name == "cpu" else _fast(where)
    if chosen is None:
        raise ValueError(f"kernel = '{name}' needs Triton, which is not installed; 'auto' or 'reference' will do")
    return chosen


@cache
def _fast(where: str) -> ModuleType | None:
    """Triton comes with torch where it can be used, and is looked for only there."""
    try:
        return importlib.import_module("fedheal.aggregate.kernels.cuda") if where == "cuda" else None
    except ImportError:
        return None
