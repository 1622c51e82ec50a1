"""What engines of several processes share: they cut a round into jobs, and any process gives the same result for a job.

A job of training is a list of tasks, a job of evaluation a list of batches. All that a job needs is in the setup, in
what all jobs of the round have in common, and in the job itself. So a result does not depend on where or how often a
job is done.
"""

import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fedheal.core.errors import format_error
from fedheal.core.layout import Packed
from fedheal.data.domains import Split
from fedheal.engine import serial
from fedheal.engine.serial import ClientResult, LocalTraining, Shared, Task

BUNDLES = 4  # of evaluation for each worker, so that all end at about the same time

EvalBatch = tuple[int, int, int]  # the numbers of the model and of the split, and where the batch starts


class Setup(NamedTuple):
    """What a worker has from the start."""

    local_training: LocalTraining
    evaluated: Sequence[Split] | dict[int, Split]
    train: Callable[[Packed, Shared, Sequence[Task]], Iterator[ClientResult]]  # of the engine that it trains with


Prepare = Callable[..., Callable[[Any], Any]]  # (setup, *what all jobs have in common) -> what does a job


class PooledEngine(ABC):
    """An engine that trains and evaluates in several processes, which end with the context."""

    def __init__(
        self, local_training: LocalTraining, workers: int, threads: int, evaluated: Sequence[Split] = ()
    ) -> None:
        self.local_training, self.number, self.threads, self.evaluated = local_training, workers, threads, evaluated

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """End the processes."""

    @abstractmethod
    def _run(self, prepare: Prepare, common: tuple[Any, ...], jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Do jobs with what `prepare` makes of `common` in each worker; yield the number and the result of each as it ends."""

    def train(self, model: Packed, shared: Shared, tasks: Sequence[Task]) -> Iterator[ClientResult]:
        """Train the clients, the longest first; yield the results in the order of `tasks`."""
        examples = self.local_training.examples
        groups = self._group(sorted(range(len(tasks)), key=lambda i: -len(examples[tasks[i].client])))
        results: dict[int, ClientResult] = {}
        following = 0
        for job, trained in self._run(prepare_training, (model, shared), [[tasks[i] for i in g] for g in groups]):
            results |= zip(groups[job], trained, strict=True)
            while following in results:
                yield results.pop(following)
                following += 1

    def _group(self, order: Sequence[int]) -> list[list[int]]:
        """Return which tasks, longest first, make up each job."""
        return [[i] for i in order]

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
        results = dict(self._run(prepare_evaluation, (list(models.values()),), bundles))
        correct = torch.cat([results[i] for i in range(len(bundles))])
        return list(torch.split(correct, [len(split) for _, split in pairs]))


def prepare_training(setup: Setup, model: Packed, shared: Shared) -> Callable[[Sequence[Task]], list[ClientResult]]:
    """Return the function that trains a job's clients, starting from `model`."""
    return lambda tasks: list(setup.train(model, shared, tasks))


def prepare_evaluation(setup: Setup, models: Sequence[Packed]) -> Callable[[Sequence[EvalBatch]], Tensor]:
    """Return the function that finds which examples of a job's batches are classified correctly."""
    local_training, loaded = setup.local_training, -1

    def evaluate(batches: Sequence[EvalBatch]) -> Tensor:
        nonlocal loaded
        correct = []
        for model, number, start in batches:
            if model != loaded:
                local_training.load_model(models[model], training=False)
                loaded = model
            split = setup.evaluated[number]
            end = start + serial.choose_eval_batch_size(split, cached=True)
            batch = Split(split.images[start:end], split.labels[start:end])
            correct.append(serial.find_correct(local_training.module, batch, local_training.precision))
        return torch.cat(correct)

    return evaluate


def make_sendable(error: Exception) -> Exception:
    """Return an exception with its traceback as a note; one that cannot be pickled becomes a RuntimeError."""
    lines = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  (made here)
    except Exception:
        error = RuntimeError(format_error(error))
    error.add_note(f"In a worker process:\n{lines}")
    return error
