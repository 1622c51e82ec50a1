"""The serial engine in several processes: each trains some of the clients, with the results of one process.

Workers are spawned (torch's threads do not survive a fork), keep the examples and the module, and get the global model once a
round. Every client is trained with the same number of threads wherever it runs.
"""

import copy
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from typing import Self

import torch

from fedheal.core.layout import Packed
from fedheal.engine.serial import ClientResult, LocalTraining, Shared, Task, train_client

_local_training: LocalTraining | None = None  # in a worker process, what it was started with


class WorkerPool:
    """An engine that trains clients in several processes, which end with the context."""

    def __init__(self, local_training: LocalTraining, workers: int, threads: int) -> None:
        self.local_training, self.workers = local_training, workers
        # torch moves the tensors it sends into shared memory: without a copy, all processes would train one module.
        sent = replace(local_training, module=copy.deepcopy(local_training.module))
        self.pool = ProcessPoolExecutor(workers, get_context("spawn"), _initialise_worker, (sent, threads))
        self.is_started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is not None:  # nobody waits for the clients that are being trained
                processes = list((self.pool._processes or {}).values())
                self.pool.shutdown(wait=False, cancel_futures=True)
                for process in processes:
                    process.terminate()
        finally:
            self.pool.shutdown(wait=True, cancel_futures=True)

    def train(self, model: Packed, shared: Shared, tasks: Sequence[Task]) -> Iterator[ClientResult]:
        """Train the clients, the longest first; yield the results in the order of `tasks`."""
        longest_first = sorted(tasks, key=lambda task: -len(self.local_training.examples[task.client]))
        self._start()
        with explain_broken_pool():
            futures = {task.client: self.pool.submit(_train, model, shared, task) for task in longest_first}
            for task in tasks:
                yield futures[task.client].result()

    def _start(self) -> None:
        """Start all processes once, to tell a model that cannot be pickled from a process that dies later."""
        if self.is_started:
            return
        try:
            for future in [self.pool.submit(os.getpid) for _ in range(self.workers)]:
                future.result()
        except Exception as error:  # a user's class may raise anything when it is pickled
            reason = "its error is above" if isinstance(error, BrokenProcessPool) else str(error).partition("\n")[0]
            raise ChildProcessError(
                f"workers = {self.workers}: a worker process could not start with this model and method ({reason}). Define "
                "their classes and functions in a module that can be imported, and leave memory for another process; "
                "workers=1 needs neither"
            ) from error
        self.is_started = True


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


def _initialise_worker(local_training: LocalTraining, threads: int) -> None:
    global _local_training  # noqa: PLW0603  (a worker has nowhere else to keep what it was started with)
    # Ctrl-C reaches every process of a terminal: the run's main process ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    _local_training = replace(local_training, module=copy.deepcopy(local_training.module))
    end_with_parent()


def _train(model: Packed, shared: Shared, task: Task) -> ClientResult:
    assert _local_training is not None
    return train_client(_local_training, model, shared, task)
