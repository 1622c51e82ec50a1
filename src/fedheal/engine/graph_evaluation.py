"""Evaluate models on a GPU, round after round on the same splits.

Launching the kernels of a small network takes longer than running them. So a pass that takes little memory is captured
in a CUDA graph, which keeps this memory. The network is a copy with faster pooling, which shares the module's tensors.
The kernels that train a cohort evaluate a narrow network in bf16, as a cohort of one client. cuDNN takes three times as
long.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

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
from fedheal.models.client_rows import ClientRows
from fedheal.models.kernel_launches import compile_in_parallel
from fedheal.models.max_pooling import replace_pooling
from fedheal.models.stacked_layers import DoesNotFitError, check_layers, stack_module

Load = Callable[[Packed], nn.Module]  # returns the network with a model loaded

MOST_BYTES = 1 << 30  # that a pass takes, to be captured
NARROW = 64  # channels, below which cuDNN is slow
TOLERANCE = 0.05  # of logits in bf16, relative to their norm


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
        self.narrow: Load | None = None  # loads a model into a network that is faster than the module
        if local_training.device.type == "cuda":
            self.local_training = replace(local_training, module=copy_with_faster_pooling(local_training.module))
            self.narrow = stack_narrow_network(self.local_training)
        self.splits: list[Split] = []  # of the last pass
        self.joined: Split | None = None  # the same as one
        self.is_small = False  # whether a pass takes little memory
        self.captured: CapturedPass | None = None

    def find_correct(self, pairs: Sequence[tuple[Packed, Split]]) -> list[Tensor]:
        """Return, for each pair of a model and a split, which examples the model classifies correctly."""
        splits, device = [split for _, split in pairs], self.local_training.device
        if device.type != "cuda" or len({id(model) for model, _ in pairs}) != 1:
            return serial.find_correct_in_turn(self.local_training, pairs)
        is_first = [*map(id, splits)] != [*map(id, self.splits)]
        if is_first:
            self.splits, self.joined, self.captured = splits, serial.join_on_gpu(splits), None
        if self.joined is None:
            return serial.find_correct_in_turn(self.local_training, pairs)
        hits = self._find_at_first(self.joined, pairs[0][0]) if is_first else self._find(self.joined, pairs[0][0])
        return list(torch.split(hits, [len(split) for split in splits]))

    def _find_at_first(self, joined: Split, model: Packed) -> Tensor:
        """Evaluate a model; find out which network to use, and whether a pass takes little memory."""
        device = joined.images.device
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        if self.narrow is not None and not self._check_narrow(self.narrow, joined, model):
            self.narrow = None
        hits = self._find_eagerly(joined, model)
        self.is_small = torch.cuda.max_memory_allocated(device) - before <= MOST_BYTES
        return hits

    @torch.no_grad()
    def _check_narrow(self, narrow: Load, joined: Split, model: Packed) -> bool:
        """Return whether the narrow network can be applied, and agrees with the module on a batch."""
        images, _ = next(serial.eval_batches(joined))
        images = normalise_images(images)
        with autocast(self.local_training.precision, images.device):
            try:
                apply = partial(narrow(model), images)
                compile_in_parallel(apply, images.device)
                found = apply()
            except Exception:  # a module may use what stacked layers lack, such as `conv.weight`
                return False
            return is_near(found, self._load(model)(images))

    def _find(self, joined: Split, model: Packed) -> Tensor:
        """Evaluate a model, by a graph if possible."""
        if self.is_small and self.captured is None:
            try:
                self.captured = self._capture(joined, model)
            except (NotCapturableError, torch.OutOfMemoryError):
                self.is_small = False
        if self.captured is None:
            return self._find_eagerly(joined, model)
        torch._foreach_copy_(_list_vectors(self.captured.model), _list_vectors(model))
        self.captured.graph.replay()
        return self.captured.hits.clone()

    def _find_eagerly(self, joined: Split, model: Packed) -> Tensor:
        return serial.find_correct(self._load_chosen(model), joined, self.local_training.precision)

    def _load(self, model: Packed) -> nn.Module:
        return self.local_training.load_model(model, training=False)

    def _load_chosen(self, model: Packed) -> nn.Module:
        """Return the network that evaluates, with a model loaded."""
        return self._load(model) if self.narrow is None else self.narrow(model)

    def _capture(self, joined: Split, model: Packed) -> CapturedPass:
        """Capture the loading of a model and its evaluation, on images that are normalised once."""
        precision, device = self.local_training.precision, joined.images.device
        images, fixed = normalise_images(joined.images), Packed(*(vector.clone() for vector in _list_vectors(model)))
        if self.narrow is not None:
            images = images.contiguous(memory_format=torch.channels_last)  # as its kernels read them
        hits = torch.empty(len(joined), dtype=torch.bool, device=device)

        def find() -> None:
            module = self._load_chosen(fixed)
            with autocast(precision, device):
                batches = torch.split(images, serial.choose_eval_batch_size(joined))
                found = [module(batch).argmax(dim=1) for batch in batches]
            torch.eq(torch.cat(found), joined.labels, out=hits)

        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.no_grad(), use_streams(device, [stream]), torch.cuda.stream(stream):
            return CapturedPass(capture_graph(torch.cuda.graph_pool_handle(), find), fixed, images, hits)


def stack_narrow_network(local_training: LocalTraining) -> Load | None:
    """Return what loads a model into a stacked network for one client, or None if the network is wide or does not fit."""
    convolutions = [part for part in local_training.module.modules() if isinstance(part, nn.Conv2d)]
    widest = max((max(conv.in_channels, conv.out_channels) for conv in convolutions), default=NARROW)
    if local_training.precision != "bf16" or widest >= NARROW:
        return None
    try:
        check_layers(local_training.module)
        rows = ClientRows(local_training.layout, 1, local_training.device, trains=False, low=torch.bfloat16)
        network = stack_module(local_training.module, rows).eval()
    except DoesNotFitError:
        return None
    rows.valid.fill_(1)  # all examples make one

    def load(model: Packed) -> nn.Module:
        rows.load([model])
        return network

    return load


def is_near(found: Tensor, expected: Tensor) -> bool:
    """Return whether logits agree within the rounding errors of bf16."""
    found, expected = found.float(), expected.float()
    return bool((found - expected).norm() <= TOLERANCE * expected.norm())


def copy_with_faster_pooling(module: nn.Module) -> nn.Module:
    """Return a copy with faster pooling, which has the same results, whose parameters and buffers are the module's."""
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    made = copy.deepcopy(module, shared)
    replace_pooling(made)
    return made


def _list_vectors(model: Packed) -> list[Tensor]:
    return [model.params, model.buffers, model.counters]
