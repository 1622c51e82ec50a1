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
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe, get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fedheal.core.errors import format_error
from fedheal.core.layout import Packed
from fedheal.data.domains import Split
from fedheal.engine import serial
from fedheal.engine.channel import Channel, Outbox, Place
from fedheal.engine.serial import ClientResult, LocalTraining, Shared, Task

JOBS_AHEAD = 2  # that a worker has: the one that it does, and the next
BUNDLES = 4  # of evaluation for each worker, so that all end at about the same time


class WorkerPool:
    """An engine that trains and evaluates in several processes, which end with the context."""

    def __init__(
        self, local_training: LocalTraining, workers: int, threads: int, evaluated: Sequence[Split] = ()
    ) -> None:
        self.local_training, self.number, self.threads, self.evaluated = local_training, workers, threads, evaluated
        self.common = Outbox()  # what all workers get
        self.workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for worker in self.workers:
            if kind is not None:  # nobody waits for the clients that are being trained
                worker.process.terminate()
            worker.channel.close()  # ends a worker that waits for a job
        for worker in self.workers:
            worker.process.join()
        self.common.close()

    def train(self, model: Packed, shared: Shared, tasks: Sequence[Task]) -> Iterator[ClientResult]:
        """Train the clients, the longest first; yield the results in the order of `tasks`."""
        examples = self.local_training.examples
        longest_first = sorted(range(len(tasks)), key=lambda i: -len(examples[tasks[i].client]))
        results: dict[int, ClientResult] = {}
        following = 0
        for job, result in self._run(_prepare_training, (model, shared), [tasks[i] for i in longest_first]):
            results[longest_first[job]] = result
            while following in results:
                yield results.pop(following)
                following += 1

    def find_correct(self, pairs: Sequence[tuple[Packed, Split]]) -> list[Tensor]:
        """Return, for each pair of a model and a split, which examples the model classifies correctly."""
        if not {id(split) for _, split in pairs} <= {id(split) for split in self.evaluated}:  # workers do not have it
            return serial.find_correct_in_turn(self.local_training, pairs)
        models = {id(model): model for model, _ in pairs}
        model_numbers = {key: number for number, key in enumerate(models)}
        split_numbers = {id(split): number for number, split in enumerate(self.evaluated)}
        batches = [
            (model_numbers[id(model)], split_numbers[id(split)], start)
            for model, split in pairs
            for start in range(0, len(split), serial.choose_eval_batch_size(split, cached=True))
        ]
        size = -(-len(batches) // (BUNDLES * self.number)) or 1
        bundles = [batches[start : start + size] for start in range(0, len(batches), size)]
        results = dict(self._run(_prepare_evaluation, (list(models.values()),), bundles))
        correct = torch.cat([results[i] for i in range(len(bundles))])
        return list(torch.split(correct, [len(split) for _, split in pairs]))

    def _run(
        self, prepare: Callable[..., Callable[[Any], Any]], common: tuple[Any, ...], jobs: Sequence[Any]
    ) -> Iterator[tuple[int, Any]]:
        """Do jobs with what `prepare` makes of `common` in each worker; yield the number and the result of each as it ends."""
        self._start()
        left = deque(enumerate(jobs))
        with explain_broken_pool():
            for worker in self.workers:
                while worker.jobs:  # whose results nobody waited for
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

    prepare: Callable[..., Callable[[Any], Any]]
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


class _Setup(NamedTuple):
    """What a worker has from the start."""

    local_training: LocalTraining
    evaluated: Sequence[Split]


def _serve(channel: Channel, setup_box: Outbox, common: Outbox, threads: int) -> None:
    """Do jobs until the main process closes the channel."""
    # Ctrl-C reaches every process of a terminal: the run's main process ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    _keep_freed_memory()
    torch.set_num_threads(threads)
    saved, examples, validation, evaluated = setup_box.read(channel.receive(), share=True)
    local_training: LocalTraining = torch.load(io.BytesIO(saved), weights_only=False)
    setup = _Setup(replace(local_training, examples=examples, validation=validation), evaluated)
    setup_box.close()
    channel.send("ready")
    with suppress(EOFError, ConnectionError):
        while True:
            message = channel.receive()
            if isinstance(message, _Work):
                work = message.prepare(setup, *common.read(message.place))
                continue
            try:
                channel.send(work(message))
            except Exception as error:
                channel.send(_make_sendable(error))


def _make_sendable(error: Exception) -> Exception:
    """Return an exception with its traceback as a note; one that cannot be pickled becomes a RuntimeError."""
    lines = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  (made here)
    except Exception:
        error = RuntimeError(format_error(error))
    error.add_note(f"In a worker process:\n{lines}")
    return error


def _prepare_training(setup: _Setup, model: Packed, shared: Shared) -> Callable[[Task], ClientResult]:
    return partial(serial.train_client, setup.local_training, model, shared)


def _prepare_evaluation(setup: _Setup, models: Sequence[Packed]) -> Callable[[Sequence[tuple[int, int, int]]], Tensor]:
    def evaluate(batches: Sequence[tuple[int, int, int]]) -> Tensor:
        splits = [setup.evaluated[split] for _, split, _ in batches]
        pairs = [
            (models[model], Split(split.images[start : start + size], split.labels[start : start + size]))
            for split, (model, _, start) in zip(splits, batches, strict=True)
            for size in [serial.choose_eval_batch_size(split, cached=True)]
        ]
        return torch.cat(serial.find_correct_in_turn(setup.local_training, pairs))

    return evaluate


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next batch; it would return large blocks to the system and fault them in again."""
    with suppress(OSError, AttributeError):  # other C libraries have no `mallopt`
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at the most that glibc takes
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
