"""Decide whether a run is small enough to share a GPU with others.

The rule is a threshold on parameters x pixels of an image x batch size, which grows with the work of a training step.
On Digits the small CNN has 7e8. Four runs at a time on a GPU finish 1.4 times as many rounds as one, or 2 times with
NVIDIA's multi-process service. The paper's ResNet-10 has 3e11 and gains nothing (docs/performance.md,
benchmarks/packing.py).
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from fedheal import data as datasets
from fedheal import models
from fedheal.data.embedded.scenes import SIZE as EMBEDDED_SIZE
from fedheal.simulate.build import make_data_request
from fedheal.simulate.experiment import Experiment

log = logging.getLogger("fedheal")

SMALL_STEP = 5e10  # parameters x pixels x batch size; about 2e10 floating-point operations
SMALL_RUN_BYTES = 3 << 30  # GPU memory of a small run: CUDA itself, kernels, lanes and images
CLASSES = 10  # of the model whose parameters are counted: their number hardly matters


def is_small_run(experiment: Experiment) -> bool:
    """Return whether the run leaves most of a GPU idle. False if its model or data cannot be inspected."""
    try:
        pixels = _count_pixels(experiment.data, make_data_request(experiment))
        return _count_parameters(experiment.model, experiment.width) * pixels * experiment.batch_size < SMALL_STEP
    except Exception as error:  # a user's code may raise anything; the run itself will report it
        log.info("'%s' gets a GPU of its own, since its size is unknown: %s", experiment.folder_name, error)
        return False


@functools.lru_cache(maxsize=32)
def _count_parameters(model: str, width: int | None) -> int:
    keys: dict[str, Any] = {} if width is None else {"width": width}
    with torch.random.fork_rng(devices=[]):
        module = models.build(model, CLASSES, **keys)
    return sum(parameter.numel() for parameter in module.parameters())


@functools.lru_cache(maxsize=8)
def _count_pixels(name: str, wanted: datasets.DataRequest) -> int:
    """Return the pixels of an image. A data set with a description need not be on disk, nor the embedded one be drawn."""
    if name == "embedded":
        return EMBEDDED_SIZE**2
    if name in datasets.SPECS:
        return (wanted.size or datasets.SPECS[name].size) ** 2
    height, width = datasets.load_dataset(name, wanted).domains[0].test.images.shape[-2:]
    return height * width
