"""How a cohort is trained: one client after another, in several processes, or side by side on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fedheal.engine import lanes as side_by_side
from fedheal.engine import workers as processes
from fedheal.engine.serial import Bench
from fedheal.engine.workers import Trainer

__all__ = ["Trainer", "trainer"]


@contextmanager
def trainer(
    bench: Bench, engine: str = "auto", workers: int = 1, threads: int = 1, lanes: int | None = None
) -> Iterator[Trainer]:
    """A function that trains a cohort, as long as the context lasts; `auto` is lanes on a GPU."""
    gpu = bench.device.type == "cuda"
    if engine == "lanes" and not gpu:
        raise ValueError(
            f"engine = 'lanes' needs a GPU, and this run is on '{bench.device}'; 'auto' or 'serial' will do"
        )
    if gpu and workers > 1:
        raise ValueError(f"workers = {workers}: several processes train on CPUs only; lanes do it on a GPU")
    if engine == "lanes" or (engine == "auto" and gpu):
        yield side_by_side.Lanes(bench, lanes)
        return
    with processes.trainer(bench, workers, threads) as train:
        yield train
