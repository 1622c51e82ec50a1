"""The engine that trains clients side by side on one GPU.

A small network's step is dozens of kernels that each fill a fraction of a GPU and are launched one by one. A *lane* is
a copy of the module with an optimiser, a stream, and CUDA graphs of its steps. Several lanes train a client each at the
same time. What a step reads is at fixed addresses and is refilled. The images of all clients stay on the device. A
client's batches for the round are uploaded as one table of indices and shifts. What its terms prepared is copied into
the lane's own `scratch`. Hence the rule for a term: `loss` and `grad` read `ctx.scratch`, and nothing else of `ctx`
that differs between clients.

The first steps of a batch size run eagerly, which also warms up what must not be set up inside a graph. Later steps are
captured and replayed. If a module or a term cannot be captured, the run falls back to the serial engine, which has the
same seeds, batches and steps.
"""

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import torch

from fedheal.core.layout import Packed, allocate_rows
from fedheal.engine import serial
from fedheal.engine.device_data import DeviceData
from fedheal.engine.lane import Lane
from fedheal.engine.memory import release_gpu_memory
from fedheal.engine.serial import ClientResult, LocalTraining, SerialEngine, Shared, Task
from fedheal.local.term import NotCapturableError

log = logging.getLogger("fedheal")

PIXELS = 1 << 22  # in the batches of all lanes together: these fill an H200
MOST_LANES = 8


class Lanes:
    """An engine that trains several clients side by side."""

    def __init__(self, local_training: LocalTraining, lanes: int | None = None, data: DeviceData | None = None) -> None:
        self.local_training = local_training
        self.data = data or DeviceData(local_training)
        # As many as fill the device, fewer with large images: more would only take memory.
        pixels = local_training.training.batch_size * self.data.height * self.data.width
        self.most_lanes = lanes or max(4, min(MOST_LANES, PIXELS // pixels))
        self.lanes: list[Lane] = []
        self.tuned_sizes: set[int] = set()  # batch sizes for which cuDNN has chosen its algorithms
        self.fallback_reason = ""  # why the serial engine has taken over

    def train(self, model: Packed, shared: Shared, tasks: Sequence[Task]) -> Iterator[ClientResult]:
        """Train all clients, then return their results; fall back to fewer lanes or to the serial engine if needed."""
        while not self.fallback_reason:
            try:
                return iter(self._train_in_lanes(model, shared, tasks))
            except NotCapturableError as error:
                self.fallback_reason = str(error)
                log.warning("training one client after another: %s", self.fallback_reason)
            except torch.OutOfMemoryError:
                if self.most_lanes == 1:
                    raise
                tried, self.most_lanes = max(2, len(self.lanes)), max(1, len(self.lanes) // 2)
                log.warning("out of memory with %d lanes: continuing with %d", tried, self.most_lanes)
            self.lanes.clear()
            release_gpu_memory()
        return SerialEngine(self.local_training).train(model, shared, tasks)

    def _train_in_lanes(self, model: Packed, shared: Shared, tasks: Sequence[Task]) -> list[ClientResult]:
        local_training = self.local_training
        steps = [serial.count_steps(self.data.sizes[task.client], local_training.training) for task in tasks]
        queues = _assign_clients(steps, self.most_lanes)
        while len(self.lanes) < len(queues):
            self.lanes.append(Lane(local_training, self.data, self.tuned_sizes))
        metrics = self.data.compute_received_losses(local_training, model, tasks)
        deltas = allocate_rows(len(tasks), len(model.params), model.params.dtype, local_training.device)
        results: dict[int, ClientResult] = {}

        def run_queue(lane: Lane, queue: Sequence[int]) -> Generator[None, None, None]:
            for i in queue:
                results[i] = yield from lane.train_client(model, shared, tasks[i], metrics[i], deltas[i])
                yield

        with use_streams(local_training.device, [lane.stream for lane in self.lanes]):
            running = [(lane, run_queue(lane, queue)) for lane, queue in zip(self.lanes, queues, strict=False)]
            while running:
                for lane, work in list(running):
                    with lane.activate():
                        has_ended = next(work, True)  # a queue yields None
                    if has_ended:
                        running.remove((lane, work))
        return [results[i] for i in range(len(tasks))]


@contextmanager
def use_streams(device: torch.device, streams: Sequence[torch.cuda.Stream | None]) -> Iterator[None]:
    """Let the streams start after the current stream's work, and the current stream continue after theirs."""
    own = [stream for stream in streams if stream is not None]
    if not own:
        yield
        return
    current = torch.cuda.current_stream(device)
    for stream in own:
        stream.wait_stream(current)
    try:
        yield
    finally:
        for stream in own:
            current.wait_stream(stream)


def _assign_clients(steps: Sequence[int], most_lanes: int) -> list[list[int]]:
    """Assign clients to lanes, the longest first to the least busy; use the fewest lanes that finish soonest.

    >>> _assign_clients([120, 120, 100, 100, 20, 20], 6)
    [[0], [1], [2, 4], [3, 5]]
    """

    def assign(lanes: int) -> tuple[int, list[list[int]]]:
        queues: list[list[int]] = [[] for _ in range(lanes)]
        load = [0] * lanes
        for i in sorted(range(len(steps)), key=lambda i: (-steps[i], i)):
            lane = load.index(min(load))
            queues[lane].append(i)
            load[lane] += steps[i]
        return max(load), queues

    candidates = [assign(lanes) for lanes in range(1, min(most_lanes, len(steps)) + 1)]
    return min(candidates, key=lambda candidate: candidate[0])[1] if candidates else []
