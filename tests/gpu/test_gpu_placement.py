"""Several runs on one GPU, and one that has too little of it: skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

import pytest
import torch

from fedheal.campaign import placement
from fedheal.campaign.gpu_estimate import SMALL_RUN_BYTES, is_small_run
from fedheal.campaign.jobs import Job
from fedheal.campaign.placement import DeviceSlots, plan_slots, query_gpus
from fedheal.campaign.pool import describe_schedule, run_all
from fedheal.runs import folder as records
from fedheal.simulate.experiment import Experiment
from gpu_memory import measure_run, run_squeezed
from needs import needs
from tiny_data import quick

pytestmark = pytest.mark.gpu
# Eight clients with a batch of 64 images each.
EIGHT = {
    "data": "tiny_data:load_many_clients",
    "clients_per_domain": 4,
    "samples_per_client": 64,
    "batch_size": 64,
    "steps": 6,
}
T = TypeVar("T")
OUTSIDE_TORCH = 1 << 30  # bytes that CUDA itself, kernels and graphs may take


@pytest.fixture(autouse=True)
def _gpu():
    needs("gpu")


def test_memory_is_asked_for_without_taking_any():
    found = query_gpus()
    assert [gpu.index for gpu in found] == list(range(torch.cuda.device_count()))
    assert all(0 < gpu.free <= torch.cuda.get_device_properties(gpu.index).total_memory for gpu in found)


def test_runs_beside_each_other_give_what_they_give_one_after_another(tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "count_gpus", lambda: 1)
    keys = {"model": "tiny_data:feature_model", "device": "cuda", "deterministic": True, "precision": "fp32"}
    names = [f"{method}-{seed}" for method in ("fedheal", "scaffold") for seed in (0, 1)]

    def plan(where: str) -> list[Job]:
        split = [(name, *name.split("-")) for name in names]
        return [Job(quick(name=n, method=m, seed=int(seed), **keys), tmp_path / where / n) for n, m, seed in split]

    assert plan_slots([job.experiment for job in plan("beside")], 4) == [DeviceSlots(0, 4)]
    assert describe_schedule(plan("beside"), 4) == "4 at a time on one GPU"
    assert {job.folder.name for job in run_all(plan("beside"), 4)} == set(names)
    assert len(list(run_all(plan("after"), 1))) == len(names)
    for one, two in zip(plan("beside"), plan("after"), strict=True):
        a, b = (records.load_tensors(job.folder / "model.safetensors") for job in (one, two))
        assert all(torch.equal(a[name], b[name]) for name in b)
        found = [records.read_json(job.folder / "result.json") for job in (one, two)]
        assert found[0]["domains"] == found[1]["domains"]
        assert found[0]["device"] == found[1]["device"] == "cuda:0"


def run_in_new_process(function: Callable[[dict[str, Any]], T], keys: dict[str, Any]) -> T:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, keys).result()


@pytest.mark.parametrize(("model", "width", "apart"), [("tiny_data:wide", 1 << 15, 1e-3), ("resnet10", 32, 0.2)])
def test_a_run_with_too_little_memory_halves_its_lanes_and_gives_the_same(model, width, apart):
    """cuDNN takes other algorithms for convolutions where it has no room for a workspace, hence the bound of the second."""
    keys: dict[str, Any] = EIGHT | {"model": model, "width": width, "rounds": 2, "deterministic": True}
    keys |= {"precision": "fp32", "device": "cuda", "method": "fedavg"}
    squeezed = run_in_new_process(run_squeezed, keys)
    assert squeezed.warnings
    assert all(message.startswith("out of memory with") for message in squeezed.warnings)
    assert squeezed.bytes < squeezed.unlimited_bytes
    assert squeezed.error <= apart


@pytest.mark.parametrize(("model", "width"), [("small_cnn", None), ("resnet10", 16)])
def test_a_small_run_takes_no_more_memory_than_reckoned(model, width):
    keys = EIGHT | {"model": model, "width": width, "rounds": 1, "device": "cuda"}
    assert is_small_run(quick(**keys))
    assert run_in_new_process(measure_run, keys) < SMALL_RUN_BYTES - OUTSIDE_TORCH


def test_the_rule_packs_small_runs_and_lets_the_papers_have_a_gpu_each(monkeypatch):
    monkeypatch.setattr(placement, "count_cores", lambda: 64)
    cards = torch.cuda.device_count()
    room = min(gpu.free for gpu in query_gpus())
    small = plan_slots([Experiment(data="embedded", device="cuda")] * 20)
    assert len(small) == cards
    assert all(place.slots == 4 for place in small) or room < 12 << 30
    assert plan_slots([Experiment(data="digits", device="cuda")] * 20) == [DeviceSlots(i, 1) for i in range(cards)]
