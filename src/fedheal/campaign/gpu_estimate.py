"""What a run needs of a GPU, estimated without one.

Memory and work follow from shapes: one step of the model is traced on torch's `meta` device, which computes nothing, and the
sizes of a described data set are known before it is read. It is what a run holds once it is under way; while cuDNN tries its
algorithms it takes more, where there is more. What a user's own model or data do not let us see is taken to need a whole GPU.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedheal import data as datasets
from fedheal import models
from fedheal.data.augment import PAD
from fedheal.data.domains import Domain, Domains, Split
from fedheal.data.on_disk import DataRequest, multiply_fraction
from fedheal.data.specs import DatasetSpec
from fedheal.engine.lanes import MOST_LANES
from fedheal.engine.serial import EVALUATE_PIXELS
from fedheal.simulate.build import make_data_request, partition_clients, takes_part
from fedheal.simulate.experiment import Experiment

log = logging.getLogger("fedheal")

FLOAT = 4  # bytes; lower precisions need less
CONTEXT = 2 << 30  # what CUDA, cuDNN and compiled kernels take before there is any data
COPIES = 5  # of a lane's parameters: they, gradients, velocities, where they started, what a term compares with
ACTIVATIONS = 3  # times those of a step: in the cache since a lane warmed up, in its graphs' pool, in workspaces
MAPS = 3  # of the widest layer at a time in an evaluation: what goes in, what comes out, and a workspace
COUNTS = 2  # bytes of a sign count
CLASSES = 100  # where only the files say how many there are: their number hardly matters


@dataclass(frozen=True)
class Demand:
    """What a run needs of a GPU."""

    bytes: float
    flops_per_step: float  # of one client's step


WHOLE = Demand(math.inf, math.inf)


@dataclass(frozen=True)
class Step:
    """One client's step, as traced."""

    parameters: int
    flops: int
    activations: int  # bytes that are kept from the forward pass for the backward pass
    widest: int  # bytes of the largest of them


def demand(experiment: Experiment) -> Demand:
    """What this run needs of a GPU; `WHOLE` where that cannot be told."""
    try:
        return _demand(experiment)
    except Exception as error:  # anything may come from a user's code, and the run itself will say what is wrong
        log.info("what '%s' needs of a GPU is not known (%s): it gets a whole one", experiment.folder_name, error)
        return WHOLE


def _demand(experiment: Experiment) -> Demand:
    domains = outline(experiment.data, make_data_request(experiment))
    # How labels are spread changes no size worth counting, and the outline of a data set has no labels to spread.
    plain = experiment.model_copy(update={"dirichlet": None, "class_filling": False})
    held = [len(client.indices) for client in partition_clients(plain, domains) if takes_part(experiment, client)]
    if experiment.pool:
        held = [sum(held)]
    height, width = domains.domains[0].test.images.shape[-2:]
    batch = min(experiment.batch_size, max(held))
    step = traced(experiment.model, experiment.width, len(domains.classes), (batch, 3, height, width))
    lanes = 1 if experiment.engine == "serial" else min(experiment.lanes or MOST_LANES, len(held))
    model = FLOAT * step.parameters
    training = lanes * (ACTIVATIONS * step.activations + COPIES * model)
    evaluating = MAPS * step.widest / (batch * height * width) * EVALUATE_PIXELS
    kept = len(held) * (model + COUNTS * step.parameters + (model if experiment.resolved_method.local else 0))
    return Demand(CONTEXT + training + evaluating + kept + _images(experiment, domains, sum(held)), step.flops)


def _images(experiment: Experiment, domains: Domains, trained: int) -> int:
    """Bytes of the images: each client's as they are and as the engine keeps them, with room for shifts, and the tests'."""
    height, width = domains.domains[0].test.images.shape[-2:]
    room = 2 * PAD if "crop" in experiment.augment else 0
    each = 3 * height * width
    return trained * (each + 3 * (height + room) * (width + room)) + each * sum(len(d.test) for d in domains.domains)


@functools.lru_cache(maxsize=32)
def traced(model: str, width: int | None, classes: int, shape: tuple[int, int, int, int]) -> Step:
    """A step of the model on a batch of this shape, followed without computing it."""
    with torch.random.fork_rng(devices=[]):
        module = models.build(model, classes, **({} if width is None else {"width": width})).to("meta").train()
    own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, Tensor] = {}  # by storage, which the tensor keeps from being used again

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in own:
            kept[storage] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        FlopCounterMode(display=False) as counted,
    ):
        torch.autograd.backward(module(torch.zeros(shape, device="meta")).sum())
    sizes = [tensor.untyped_storage().nbytes() for tensor in kept.values()]
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return Step(parameters, counted.get_total_flops(), sum(sizes), max(sizes, default=0))


@functools.lru_cache(maxsize=8)
def outline(name: str, wanted: DataRequest) -> Domains:
    """A data set without its pixels; one that is described need not be on disk for it."""
    if name in datasets.SPECS:
        return _described(datasets.SPECS[name], wanted)
    found = datasets.load_dataset(name, wanted)
    return replace(found, domains=tuple(replace(d, train=_blank(d.train), test=_blank(d.test)) for d in found.domains))


def _described(description: DatasetSpec, wanted: DataRequest) -> Domains:
    side = wanted.size or description.size

    def blank(number: int) -> Split:
        images = torch.empty(number, 3, side, side, dtype=torch.uint8, device="meta")
        return Split(images, torch.zeros(number, dtype=torch.int64))

    sources = description.domains
    return Domains(
        description.name,
        description.classes or tuple(map(str, range(CLASSES))),
        tuple(Domain(source.name, blank(source.train), blank(source.test)) for source in sources),
        (description.clients,) * len(sources),
        tuple(multiply_fraction(description.fraction, source.train) for source in sources),
    )


def _blank(split: Split) -> Split:
    return Split(split.images.to("meta"), split.labels)
