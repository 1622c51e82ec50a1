"""Many runs: in several processes here, or as tasks of a Ray cluster. A finished run is not run again.

A process that runs on one of several GPUs, or beside others on one, sees that GPU alone and calls it `cuda:0`: neither a run's
description nor its result depends on where it went.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

from fedheal.campaign.gpu_estimate import demand
from fedheal.campaign.placement import VISIBLE, Place, emptiest, pace, places, side_by_side, visible
from fedheal.engine.memory import release_gpu_memory
from fedheal.engine.workers import end_with_parent, explain_broken_pool
from fedheal.runs.folder import write_bytes
from fedheal.simulate.build import check_method
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.interrupts import stop_on_terminate
from fedheal.simulate.runner import check_folder_owner, run

UNSEEN = 16 << 30  # bytes taken to be free on a GPU of a cluster, which cannot be asked from here


@dataclass(frozen=True)
class Job:
    """One run and where it goes."""

    experiment: Experiment
    folder: Path
    track: str | None = None

    def __post_init__(self) -> None:
        """Among many, what cannot be run is refused before the first of them starts."""
        check_method(self.experiment)

    @property
    def finished(self) -> bool:
        """A run in the folder counts only if it is this one, and another one is not to be overwritten."""
        check_folder_owner(self.folder, self.experiment)
        return (self.folder / "result.json").exists()


def run_all(jobs: Sequence[Job], processes: int = 1, ray: str | None = None) -> Iterator[Job]:
    """Run what is not finished, and yield each job as it ends. An error in one stops the rest; what is done stays done.

    `processes`: so many at a time; 0: one a core, or as many as the GPUs take. A single run at a time is run in this process.
    """
    open_jobs = [job for job in jobs if not job.finished]
    yield from (job for job in jobs if job.finished)
    if not open_jobs:
        return
    yield from _on_ray(open_jobs, ray) if ray is not None else _here(open_jobs, processes)


def at_a_time(jobs: Sequence[Job], processes: int, ray: str | None = None) -> str:
    """How `run_all` will go about it, for people."""
    open_jobs = [job for job in jobs if not job.finished]
    if not open_jobs:
        return "all of them finished"
    if ray is not None:
        return "as tasks of a Ray cluster"
    groups = _by_device(open_jobs)
    return ", then ".join(pace(places([job.experiment for job in group], processes), len(group)) for group in groups)


def _by_device(jobs: Sequence[Job]) -> list[list[Job]]:
    names = dict.fromkeys(job.experiment.device for job in jobs)
    return [[job for job in jobs if job.experiment.device == name] for name in names]


def _here(jobs: Sequence[Job], processes: int) -> Iterator[Job]:
    for group in _by_device(jobs):
        there = places([job.experiment for job in group], processes)
        if sum(place.slots for place in there) == 1:
            for job in group:  # in one process, which compiles its kernels once for all of them
                with _named(job):
                    _do(job)
                yield job
        else:
            yield from _at_once(group, there)


@contextmanager
def _named(job: Job) -> Iterator[None]:
    """An error says which of the runs it ended."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the run {job.folder}")
        raise


def _at_once(jobs: Sequence[Job], there: Sequence[Place]) -> Iterator[Job]:
    """A pool of processes at each place; the next job goes to the emptiest place as soon as there is a free one."""
    pools = {place: _pool(place) for place in there}
    waiting, running = deque(jobs), dict[Future[None], tuple[Job, Place]]()
    try:
        while waiting or running:
            while waiting and (place := emptiest(there, (taken for _, taken in running.values()))) is not None:
                job = waiting.popleft()
                with _unheard(), explain_broken_pool():
                    running[pools[place].submit(_do_there, job)] = job, place
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                job, _ = running.pop(ended)
                with explain_broken_pool(), _named(job):
                    ended.result()
                yield job
    except BaseException:
        # What waits must not start; what runs is told to save what it has.
        workers = [process for pool in pools.values() for process in (pool._processes or {}).values()]
        for pool in pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for process in workers:
            process.terminate()
        raise
    finally:
        for pool in pools.values():
            pool.shutdown(wait=True, cancel_futures=True)


