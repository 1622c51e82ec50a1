"""The serial engine in several processes: each trains and evaluates a part, with the results of one process.

This process is one of them. The others are spawned, since torch's threads do not survive a fork, and join as soon as
they have started. All examples are in one block of memory that they share. They get the global model once a round, and
the next client while they still train one. Every client is trained with the same number of threads wherever it runs,
and every batch is evaluated as a whole.
"""

import ctypes
import io
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe, get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from fedheal.data.domains import Split
from fedheal.engine.channel import Channel, Outbox, Place
from fedheal.engine.pooled import PooledEngine, Prepare, Setup, make_sendable
from fedheal.engine.serial import LocalTraining, SerialEngine

JOBS_AHEAD = 2  # that another process has: the one that it does, and the next


class WorkerPool(PooledEngine):
    """An engine that trains and evaluates in several processes of this machine, of which this one is the first."""

    def __init__(
        self, local_training: LocalTraining, workers: int, threads: int, evaluated: Sequence[Split] = ()
    ) -> None:
        super().__init__(local_training, workers, threads, evaluated)
        self.setup, self.common = Outbox(), Outbox()  # what all workers get: once, and for the jobs of a round
        self.workers: list[_Worker] = []

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for worker in self.workers:
            if kind is not None or not worker.is_ready:  # nobody waits for what it does
                worker.process.terminate()
            worker.channel.close()  # ends a worker that waits for a job
        for worker in self.workers:
            worker.process.join()
        self.setup.close()
        self.common.close()

    def _run(self, prepare: Prepare, common: tuple[Any, ...], jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Do jobs here and elsewhere. Longest first, so that no other process waits while this one does a job."""
        self._start()
        with explain_broken_pool():
            for worker in self.workers:
                while worker.jobs:  # results that are no longer needed
                    worker.receive()
        do_job = prepare(Setup(self.local_training, self.evaluated, SerialEngine(self.local_training).train), *common)
        work, left = _Work(prepare, self.common.write(common)), deque(enumerate(jobs))
        while left or any(worker.jobs for worker in self.workers):
            with explain_broken_pool():
                self._send_jobs(work, left)
                results = list(self._receive_results(timeout=0 if left else None))
            for job, result in results:
                if isinstance(result, Exception):
                    raise result
                yield job, result
            if left and not results:
                number, job = left.popleft()
                yield number, do_job(job)

    def _send_jobs(self, work: "_Work", left: deque[tuple[int, Any]]) -> None:
        """Give every other process that is ready a job and the next one. The last jobs go to processes that are free first."""
        for ahead in range(JOBS_AHEAD):
            for worker in self.workers:
                if worker.is_ready and len(worker.jobs) == ahead and len(left) >= max(2, ahead * self.number):
                    worker.send_job(work, *left.popleft())

    def _receive_results(self, timeout: float | None) -> Iterator[tuple[int, Any]]:
        waiting = {worker.channel.connection: worker for worker in self.workers if worker.jobs or not worker.is_ready}
        for connection in wait(list(waiting), timeout):
            worker = waiting[connection]  # type: ignore[index]
            if worker.is_ready:
                yield worker.receive()
            else:
                with self._explain_failed_start():
                    worker.become_ready()

    def _start(self) -> None:
        """Start the other processes, once."""
        if self.workers:
            return
        keep_freed_memory()
        with self._explain_failed_start():
            for _ in range(self.number - 1):
                self.workers.append(_start_worker(self.setup, self.common, self.threads))
            place = self.setup.write(_describe_setup(self.local_training, self.evaluated))
            for worker in self.workers:
                worker.channel.send(place)

    @contextmanager
    def _explain_failed_start(self) -> Iterator[None]:
        """Tell a model that cannot be pickled from a process that dies later."""
        try:
            yield
        except BrokenProcessPool:
            raise
        except Exception as error:  # a user's class may raise anything when it is pickled
            is_dead = isinstance(error, EOFError | ConnectionError)
            reason = "its error is above" if is_dead else str(error).partition("\n")[0]
            raise ChildProcessError(
                f"workers = {self.number}: a worker process could not start with this model and method ({reason}). Define "
                "their classes and functions in a module that can be imported, and leave memory for another process; "
                "workers=1 needs neither"
            ) from error


class _Work(NamedTuple):
    """What the jobs that follow are done with."""

    prepare: Prepare
    place: Place


@dataclass
class _Worker:
    """Another process, as this one sees it."""

    process: BaseProcess
    channel: Channel
    jobs: deque[int] = field(default_factory=deque)  # the numbers of the jobs that it has
    work: _Work | None = None  # that it was last sent
    is_ready: bool = False  # whether it has started

    def become_ready(self) -> None:
        """Receive the word that it has started. Raise EOFError if it ended instead, BrokenProcessPool if it was killed."""
        try:
            self.is_ready = bool(self.channel.receive())
        except (EOFError, ConnectionError) as error:
            self.process.join()
            if (self.process.exitcode or 0) < 0:
                raise BrokenProcessPool from error
            raise

    def send_job(self, work: _Work, number: int, job: object) -> None:
        try:
            if work is not self.work:
                self.channel.send(work)
            self.channel.send(job)
        except ConnectionError as error:
            raise BrokenProcessPool from error
        self.work = work
        self.jobs.append(number)

    def receive(self) -> tuple[int, Any]:
        try:
            return self.jobs.popleft(), self.channel.receive()
        except (EOFError, ConnectionError) as error:
            raise BrokenProcessPool from error


def _start_worker(setup: Outbox, common: Outbox, threads: int) -> _Worker:
    here, there = Pipe()
    sent, received = Outbox(), Outbox()
    arguments = (Channel(there, received, sent), setup, common, threads)
    process = get_context("spawn").Process(target=_serve, args=arguments, daemon=True)
    process.start()
    there.close()
    return _Worker(process, Channel(here, sent, received))


def _describe_setup(local_training: LocalTraining, evaluated: Sequence[Split]) -> tuple[Any, ...]:
    """Return what a worker needs, in a form that a process can send: torch keeps the module's tensors tied where they are."""
    saved = io.BytesIO()
    torch.save(replace(local_training, examples={}, validation={}), saved)
    examples, validation = local_training.examples, local_training.validation
    return pickle.PickleBuffer(saved.getbuffer()), examples, validation, list(evaluated)


@contextmanager
def explain_broken_pool() -> Iterator[None]:
    """Raise ChildProcessError with the likely cause and the remedy if a process of a pool dies."""
    try:
        yield
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a worker process could not start or was killed, perhaps for lack of memory; saved rounds are not lost: "
            "resume with --resume (for compare, sweep and reproduce, rerun the command)"
        ) from error


