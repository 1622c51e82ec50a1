"""Decide where runs go: over all GPUs, several at a time on one that a single run would leave idle, or over the processors.

A run with large steps fills a GPU, and a second one would only take turns with it. A run with small steps is limited by
the processor that launches them. So a few such runs share a GPU as far as its memory allows.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from fedheal.campaign.gpu_estimate import SMALL_RUN_BYTES, is_small_run
from fedheal.core.processors import count_cores
from fedheal.simulate.devices import resolve_device
from fedheal.simulate.experiment import Experiment

MAX_RUNS_PER_GPU = 4
USABLE_MEMORY = 0.9  # of what is free, since the estimate is not exact
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process sees, and its free memory in bytes."""

    index: int
    free: int


@dataclass(frozen=True)
class DeviceSlots:
    """A number of runs at a time that see one GPU only; `gpu=None` leaves CUDA_VISIBLE_DEVICES unchanged."""

    gpu: int | None
    slots: int


def count_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@functools.cache
def query_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs with the memory that is free at the first call.

    A child process asks, because asking initialises CUDA: that takes memory on every GPU until the process ends.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_query_here).result()


def _query_here() -> tuple[Gpu, ...]:
    return tuple(Gpu(i, torch.cuda.mem_get_info(i)[0]) for i in range(torch.cuda.device_count()))


def count_small_runs(free: float) -> int:
    """Return how many small runs to have at a time on a GPU with that much free memory, at least one."""
    return max(1, min(MAX_RUNS_PER_GPU, int(USABLE_MEMORY * free / SMALL_RUN_BYTES)))


def plan_slots(experiments: Sequence[Experiment], processes: int = 0) -> list[DeviceSlots]:
    """Return where experiments with one value of `device` go.

    `auto` and `cuda` mean any GPU. A run that names a GPU, such as `cuda:1`, goes there and still sees the others.
    `processes` is how many run at a time. 0 means one per core on a CPU. On GPUs it means as many as the most demanding
    run allows, at most one per core. Raise ValueError if the device cannot be used here.
    """
    processes = 1 if len(experiments) == 1 else processes
    kind, _, index = experiments[0].device.partition(":")
    indices = [i for i in range(count_gpus() if kind in ("auto", "cuda") else 0) if not index or index == str(i)]
    if not indices:
        resolve_device(experiments[0].device)
        cores_per_run = max(experiment.threads * experiment.workers for experiment in experiments)
        return [DeviceSlots(None, processes or max(1, count_cores() // cores_per_run))]
    number = len(indices)
    if processes:
        slots = [processes // number + (i < processes % number) for i in range(number)]
    elif all(is_small_run(experiment) for experiment in experiments):
        free = {gpu.index: gpu.free for gpu in query_gpus()}
        slots = [min(max(1, count_cores() // number), count_small_runs(free[i])) for i in indices]
    else:
        slots = [1] * number
    return [DeviceSlots(None if index else i, n) for i, n in zip(indices, slots, strict=True) if n]


def least_loaded(places: Sequence[DeviceSlots], running: Iterable[DeviceSlots]) -> DeviceSlots | None:
    """Return the place with the fewest runs, or None if no slot is free."""
    load = Counter(running)
    return min((place for place in places if load[place] < place.slots), key=lambda place: load[place], default=None)


def visible_device(gpu: int, visible: str | None) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES that shows one GPU only; `visible` is its present value."""
    return visible.split(",")[gpu].strip() if visible else str(gpu)


def describe(places: Sequence[DeviceSlots], runs: int) -> str:
    """Say how many runs go at a time, and where: "4 at a time on 2 GPUs"."""
    at_a_time = min(runs, sum(place.slots for place in places))
    gpus = min(at_a_time, sum(place.gpu is not None for place in places))
    where = f" on {gpus} GPUs" if gpus > 1 else " on one GPU" if gpus else ""
    return f"{at_a_time} at a time{where}"
