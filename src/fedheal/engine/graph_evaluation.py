"""Evaluate models on a GPU, round after round on the same splits.

Launching the kernels of a small network takes longer than running them: a pass that takes little memory is captured in a CUDA
graph, which holds on to that memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedheal.core.layout import Packed
from fedheal.data.domains import Split
from fedheal.engine import serial
from fedheal.engine.graph_inputs import capture_graph
from fedheal.engine.lanes import use_streams
from fedheal.engine.serial import LocalTraining
from fedheal.local.term import NotCapturableError

MOST_BYTES = 1 << 30  # that a pass takes, to be captured


class GraphEvaluation:
    """Finds what one model at a time classifies correctly. The first pass runs as it is, the second one is captured."""

    def __init__(self, local_training: LocalTraining) -> None:
        self.local_training = local_training
        self.splits: list[Split] = []  # of the last pass
        self.joined: Split | None = None  # the same at a fixed address, if the pass can be captured
        self.graph: torch.cuda.CUDAGraph | None = None
        self.hits: Tensor | None = None  # which examples are correct; the graph writes it

    def find_correct(self, pairs: Sequence[tuple[Packed, Split]]) -> list[Tensor]:
        """Return, for each pair of a model and a split, which examples the model classifies correctly."""
        splits, device = [split for _, split in pairs], self.local_training.device
        if device.type != "cuda" or len({id(model) for model, _ in pairs}) != 1:
            return serial.find_correct_in_turn(self.local_training, pairs)
        if [*map(id, splits)] != [*map(id, self.splits)]:
            self.splits, self.joined, self.graph, self.hits = splits, None, None, None
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            correct = serial.find_correct_in_turn(self.local_training, pairs)
            if torch.cuda.max_memory_allocated(device) - before <= MOST_BYTES:
                self.joined = serial.join_on_gpu(splits)
            return correct
        if self.joined is None:
            return serial.find_correct_in_turn(self.local_training, pairs)
        self.local_training.load_model(pairs[0][0], training=False)
        if self.graph is None:
            try:
                self.graph = self._capture(self.joined)
            except (NotCapturableError, torch.OutOfMemoryError):
                self.joined = None
                return serial.find_correct_in_turn(self.local_training, pairs)
        self.graph.replay()
        assert self.hits is not None
        return list(torch.split(self.hits.clone(), [len(split) for split in splits]))

    def _capture(self, joined: Split) -> torch.cuda.CUDAGraph:
        module, precision, device = self.local_training.module, self.local_training.precision, joined.images.device

        def find() -> None:
            self.hits = serial.find_correct(module, joined, precision)

        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with use_streams(device, [stream]), torch.cuda.stream(stream):
            return capture_graph(torch.cuda.graph_pool_handle(), find)
