"""Which runs go where, with simulated GPUs and without starting a process."""

from __future__ import annotations

import pytest

from fedheal.campaign import placement
from fedheal.campaign.placement import (
    DeviceSlots,
    Gpu,
    count_small_runs,
    describe,
    least_loaded,
    plan_slots,
    visible_device,
)
from fedheal.simulate.experiment import Experiment
from tiny_data import quick

GIB = 2**30
LARGE = Experiment(data="digits")


@pytest.fixture
def machine(monkeypatch):
    """A function that simulates GPUs with this free memory and so many cores; its list counts queries of the memory."""
    queries: list[int] = []

    def simulate(*free: int, cores: int = 64) -> list[int]:
        gpus = tuple(Gpu(i, size) for i, size in enumerate(free))
        monkeypatch.setattr(placement, "count_gpus", lambda: len(gpus))
        monkeypatch.setattr(placement, "query_gpus", lambda: queries.append(1) or gpus)
        monkeypatch.setattr(placement, "count_cores", lambda: cores)
        return queries

    return simulate


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (80 * GIB, 4),
        (13 * GIB, 3),  # 0.9 of 13 holds 3 GiB three times
        (10 * GIB, 3),  # 9 GiB exactly
        (9 * GIB, 2),
        (1 * GIB, 1),  # too little for one: it runs all the same, and halves its lanes
    ],
)
def test_free_memory_limits_how_many_share_a_gpu(free, expected):
    assert count_small_runs(free) == expected


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_runs_are_spread_over_all_gpus(machine, number, device):
    machine(*[80 * GIB] * number)
    small, large = quick(device=device), LARGE.model_copy(update={"device": device})
    assert plan_slots([small] * 20) == [DeviceSlots(i, 4) for i in range(number)]
    assert plan_slots([large] * 20) == [DeviceSlots(i, 1) for i in range(number)]
    assert plan_slots([small, large]) == [DeviceSlots(i, 1) for i in range(number)]  # the most demanding run decides


def test_a_gpu_with_less_free_memory_takes_fewer(machine):
    machine(80 * GIB, 7 * GIB, 4 * GIB)
    assert [place.slots for place in plan_slots([quick(device="auto")] * 9)] == [4, 2, 1]


@pytest.mark.parametrize(("gpus", "cores", "slots"), [(2, 4, [2, 2]), (4, 2, [1, 1, 1, 1])])
def test_every_run_has_a_core(machine, gpus, cores, slots):
    machine(*[80 * GIB] * gpus, cores=cores)
    assert [place.slots for place in plan_slots([quick(device="auto")] * 9)] == slots


@pytest.mark.parametrize(
    ("gpus", "processes", "slots"),
    [(1, 3, [3]), (2, 3, [2, 1]), (4, 2, [1, 1]), (4, 9, [3, 2, 2, 2]), (2, 1, [1])],
)
def test_a_number_of_processes_goes_round_the_gpus(machine, gpus, processes, slots):
    machine(*[80 * GIB] * gpus, cores=1)
    assert plan_slots([LARGE] * 20, processes) == [DeviceSlots(i, n) for i, n in enumerate(slots)]


def test_a_run_that_names_its_gpu_sees_all_of_them(machine):
    machine(80 * GIB, 80 * GIB)
    assert plan_slots([quick(device="cuda:1")] * 9) == [DeviceSlots(None, 4)]
    assert plan_slots([quick(device="cuda:1")] * 9, 2) == [DeviceSlots(None, 2)]


@pytest.mark.parametrize(
    ("gpus", "device"), [(2, "cuda:5"), (0, "cuda"), (0, "cuda:0"), (2, "cuda:x"), (0, "tpu"), (0, "meta")]
)
def test_a_device_that_cannot_be_used_is_refused(machine, gpus, device):
    machine(*[80 * GIB] * gpus)
    with pytest.raises(ValueError, match=f"device = '{device}' cannot be used here"):
        plan_slots([quick(device=device)] * 9, 4)


@pytest.mark.parametrize(("gpus", "device"), [(0, "auto"), (2, "cpu")])
def test_on_processors_there_is_one_run_per_core_unless_set(machine, gpus, device):
    machine(*[80 * GIB] * gpus, cores=6)
    assert plan_slots([quick(device=device)] * 9) == [DeviceSlots(None, 6)]
    assert plan_slots([quick(device=device, threads=3)] * 9) == [DeviceSlots(None, 2)]
    assert plan_slots([quick(device=device)] * 9, 3) == [DeviceSlots(None, 3)]


def test_memory_is_queried_only_where_it_decides(machine):
    queries = machine(80 * GIB)
    assert plan_slots([LARGE] * 9) == [DeviceSlots(0, 1)]
    plan_slots([quick(device="auto")] * 9, 4)
    assert plan_slots([quick(device="auto")]) == [DeviceSlots(0, 1)]
    assert not queries
    assert plan_slots([quick(device="auto")] * 9) == [DeviceSlots(0, 4)]
    assert queries == [1]


def test_the_next_run_goes_where_the_fewest_are():
    places = [DeviceSlots(0, 2), DeviceSlots(1, 2), DeviceSlots(2, 1)]
    running: list[DeviceSlots] = []
    while (place := least_loaded(places, running)) is not None:
        running.append(place)
    assert [place.gpu for place in running] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("gpu", "value", "expected"),
    [(0, None, "0"), (3, None, "3"), (0, "5", "5"), (1, "2, 0", "0"), (1, "GPU-aa,MIG-bb/1/0", "MIG-bb/1/0")],
)
def test_gpus_are_named_as_the_environment_names_them(gpu, value, expected):
    assert visible_device(gpu, value) == expected


@pytest.mark.parametrize(
    ("places", "runs", "words"),
    [
        ([DeviceSlots(0, 4)], 9, "4 at a time on one GPU"),
        ([DeviceSlots(0, 2), DeviceSlots(1, 2)], 9, "4 at a time on 2 GPUs"),
        ([DeviceSlots(0, 2), DeviceSlots(1, 2)], 1, "1 at a time on one GPU"),
        ([DeviceSlots(i, 1) for i in range(4)], 3, "3 at a time on 3 GPUs"),
        ([DeviceSlots(None, 8)], 20, "8 at a time"),
    ],
)
def test_places_are_described_in_words(places, runs, words):
    assert describe(places, runs) == words
