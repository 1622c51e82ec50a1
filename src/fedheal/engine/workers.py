"""The serial engine in several processes: each trains some of the clients, the results are those of one process.

Workers are started afresh (not forked, which torch's threads do not survive), keep the examples and the module, and are
sent the global model once a round. Every client is trained with the same number of threads wherever it runs.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess

import torch

from fedheal.core.layout import Packed
from fedheal.engine import serial
from fedheal.engine.serial import ClientResult, LocalTraining, Task
from fedheal.local.term import Arrays

Shared = tuple[Arrays, ...]
Trainer = Callable[[Packed, Shared, Sequence[Task]], Iterator[ClientResult]]

_bench: LocalTraining | None = None  # a worker process's own


@contextmanager
def trainer(local_training: LocalTraining, workers: int, threads: int) -> Iterator[Trainer]:
    """A function that trains a cohort: here for one worker, else in processes that live as long as the context."""
    if workers <= 1:
        yield lambda model, shared, tasks: (serial.train(local_training, model, shared, task) for task in tasks)
        return
    context = get_context("spawn")
    # torch moves the tensors of what it sends into shared memory: the module must be a copy, or all would train in one.
    sent = replace(local_training, module=copy.deepcopy(local_training.module))
    pool = ProcessPoolExecutor(workers, context, _start, (sent, threads))

    @cache
    def begin() -> None:
        """Start all processes; tell a model that cannot be pickled from a process that died."""
        try:
            for started in [pool.submit(os.getpid) for _ in range(workers)]:
                started.result()
        except Exception as error:  # whatever somebody's class may raise on its way there
            told = "its error is above" if isinstance(error, BrokenProcessPool) else str(error).partition("\n")[0]
            raise ChildProcessError(
                f"workers = {workers}: no process could start with this model and method ({told}): their classes and functions "
                "must be those of a module that can be imported, and memory must do for one more; workers=1 needs neither"
            ) from error

    def train(model: Packed, shared: Shared, tasks: Sequence[Task]) -> Iterator[ClientResult]:
        # Longest first onto whoever is free; replies in the order that was asked for.
        longest = sorted(tasks, key=lambda task: -len(local_training.examples[task.client]))
        begin()
        with unbroken():
            asked = {task.client: pool.submit(_train, model, shared, task) for task in longest}
            for task in tasks:
                yield asked[task.client].result()

    try:
        yield train
    except BaseException:  # nobody waits for what the workers are at
        started = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in started:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def unbroken() -> Iterator[None]:
    """Says what it means when a process of a pool is killed."""
    try:
        yield
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a process could not start, or was ended from outside, perhaps for lack of memory; what was saved is not lost: "
            "--resume (for compare, sweep and reproduce, the same command) goes on"
        ) from error


def _start(local_training: LocalTraining, threads: int) -> None:
    global _bench  # noqa: PLW0603  (a worker has nowhere else to keep what it was started with)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches every process of a terminal: the run's own ends the others
    torch.set_num_threads(threads)
    _bench = replace(local_training, module=copy.deepcopy(local_training.module))
    end_with_parent()


def end_with_parent() -> None:
    """From now on, whoever kills the process that started this one ends this one too."""
    threading.Thread(target=_watch, args=(parent_process(),), daemon=True).start()


def _watch(parent: BaseProcess | None) -> None:
    if parent is not None:
        parent.join()
        os._exit(1)


def _train(model: Packed, shared: Shared, task: Task) -> ClientResult:
    assert _bench is not None
    return serial.train(_bench, model, shared, task)
