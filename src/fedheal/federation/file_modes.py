"""Files that only their owner may read: a run folder holds clients' names, weights and errors, a state what they trained."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keep_private() -> Iterator[None]:
    """Make files with mode 0600 and folders with 0700 in this block, or in the function it decorates."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
