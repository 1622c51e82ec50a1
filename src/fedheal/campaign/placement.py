"""Where runs go: over all GPUs, several at a time on one that a single run would leave idle, or over the processors.

A run with large steps fills a GPU by its lanes, and another beside it would only take turns with it. A run with small steps is
bound by the processor that launches them: a few such runs share a GPU, as far as its memory goes.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from fedheal.campaign.gpu_estimate import Demand, demand
from fedheal.simulate.experiment import Experiment

FILLS = 2e10  # floating-point operations a step: with so many the lanes of one run fill a GPU
MOST_RUNS = 4  # that share a GPU
SHARE = 0.9  # of the memory that is free: an estimate is not exact
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process sees, and its free memory in bytes."""

    index: int
    free: int


@dataclass(frozen=True)
class Place:
    """So many runs at a time, that see one GPU alone; `None`: what they see is left to them."""

    gpu: int | None
    slots: int


def cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def number() -> int:
    """How many GPUs there are, without starting CUDA."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """The GPUs with the memory that is free when first asked.

    A process of its own asks: whoever does starts CUDA, which takes memory on each GPU for good, and keeps a GPU that is set to
    serve one process only.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_looked).result()


def _looked() -> tuple[Gpu, ...]:
    return tuple(Gpu(i, torch.cuda.mem_get_info(i)[0]) for i in range(torch.cuda.device_count()))


def side_by_side(free: float, need: Demand) -> int:
    """How many such runs to have at a time on a GPU with so much free memory; one in any case.

    >>> side_by_side(80e9, Demand(bytes=3e9, flops_per_step=3e8)), side_by_side(8e9, Demand(3e9, 3e8))
    (4, 2)
    >>> side_by_side(80e9, Demand(3e9, flops_per_step=1e11))
    1
    """
    if need.flops_per_step >= FILLS:
        return 1
    return max(1, min(MOST_RUNS, int(SHARE * free / need.bytes)))


def spread(there: Sequence[Gpu], processes: int, needs: Iterable[Demand], cores: int) -> list[Place]:
    """So many runs at a time over the GPUs in turn; 0: on each as many as the neediest lets, but a core for every run.

    >>> spread([Gpu(0, 10**10), Gpu(1, 10**10)], 3, [], 8)
    [Place(gpu=0, slots=2), Place(gpu=1, slots=1)]
    """
    if processes:
        slots = [processes // len(there) + (i < processes % len(there)) for i in range(len(there))]
    else:
        most, needs = max(1, cores // len(there)), list(needs)
        slots = [min([most, *(side_by_side(gpu.free, need) for need in needs)]) for gpu in there]
    return [Place(gpu.index, n) for gpu, n in zip(there, slots, strict=True) if n]


def places(experiments: Sequence[Experiment], processes: int = 0) -> list[Place]:
    """Where runs on one device go. `processes`: so many at a time; 0: as many as the device takes.

    `auto` and `cuda` are any GPU; a run that names one, such as `cuda:1`, goes there and sees the others.
    """
    processes = 1 if len(experiments) == 1 else processes
    kind, _, index = experiments[0].device.partition(":")
    seen = number() if kind in ("auto", "cuda") else 0
    named = [i for i in range(seen) if not index or index == str(i)]
    if not named:  # where a GPU was asked for, the first run says that there is none
        each = max(experiment.threads * experiment.workers for experiment in experiments)
        return [Place(None, 1 if kind == "cuda" else processes or max(1, cores() // each))]
    needs = [] if processes else [demand(experiment) for experiment in experiments]
    open_question = bool(needs) and all(need.flops_per_step < FILLS for need in needs)
    free = {gpu.index: gpu.free for gpu in gpus()} if open_question else {}
    found = spread([Gpu(i, free.get(i, 0)) for i in named], processes, needs, cores())
    return [Place(None, place.slots) for place in found] if index else found


def emptiest(there: Sequence[Place], taken: Iterable[Place]) -> Place | None:
    """The place with the fewest runs, if any has a free slot."""
    load = Counter(taken)
    return min((place for place in there if load[place] < place.slots), key=lambda place: load[place], default=None)


def visible(gpu: int, said: str | None) -> str:
    """The value of CUDA_VISIBLE_DEVICES that shows one GPU alone, where it is `said` here.

    >>> visible(1, None), visible(1, "GPU-8a, GPU-3c")
    ('1', 'GPU-3c')
    """
    return said.split(",")[gpu].strip() if said else str(gpu)


def pace(there: Sequence[Place], runs: int) -> str:
    """How many runs go at a time, and where, in words.

    >>> pace([Place(0, 2), Place(1, 2)], 9), pace([Place(None, 8)], 3)
    ('4 at a time on 2 GPUs', '3 at a time')
    """
    at_once = min(runs, sum(place.slots for place in there))
    used = min(at_once, sum(place.gpu is not None for place in there))
    where = f" on {used} GPUs" if used > 1 else " on one GPU" if used else ""
    return f"{at_once} at a time{where}"
