"""How a cohort is trained: one client after another, in several processes, or side by side on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedheal.engine import lanes as side_by_side
from fedheal.engine import workers as processes
from fedheal.engine.serial import LocalTraining
from fedheal.engine.workers import Trainer

__all__ = ["Trainer", "check_engine", "trainer"]


@contextmanager
def trainer(
    local_training: LocalTraining, engine: str = "auto", workers: int = 1, threads: int = 1, lanes: int | None = None
) -> Iterator[Trainer]:
    """A function that trains a cohort, as long as the context lasts; `auto` is lanes on a GPU."""
    check_engine(local_training.device, engine, workers)
    if engine == "lanes" or (engine == "auto" and local_training.device.type == "cuda"):
        yield side_by_side.Lanes(local_training, lanes)
        return
    with processes.trainer(local_training, workers, threads) as train:
        yield train


def check_engine(device: torch.device, engine: str, workers: int) -> None:
    """What cannot be trained so is said before anything is written."""
    gpu = device.type == "cuda"
    if engine == "lanes" and not gpu:
        raise ValueError(f"engine = 'lanes' needs a GPU, and this run is on '{device}'; 'auto' or 'serial' will do")
    if gpu and workers > 1:
        raise ValueError(f"workers = {workers}: several processes train on CPUs only; lanes do it on a GPU")
