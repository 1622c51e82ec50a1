"""One thread a process, set before torch is imported: test processes share the cores, and waiting threads would block them."""

import gc
import os
from collections.abc import Iterator
from unittest import mock

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # what is printed must not depend on the terminal that the tests are started from

gc.disable()  # until the tests are collected: what they import stays, and need not be looked at again and again

# Tests of a minute and more run first: one that starts last would keep the other processes waiting.
LONGEST = ("test_deployment", "test_ray", "test_simulation", "test_simulator", "test_embedded_benchmark", "test_kill")


@pytest.fixture(scope="session", autouse=True)
def skip_disk_waits() -> Iterator[None]:
    """Do not wait for the disk in this process: tests/power_loss.py models what a sync is for."""
    with mock.patch.object(os, "fsync", lambda descriptor: os.fstat(descriptor) and None):
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch use one thread: for small models a second thread only waits."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first, and leave the order of the others."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def pytest_collection_finish() -> None:
    """Collect garbage from here on, without what is there by now."""
    gc.enable()
    gc.freeze()
