"""Random numbers by purpose: derived from (seed, purpose, round, client, ...), never from a shared stream.

The engine, the order of clients, a resume or another use of randomness elsewhere cannot change what is drawn.
"""

import hashlib

import torch

# The sources of chance of an experiment. Each has the experiment's seed, unless a field gives it another one:
# `split_seed` for the clients' examples, `init_seed` for the initial model, `batch_seed` for batches, dropout,
# augmentation and cohorts.
SOURCES = ("split", "init", "batch")
SEED_FIELDS = tuple(f"{source}_seed" for source in SOURCES)


def derive(seed: int, purpose: str, *keys: str | int) -> int:
    """Derive a 63-bit seed for one purpose.

    >>> derive(0, "batches", 3, "street-0") == derive(0, "batches", 3, "street-0")
    True
    >>> derive(0, "batches", 3, "street-0") == derive(0, "batches", 4, "street-0")
    False
    """
    text = "\x1f".join([str(seed), purpose, *(f"{type(key).__name__}:{key}" for key in keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *keys: str | int) -> torch.Generator:
    """Return a new CPU generator for one purpose."""
    return torch.Generator().manual_seed(derive(seed, purpose, *keys))