def end_with_parent() -> None:
    """End this process as soon as its parent process ends, even if that is killed."""

    def watch(parent: BaseProcess) -> None:
        parent.join()
        os._exit(1)

    if (parent := parent_process()) is not None:
        threading.Thread(target=watch, args=(parent,), daemon=True).start()


def _serve(channel: Channel, setup_box: Outbox, common: Outbox, threads: int) -> None:
    """Do jobs until the main process closes the channel."""
    # Ctrl-C reaches every process of a terminal: the run's main process ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    keep_freed_memory()
    torch.set_num_threads(threads)
    try:
        place = channel.receive()
    except (EOFError, ConnectionError):  # the main process was killed before it has sent anything
        return
    saved, examples, validation, evaluated = setup_box.read(place, share=True)
    local_training: LocalTraining = torch.load(io.BytesIO(saved), weights_only=False)
    local_training = replace(local_training, examples=examples, validation=validation)
    setup = Setup(local_training, evaluated, SerialEngine(local_training).train)
    setup_box.close()
    with suppress(EOFError, ConnectionError):
        channel.send("ready")
        while True:
            message = channel.receive()
            if isinstance(message, _Work):
                work = message.prepare(setup, *common.read(message.place))
                continue
            try:
                channel.send(work(message))
            except Exception as error:
                channel.send(make_sendable(error))


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next batch; it would return large blocks to the system and fault them in again."""
    with suppress(OSError, AttributeError):  # other C libraries have no `mallopt`
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at the most that glibc takes
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
