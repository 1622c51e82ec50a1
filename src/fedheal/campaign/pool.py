"""Run many jobs, in a pool of processes on this machine or on a Ray cluster. A finished job is not run again.

A process that is one of several on GPUs sees one GPU only and calls it `cuda:0`. So neither a run's description nor its
result depends on the GPU that it ran on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_context

from fedheal.campaign import placement
from fedheal.campaign.checks import check_jobs, check_trackers
from fedheal.campaign.jobs import Job, handle_failed_job, run_job
from fedheal.campaign.placement import VISIBLE_DEVICES, DeviceSlots, least_loaded, plan_slots
from fedheal.campaign.ray import run_on_ray
from fedheal.core.checks import check_main_guard
from fedheal.engine.workers import end_with_parent, explain_broken_pool
from fedheal.simulate.interrupts import stop_on_terminate

GRACE_SECONDS = 60.0  # for processes whose neighbour was killed
POLL_SECONDS = 0.02


def run_all(jobs: Sequence[Job], processes: int = 1, ray: str | None = None) -> Iterator[Job]:
    """Check that all unfinished jobs can start, then run them; return an iterator over the jobs as they finish.

    `processes` is how many at a time; 0 means one per core, or as many as the GPUs take. One at a time runs in this process.
    `ray` is the address of a cluster to run on instead. An error in one job stops the rest; finished runs stay.
    """
    unfinished = [job for job in jobs if not job.is_finished]
    check_trackers(unfinished)
    describe_schedule(unfinished, processes, ray)  # raises if they cannot be run so
    if ray is None:  # a cluster has devices of its own
        check_jobs(unfinished)
    folders = {job.folder for job in unfinished}
    return _run_unfinished([job for job in jobs if job.folder not in folders], unfinished, processes, ray)


def _run_unfinished(
    finished: Sequence[Job], unfinished: Sequence[Job], processes: int, ray: str | None
) -> Iterator[Job]:
    yield from finished
    if unfinished:
        yield from _run_here(unfinished, processes) if ray is None else run_on_ray(unfinished, ray)


def describe_schedule(jobs: Sequence[Job], processes: int, ray: str | None = None) -> str:
    """Say how `run_all` will run these jobs. Raise ValueError if they cannot be run so."""
    unfinished = [job for job in jobs if not job.is_finished]
    if not unfinished:
        return "all of them finished"
    several = processes != 1 and len(unfinished) > 1
    if (several or ray is not None) and any(job.experiment.engine == "ray" for job in unfinished):
        raise ValueError(
            "engine = 'ray' gives one run the whole cluster: use --jobs 1, or give --ray instead, which sends whole runs there"
        )
    if ray is not None:
        return "as tasks of a Ray cluster"
    groups = [[job.experiment for job in group] for group in _group_by_device(unfinished)]
    return ", then ".join(placement.describe(plan_slots(group, processes), len(group)) for group in groups)


def _group_by_device(jobs: Sequence[Job]) -> list[list[Job]]:
    devices = dict.fromkeys(job.experiment.device for job in jobs)
    return [[job for job in jobs if job.experiment.device == device] for device in devices]


def _run_here(jobs: Sequence[Job], processes: int) -> Iterator[Job]:
    for group in _group_by_device(jobs):
        places = plan_slots([job.experiment for job in group], processes)
        if (slots := sum(place.slots for place in places)) > 1:
            check_main_guard("jobs", slots)
            yield from _run_in_pools(group, places)
            continue
        for job in group:  # in this process, which compiles its kernels once for all of them
            with handle_failed_job(job):
                run_job(job)
            yield job


def _run_in_pools(jobs: Sequence[Job], places: Sequence[DeviceSlots]) -> Iterator[Job]:
    """Start a pool of processes for each place, and give the next job to the least loaded one with a free slot."""
    pools = {place: _start_pool(place) for place in places}
    waiting, running = deque(jobs), dict[Future[None], tuple[Job, DeviceSlots]]()
    try:
        while waiting or running:
            while waiting and (place := least_loaded(places, (used for _, used in running.values()))) is not None:
                job = waiting.popleft()
                with _ignore_interrupts(), explain_broken_pool():
                    running[pools[place].submit(_run_in_worker, job)] = job, place
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, _ = running.pop(future)
                with explain_broken_pool(), handle_failed_job(job):
                    future.result()
                yield job
    except BaseException:
        close_pools(list(pools.values()), terminate=True)
        raise
    close_pools(list(pools.values()))


def close_pools(pools: Sequence[ProcessPoolExecutor], terminate: bool = False) -> None:
    """End the processes of pools. Waiting jobs do not start; running ones save their state if they are terminated.

    A process that was killed may hold the lock of its pool's queue, and the others would wait for it for ever. So they
    are killed if they do not end within `GRACE_SECONDS` of its death.
    """
    workers = [process for pool in pools for process in (getattr(pool, "_processes", None) or {}).values()]
    for pool in pools:
        pool.shutdown(wait=False, cancel_futures=True)
    for process in workers if terminate else []:
        process.terminate()
    deadline = None
    while any(process.exitcode is None for process in workers):
        if deadline is None and any(process.exitcode for process in workers):
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            for process in workers:
                process.kill()
        time.sleep(POLL_SECONDS)
    for pool in pools:
        pool.shutdown(wait=True)


def _start_pool(place: DeviceSlots) -> ProcessPoolExecutor:
    visible = None if place.gpu is None else placement.visible_device(place.gpu, os.environ.get(VISIBLE_DEVICES))
    try:
        return ProcessPoolExecutor(place.slots, get_context("spawn"), _prepare_worker, (visible,))
    except OSError as error:  # semaphores are files in /dev/shm
        remedy = "make room in /dev/shm or make it writable, or use jobs=1"
        raise ValueError(f"jobs = {place.slots}: processes need semaphores ({error.strerror}): {remedy}") from error


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C for a moment, so that processes started here ignore it too: this process stops them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _prepare_worker(visible: str | None) -> None:
    """Set up a new process before CUDA starts there. While idle it ignores signals; the pool's shutdown ends it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    if visible is not None:
        os.environ[VISIBLE_DEVICES] = visible


def _run_in_worker(job: Job) -> None:
    """Run a job in a process of a pool, where SIGTERM saves its state and stops it."""
    stop_on_terminate()
    try:
        run_job(job)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