def _pool(place: Place) -> ProcessPoolExecutor:
    seen = None if place.gpu is None else visible(place.gpu, os.environ.get(VISIBLE))
    return ProcessPoolExecutor(place.slots, get_context("spawn"), _begin, (seen,))


@contextmanager
def _unheard() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal, but those that start here do not hear it: this one ends the others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin(seen: str | None) -> None:
    """In a new process, before CUDA starts there."""
    for number in (signal.SIGINT, signal.SIGTERM):  # idle, it ends when it is told that there is no more to do
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    if seen is not None:
        os.environ[VISIBLE] = seen


def _do_there(job: Job) -> None:
    """In a process of a pool: stopped, a run saves its state."""
    stop_on_terminate()
    try:
        _do(job)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _do(job: Job) -> None:
    callbacks = []
    if job.track is not None:
        from fedheal.tracking.base import tracker  # only those who track need its libraries

        callbacks.append(tracker(job.track, job.folder))
    run(job.experiment, job.folder, resume=True, callbacks=callbacks, progress=False)
    release_gpu_memory()  # others may share the GPU


def _on_ray(jobs: Sequence[Job], address: str) -> Iterator[Job]:
    """Each run is a task with the processors it uses; its folder comes back as bytes and is written here, whole."""
    try:
        import ray
    except ImportError:
        raise ValueError("Ray is not installed: pip install 'fedheal[ray]'") from None
    started = not ray.is_initialized()
    if started:
        _check_answers(address)
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise ValueError(f"no Ray cluster answers at {address!r}: {error}") from None
    try:
        remote = ray.remote(max_retries=3)(_do_elsewhere)
        gpus = ray.cluster_resources().get("GPU", 0) > 0  # type: ignore[no-untyped-call]
        asked = {
            remote.options(**_resources(job.experiment, gpus)).remote(job.experiment.to_dict(), job.track): job
            for job in jobs
        }
        waiting = list(asked)
        while waiting:
            (done,), waiting = ray.wait(waiting, num_returns=1)
            _unpack(_answer(done), asked[done].folder)
            yield asked[done]
    finally:
        if started:
            ray.shutdown()


def _answer(done: Any) -> dict[str, bytes]:
    """What a task of the cluster gave. Its error is the run's own, as it would be here, without Ray's account of it."""
    import ray

    try:
        return cast(dict[str, bytes], ray.get(done))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ChildProcessError(f"a run on the Ray cluster was lost ({reason}); the same command goes on") from None


def _check_answers(address: str) -> None:
    """Ray itself waits for minutes for a cluster that is not there."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return  # 'auto', 'local', or a URL, which Ray knows best
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ValueError(f"no Ray cluster answers at {address!r}: {error.strerror or error}") from None


def _resources(experiment: Experiment, gpus: bool) -> dict[str, float]:
    """The part of a cluster that a run is to have. `auto` is a GPU where the cluster has any; small runs share one."""
    gpu = experiment.device.startswith("cuda") or (experiment.device == "auto" and gpus)
    share = 1 / side_by_side(UNSEEN, demand(experiment)) if gpu else 0.0
    return {"num_cpus": experiment.threads * experiment.workers, "num_gpus": share}


def _do_elsewhere(described: dict[str, Any], track: str | None) -> dict[str, bytes]:
    """On a cluster's machine: run in a temporary folder and send back what it holds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        _do(Job(Experiment.of(described), folder, track))
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _unpack(files: dict[str, bytes], folder: Path) -> None:
    """The run's files, each whole or not at all, and `result.json` last: a folder that has it is whole."""
    for name in sorted(files, key=lambda name: name == "result.json"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, files[name])
