"""Evaluate models on a GPU, round after round on the same splits.

Launching the kernels of a small network takes longer than running them: a pass that takes little memory is captured in a CUDA
graph, which holds on to that memory. The network is a copy with faster pooling, which shares the module's tensors.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedheal.core.layout import Packed
from fedheal.data.augment import normalise_images
from fedheal.data.domains import Split
from fedheal.engine import serial
from fedheal.engine.graph_inputs import capture_graph
from fedheal.engine.lanes import use_streams
from fedheal.engine.precision import autocast
from fedheal.engine.serial import LocalTraining
from fedheal.local.term import NotCapturableError
from fedheal.models.max_pooling import replace_pooling

MOST_BYTES = 1 << 30  # that a pass takes, to be captured


@dataclass(frozen=True)
class CapturedPass:
    """A graph, and what it reads and writes at fixed addresses."""

    graph: torch.cuda.CUDAGraph
    model: Packed
    images: Tensor  # normalised
    hits: Tensor  # which examples are correct


class GraphEvaluation:
    """Finds what one model at a time classifies correctly. The first pass runs as it is, the second one is captured."""

    def __init__(self, local_training: LocalTraining) -> None:
        self.local_training = local_training
        if local_training.device.type == "cuda":
            self.local_training = replace(local_training, module=copy_with_faster_pooling(local_training.module))
        self.splits: list[Split] = []  # of the last pass
        self.joined: Split | None = None  # the same as one, if the pass can be captured
        self.captured: CapturedPass | None = None

    def find_correct(self, pairs: Sequence[tuple[Packed, Split]]) -> list[Tensor]:
        """Return, for each pair of a model and a split, which examples the model classifies correctly."""
        splits, device = [split for _, split in pairs], self.local_training.device
        if device.type != "cuda" or len({id(model) for model, _ in pairs}) != 1:
            return serial.find_correct_in_turn(self.local_training, pairs)
        if [*map(id, splits)] != [*map(id, self.splits)]:
            self.splits, self.joined, self.captured = splits, None, None
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            correct = serial.find_correct_in_turn(self.local_training, pairs)
            if torch.cuda.max_memory_allocated(device) - before <= MOST_BYTES:
                self.joined = serial.join_on_gpu(splits)
            return correct
        if self.joined is not None and self.captured is None:
            try:
                self.captured = self._capture(self.joined, pairs[0][0])
            except (NotCapturableError, torch.OutOfMemoryError):
                self.joined = None
        if self.captured is None:
            return serial.find_correct_in_turn(self.local_training, pairs)
        torch._foreach_copy_(_list_vectors(self.captured.model), _list_vectors(pairs[0][0]))
        self.captured.graph.replay()
        return list(torch.split(self.captured.hits.clone(), [len(split) for split in splits]))

    def _capture(self, joined: Split, model: Packed) -> CapturedPass:
        """Capture the loading of a model and its evaluation, on images that are normalised once."""
        training, device = self.local_training, joined.images.device
        images = normalise_images(joined.images).contiguous(memory_format=torch.channels_last)  # as networks compute
        fixed = Packed(*(vector.clone() for vector in _list_vectors(model)))
        hits = torch.empty(len(joined), dtype=torch.bool, device=device)

        def find() -> None:
            module = training.load_model(fixed, training=False)
            with autocast(training.precision, device):
                batches = torch.split(images, serial.choose_eval_batch_size(joined))
                found = [module(batch).argmax(dim=1) for batch in batches]
            torch.eq(torch.cat(found), joined.labels, out=hits)

        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.no_grad(), use_streams(device, [stream]), torch.cuda.stream(stream):
            return CapturedPass(capture_graph(torch.cuda.graph_pool_handle(), find), fixed, images, hits)


def copy_with_faster_pooling(module: nn.Module) -> nn.Module:
    """Return a copy with faster pooling, which has the same results, whose parameters and buffers are the module's."""
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    made = copy.deepcopy(module, shared)
    replace_pooling(made)
    return made


def _list_vectors(model: Packed) -> list[Tensor]:
    return [model.params, model.buffers, model.counters]
