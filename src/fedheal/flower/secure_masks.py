"""Flower's SecAgg+, with masks from a stream cipher.

Flower 1.41 folds the 32-byte seed of each mask into 32 bits and expands these with numpy's Mersenne Twister. All 2^32 seeds
can be tried, so such a mask does not hide a vector for long. This module runs private copies of Flower's two SecAgg+ modules
that expand the whole seed with ChaCha20. Everything else is Flower's: keys, key agreement, secret sharing, encryption and the
stages. Flower's own modules are not changed.
"""

import hashlib
import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray


def expand_seed(seed: bytes, num_range: int, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[np.int64]]:
    """Expand a seed into arrays of whole numbers from 0 to `num_range - 1`; `num_range` is a power of two.

    A seed is used for one vector only (Flower draws new keys for every sum), so the cipher needs no nonce.

    >>> [array.shape for array in expand_seed(bytes(32), 2**40, [(1,), (2, 3)])]
    [(1,), (2, 3)]
    """
    cipher = Cipher(algorithms.ChaCha20(hashlib.sha256(seed).digest(), nonce=bytes(16)), mode=None).encryptor()
    streams = (np.frombuffer(cipher.update(bytes(8 * math.prod(shape))), "<i8").reshape(shape) for shape in shapes)
    return [stream & (num_range - 1) for stream in streams]


def _copy_module(name: str) -> Any:
    """Return a private copy of one of Flower's modules, with masks from `expand_seed`."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert callable(module.pseudo_rand_gen)  # what the stages call, by this name
    module.pseudo_rand_gen = expand_seed
    return module


client_protocol = _copy_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
server_protocol = _copy_module("flwr.server.workflow.secure_aggregation.secaggplus_workflow")
