"""Many runs: in several processes here, or as tasks of a Ray cluster. A finished run is not run again."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fedheal.execute import run
from fedheal.experiment import Experiment


@dataclass(frozen=True)
class Job:
    """One run and where it goes."""

    experiment: Experiment
    folder: Path
    track: str | None = None

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").exists()


def run_all(jobs: Sequence[Job], processes: int = 1, ray: str | None = None) -> Iterator[Job]:
    """Run what is not finished, and yield each job as it ends. An error in one stops the rest; what is done stays done."""
    open_jobs = [job for job in jobs if not job.finished]
    yield from (job for job in jobs if job.finished)
    if not open_jobs:
        return
    yield from _on_ray(open_jobs, ray) if ray is not None else _here(open_jobs, processes)


def _here(jobs: Sequence[Job], processes: int) -> Iterator[Job]:
    if processes == 1 or len(jobs) == 1:
        for job in jobs:
            _do(job)
            yield job
        return
    # Ctrl-C reaches every process of a terminal: it is this one that ends the others.
    ignore = signal.SIGINT, signal.SIG_IGN
    pool = ProcessPoolExecutor(min(processes, len(jobs)), get_context("spawn"), signal.signal, ignore)
    try:
        asked = {pool.submit(_do, job): job for job in jobs}
        for done in as_completed(asked):
            done.result()
            yield asked[done]
    except BaseException:
        # What runs can be resumed; what waits must not start.
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in workers:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _do(job: Job) -> None:
    callbacks = []
    if job.track is not None:
        from fedheal.track import tracker  # only those who track need its libraries

        callbacks.append(tracker(job.track, job.folder))
    run(job.experiment, job.folder, resume=True, callbacks=callbacks, progress=False)


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
        asked = {
            remote.options(**_resources(job.experiment)).remote(job.experiment.to_dict(), job.track): job
            for job in jobs
        }
        waiting = list(asked)
        while waiting:
            (done,), waiting = ray.wait(waiting, num_returns=1)
            _unpack(ray.get(done), asked[done].folder)
            yield asked[done]
    finally:
        if started:
            ray.shutdown()


def _check_answers(address: str) -> None:
    """Ray itself waits for minutes for a cluster that is not there."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return  # 'auto', 'local', or a URL, which Ray knows best
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ValueError(f"no Ray cluster answers at {address!r}: {error.strerror or error}") from None


def _resources(experiment: Experiment) -> dict[str, float]:
    gpu = experiment.device.startswith("cuda")
    return {"num_cpus": experiment.threads * experiment.workers, "num_gpus": 1.0 if gpu else 0.0}


def _do_elsewhere(described: dict[str, Any], track: str | None) -> dict[str, bytes]:
    """On a cluster's machine: run in a temporary folder and send back what it holds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        _do(Job(Experiment.of(described), folder, track))
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _unpack(files: dict[str, bytes], folder: Path) -> None:
    """The run's files, `result.json` last: a folder that has it is whole."""
    for name in sorted(files, key=lambda name: name == "result.json"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[name])
