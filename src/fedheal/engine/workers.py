"""The serial engine in several processes: each trains and evaluates a part, with the results of one process.

Workers are spawned (torch's threads do not survive a fork). All examples are in one block of memory that they share. They get
the global model once a round, and the next client while they still train one. Every client is trained with the same number of
threads wherever it runs, and every batch is evaluated as a whole.
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
from dataclasses import replace
from multiprocessing import Pipe, get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from fedheal.data.domains import Split
from fedheal.engine.channel import Channel, Outbox, Place
from fedheal.engine.pooled import PooledEngine, Prepare, Setup, make_sendable
from fedheal.engine.serial import LocalTraining, SerialEngine

JOBS_AHEAD = 2  # that a worker has: the one that it does, and the next


class WorkerPool(PooledEngine):
    """An engine that trains and evaluates in several processes of this machine."""

    def __init__(
        self, local_training: LocalTraining, workers: int, threads: int, evaluated: Sequence[Split] = ()
    ) -> None:
        super().__init__(local_training, workers, threads, evaluated)
        self.common = Outbox()  # what all workers get
        self.workers: list[_Worker] = []

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for worker in self.workers:
            if kind is not None:  # nobody waits for the clients that are being trained
                worker.process.terminate()
            worker.channel.close()  # ends a worker that waits for a job
        for worker in self.workers:
            worker.process.join()
        self.common.close()

    def _run(self, prepare: Prepare, common: tuple[Any, ...], jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        self._start()
        left = deque(enumerate(jobs))
        with explain_broken_pool():
            for worker in self.workers:
                while worker.jobs:  # results that are no longer needed
                    worker.receive()
            work = _Work(prepare, self.common.write(common))
            for worker in self.workers:
                worker.send(work)
            for worker in self.workers * JOBS_AHEAD:
                worker.send_next(left)
        while busy := {worker.channel.connection: worker for worker in self.workers if worker.jobs}:
            for connection in wait(list(busy)):
                worker = busy[connection]  # type: ignore[index]
                with explain_broken_pool():
                    job, result = worker.receive()
                    worker.send_next(left)
                if isinstance(result, Exception):
                    raise result
                yield job, result

    def _start(self) -> None:
        """Start all processes once, to tell a model that cannot be pickled from a process that dies later."""
        if self.workers:
            return
        setup = Outbox()
        try:
            for _ in range(self.number):
                self.workers.append(_start_worker(setup, self.common, self.threads))
            place = setup.write(_describe_setup(self.local_training, self.evaluated))
            for worker in self.workers:
                worker.send(place)
            for worker in self.workers:
                worker.channel.receive()
        except Exception as error:  # a user's class may raise anything when it is pickled
            is_dead = isinstance(error, EOFError | BrokenProcessPool)
            reason = "its error is above" if is_dead else str(error).partition("\n")[0]
            raise ChildProcessError(
                f"workers = {self.number}: a worker process could not start with this model and method ({reason}). Define "
                "their classes and functions in a module that can be imported, and leave memory for another process; "
                "workers=1 needs neither"
            ) from error
        finally:
            setup.close()


class _Work(NamedTuple):
    """What the jobs that follow are done with."""

    prepare: Prepare
    place: Place


class _Worker(NamedTuple):
    """A worker process, as the main process sees it."""

    process: BaseProcess
    channel: Channel
    jobs: deque[int]  # the numbers of those that it has

    def send(self, value: object) -> None:
        try:
            self.channel.send(value)
        except ConnectionError as error:
            raise BrokenProcessPool from error

    def send_next(self, left: deque[tuple[int, Any]]) -> None:
        if left:
            number, job = left.popleft()
            self.jobs.append(number)
            self.send(job)

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
    return _Worker(process, Channel(here, sent, received), deque())


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
