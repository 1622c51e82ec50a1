"""Clients side by side on one GPU.

A small network's step is dozens of kernels that each fill a fraction of a GPU and are launched one by one. A *lane* is a copy
of the module with an optimiser, a stream, and CUDA graphs of its steps; several lanes train a client each at the same time.
What a step reads lies at fixed addresses and is refilled: the images of all clients stay on the device, a client's batches for
the round are uploaded as one table of indices and shifts, and what its terms prepared is copied into the lane's own `scratch`.
Hence the rule for a term: `loss` and `grad` read `ctx.scratch`, and nothing else of `ctx` that differs from client to client.

A step of a batch size that a lane meets for the first time runs as it is, which also warms up what must not be set up inside a
graph; later ones are captured and replayed. A module or a term that cannot be captured makes the run fall back to the serial
engine. The serial engine is this one's obvious twin: same seeds, same batches, same steps.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from fedheal.core.layout import Packed, matrix
from fedheal.data.augment import normalise_images
from fedheal.data.domains import Split
from fedheal.engine import serial
from fedheal.engine.device_data import Resident
from fedheal.engine.graph_inputs import Unable
from fedheal.engine.lane import Lane
from fedheal.engine.memory import give_back
from fedheal.engine.precision import lowered
from fedheal.engine.serial import ClientResult, LocalTraining, Task
from fedheal.local.term import Arrays

log = logging.getLogger("fedheal")

PIXELS = 1 << 22  # in the batches of all lanes together: where an H200 is full
MOST_LANES = 8


class Lanes:
    """A trainer of cohorts: see `engine.workers.Trainer`."""

    def __init__(self, local_training: LocalTraining, lanes: int | None = None) -> None:
        self.local_training = local_training
        self.resident = Resident(local_training)
        self.most = lanes or _most(local_training)
        self.lanes: list[Lane] = []
        self.warmed: set[int] = set()
        self.reason = ""  # why the serial engine has taken over

    def __call__(self, model: Packed, shared: tuple[Arrays, ...], tasks: Sequence[Task]) -> Iterator[ClientResult]:
        while not self.reason:
            try:
                return iter(self._train(model, shared, tasks))
            except Unable as unable:
                self.reason = str(unable)
                log.warning("training one client after another: %s", self.reason)
            except torch.OutOfMemoryError:
                if self.most == 1:
                    raise
                wanted, self.most = max(2, len(self.lanes)), max(1, len(self.lanes) // 2)
                log.warning("out of memory with %d lanes: going on with %d", wanted, self.most)
            self._release()
        return (serial.train(self.local_training, model, shared, task) for task in tasks)

    def _train(self, model: Packed, shared: tuple[Arrays, ...], tasks: Sequence[Task]) -> list[ClientResult]:
        local_training = self.local_training
        steps = [serial.steps_of(len(local_training.examples[task.client]), local_training.training) for task in tasks]
        queues = _shared_out(steps, self.most)
        while len(self.lanes) < len(queues):
            self.lanes.append(Lane(local_training, self.resident, self.warmed))
        metrics = self._metrics(model, tasks)
        deltas = matrix(len(tasks), len(model.params), model.params.dtype, local_training.device)
        done: dict[int, tuple[ClientResult, Tensor]] = {}

        def work(lane: Lane, queue: Sequence[int]) -> Generator[None, None, None]:
            for i in queue:
                done[i] = yield from lane.client(model, shared, tasks[i], metrics[i], deltas[i])
                yield

        with _side_by_side(local_training.device, self.lanes):
            busy = [(lane, work(lane, queue)) for lane, queue in zip(self.lanes, queues, strict=False)]
            while busy:
                for pair in list(busy):
                    with pair[0].entered():
                        if next(pair[1], _END) is _END:
                            busy.remove(pair)
        losses = torch.stack([done[i][1] for i in range(len(tasks))]).tolist() if tasks else []
        return [_with_loss(done[i][0], loss) for i, loss in enumerate(losses)]

    @torch.no_grad()
    def _metrics(self, model: Packed, tasks: Sequence[Task]) -> list[dict[str, float]]:
        """The loss of the received model on each client's data, where it is asked for: all clients in one pass."""
        local_training = self.local_training
        if not local_training.received_loss or not tasks:
            return [{} for _ in tasks]
        local_training.module.load_state_dict(local_training.layout.unpack(model))
        local_training.module.eval()
        images, labels = self.resident.plain([task.client for task in tasks], local_training)
        losses = []
        for x, y in serial.in_turn(Split(images, labels)):
            with lowered(local_training.precision, local_training.device):
                logits = local_training.module(normalise_images(x)).to(torch.float32)
            losses.append(functional.cross_entropy(logits, y, reduction="none"))
        parts = torch.split(torch.cat(losses).double(), [len(local_training.examples[task.client]) for task in tasks])
        return [{"loss": loss} for loss in torch.stack([part.mean() for part in parts]).tolist()]

    def _release(self) -> None:
        self.lanes.clear()
        give_back()


_END = object()


@contextmanager
def _side_by_side(device: torch.device, lanes: Sequence[Lane]) -> Iterator[None]:
    """Lanes begin after what is under way here, and what follows here waits for them."""
    here = torch.cuda.current_stream(device) if device.type == "cuda" else None
    for lane in lanes:
        if lane.stream is not None and here is not None:
            lane.stream.wait_stream(here)
    try:
        yield
    finally:
        for lane in lanes:
            if lane.stream is not None and here is not None:
                here.wait_stream(lane.stream)


def _most(local_training: LocalTraining) -> int:
    """As many lanes as fill the device, which large images do sooner; more give nothing and take memory."""
    height, width = next(iter(local_training.examples.values())).images.shape[-2:]
    return max(4, min(MOST_LANES, PIXELS // (local_training.training.batch_size * height * width)))


def _shared_out(steps: Sequence[int], most: int) -> list[list[int]]:
    """Clients to lanes, the longest first to the least busy; as many lanes as end soonest, and no more than needed.

    >>> _shared_out([120, 120, 100, 100, 20, 20], 6)
    [[0], [1], [2, 4], [3, 5]]
    """

    def dealt(lanes: int) -> tuple[int, list[list[int]]]:
        queues: list[list[int]] = [[] for _ in range(lanes)]
        load = [0] * lanes
        for i in sorted(range(len(steps)), key=lambda i: (-steps[i], i)):
            lane = load.index(min(load))
            queues[lane].append(i)
            load[lane] += steps[i]
        return max(load), queues

    tried = [dealt(lanes) for lanes in range(1, min(most, len(steps)) + 1)]
    return min(tried, key=lambda one: one[0])[1] if tried else []


def _with_loss(trained: ClientResult, loss: float) -> ClientResult:
    reply = trained.reply
    return replace(trained, reply=reply._replace(metrics=dict(reply.metrics) | {"train_loss": loss}))
