"""Random integers that never change: a hash of a name and a position.

numpy may change the streams of its generators between versions, so data with pinned bytes cannot use them. Each quantity has
its own name ("street/train/slope"). The hash is splitmix64 (Steele, Lea and Flood, OOPSLA 2014) in counter mode.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

from fedheal.core.arrays import Integers

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(seed: int, count: int) -> npt.NDArray[np.uint64]:
    """Return the first `count` outputs of the generator started at `seed`."""
    z = np.arange(1, count + 1, dtype=np.uint64) * _STEP + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def draw_integers(name: str, low: int, high: int, *shape: int) -> Integers:
    """Return integers of that shape, uniform over low <= i <= high and determined by `name`."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    bits = (splitmix64(seed, math.prod(shape)) >> np.uint64(1)).astype(np.int64)
    return (low + bits % (high - low + 1)).reshape(shape)
