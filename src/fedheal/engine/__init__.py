"""Engines train the clients of a round: one after another, in several processes or machines, or side by side on a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch

from fedheal.core.errors import format_count
from fedheal.core.layout import Packed
from fedheal.core.processors import count_cores
from fedheal.data.domains import Split
from fedheal.engine.cohort import CohortEngine
from fedheal.engine.lanes import Lanes
from fedheal.engine.ray_actors import ActorPool
from fedheal.engine.ray_cluster import check_reachable, connect_to_cluster, import_ray
from fedheal.engine.serial import ClientResult, LocalTraining, SerialEngine, Shared, Task
from fedheal.engine.workers import WorkerPool

__all__ = ["Engine", "check_engine", "describe_engine", "open_engine"]

# At most. So a run made on a larger machine can be repeated, but hundreds of threads cannot stop a small one.
THREADS_PER_CORE = 4


class Engine(Protocol):
    """Trains the clients of a round."""

    def train(self, model: Packed, shared: Shared, tasks: Sequence[Task]) -> Iterator[ClientResult]:
        """Train each task's client from the global `model`, given each term's shared values; yield results in that order."""
        ...


@contextmanager
def open_engine(
    local_training: LocalTraining,
    engine: str = "auto",
    workers: int = 1,
    threads: int = 1,
    lanes: int | None = None,
    evaluated: Sequence[Split] = (),
    ray_address: str | None = None,
) -> Iterator[Engine]:
    """Open an engine for as long as the context lasts: `serial`, `lanes`, `cohort`, `ray`, or `auto`.

    `auto` is `serial` on a CPU. On a GPU it is `lanes` if the number of lanes is given, else `cohort`. A cohort uses
    lanes if a run does not fit it or lanes are faster. `workers` are the processes of the serial engine, with so many
    `threads` each. `lanes` are the clients that are trained side by side on a GPU, None for as many as fill it.
    `evaluated` are splits that workers can evaluate models on. With `ray` the workers are actors of the cluster at
    `ray_address` (`auto` if None), and 0 means as many as it has room for.
    """
    check_engine(local_training.device, engine, workers, threads, ray_address)
    on_gpu = local_training.device.type == "cuda"
    with torch.cuda.device(local_training.device) if on_gpu else nullcontext():  # Triton launches on the current device
        if engine == "ray":
            with (
                connect_to_cluster(ray_address or "auto") as ray,
                ActorPool(ray, local_training, workers, threads, evaluated) as actors,
            ):
                yield actors
        elif engine == "cohort" or (engine == "auto" and on_gpu and lanes is None):
            yield CohortEngine(local_training, only_if_faster=engine == "auto")
        elif engine == "lanes" or (engine == "auto" and on_gpu):
            yield Lanes(local_training, lanes)
        elif workers <= 1:
            yield SerialEngine(local_training)
        else:
            with WorkerPool(local_training, workers, threads, evaluated) as pool:
                yield pool


def describe_engine(engine: Engine) -> str:
    """Return which engine trained the clients. If another was tried or is usual there, also say why it did not."""
    if isinstance(engine, CohortEngine):
        return f"lanes, since {engine.fallback_reason}" if engine.fallback_reason else "cohort"
    if isinstance(engine, Lanes):
        return f"serial, since {engine.fallback_reason}" if engine.fallback_reason else "lanes"
    if isinstance(engine, ActorPool):
        return "ray"
    return f"{engine.number} workers" if isinstance(engine, WorkerPool) else "serial"


def check_engine(
    device: torch.device, engine: str, workers: int, threads: int = 1, ray_address: str | None = None
) -> None:
    """Raise ValueError if this machine cannot train so.

    The device may not support the engine or several workers, Ray may be missing, or workers and threads are too many.
    """
    if engine == "ray":
        import_ray()
        check_reachable(ray_address or "auto")
        return
    processors, most = format_count(count_cores(), "processor"), THREADS_PER_CORE * count_cores()
    if threads > most:
        raise ValueError(f"threads = {threads}: this machine has {processors}; use at most {most}, best 1")
    if workers * threads > most:
        each = f" with {format_count(threads, 'thread')} each"
        raise ValueError(f"workers = {workers}{each}: this machine has {processors}; use at most {most // threads}")
    is_gpu = device.type == "cuda"
    if engine in ("cohort", "lanes") and not is_gpu:
        raise ValueError(f"engine = '{engine}' needs a GPU, but this run uses '{device}'; use 'auto' or 'serial'")
    if is_gpu and workers > 1:
        raise ValueError(
            f"workers = {workers}: several processes train on CPUs only; on a GPU use workers = 1 and lanes"
        )
