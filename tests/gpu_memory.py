"""Measure the GPU memory of runs, each in a process of its own: what other tests left behind would count."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

import fedheal
from fedheal import Layout
from fedheal.engine.memory import release_gpu_memory
from fedheal.simulate.build import build_federation, load_domains
from fedheal.simulate.round import initial_state
from tiny_data import quick


class Squeezed(NamedTuple):
    """The result of a run in eight lanes with too little memory."""

    warnings: list[str]
    bytes: int
    unlimited_bytes: int
    error: float  # distance to the unlimited run's model, as a share of what that run moved


@contextmanager
def measure_memory() -> Iterator[dict[str, int]]:
    """Measure the bytes that torch takes from the GPU at most, from a clean start."""
    measured: dict[str, int] = {}
    release_gpu_memory()
    torch.cuda.reset_peak_memory_stats()
    yield measured
    torch.cuda.synchronize()
    measured["bytes"] = torch.cuda.max_memory_reserved()


@contextmanager
def limit_memory(size: float) -> Iterator[None]:
    """Allow this process so many bytes of the GPU."""
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def measure_run(keys: dict[str, Any]) -> int:
    """Return the bytes that torch takes from the GPU in a run."""
    with measure_memory() as taken:
        fedheal.run(quick(**keys), progress=False)
    return taken["bytes"]


def run_squeezed(keys: dict[str, Any]) -> Squeezed:
    """Run in eight lanes with the memory that one lane needs, and a quarter of what seven more do."""

    def run(lanes: int) -> torch.Tensor:
        model = fedheal.run(quick(**keys, lanes=lanes), progress=False).model
        return Layout.of(model).pack(model.state_dict()).params.double().cpu()

    with measure_memory() as eight:
        expected = run(8)
    with measure_memory() as one_lane:
        run(1)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fedheal").addHandler(handler)
    with measure_memory() as squeezed, limit_memory(one_lane["bytes"] + 0.25 * (eight["bytes"] - one_lane["bytes"])):
        actual = run(8)
    experiment = quick(**keys, lanes=1)
    federation = build_federation(experiment, load_domains(experiment), torch.device("cuda"))
    moved = expected - initial_state(federation).model.params.double().cpu()
    return Squeezed(messages, squeezed["bytes"], eight["bytes"], float((actual - expected).norm() / moved.norm()))
