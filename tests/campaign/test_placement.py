"""Which runs go where: made-up GPUs, no process started."""

from __future__ import annotations

import pytest

from fedheal.campaign import placement as places
from fedheal.campaign.gpu_estimate import WHOLE, Demand
from fedheal.campaign.placement import FILLS, Gpu, Place, emptiest, pace, side_by_side, spread, visible
from fedheal.simulate.experiment import Experiment
from tiny_data import quick

GIB = 2**30
SMALL, LARGE = Demand(3 * GIB, FILLS / 100), Demand(9 * GIB, 2 * FILLS)


def cards(number: int, free: int = 80 * GIB) -> list[Gpu]:
    return [Gpu(i, free) for i in range(number)]


@pytest.fixture
def machine(monkeypatch):
    """A machine with so many GPUs and cores; the list says how often memory was looked at."""
    looked: list[int] = []

    def made(number: int, cores: int = 16, free: int = 80 * GIB) -> list[int]:
        monkeypatch.setattr(places, "number", lambda: number)
        monkeypatch.setattr(places, "gpus", lambda: looked.append(1) or tuple(cards(number, free)))
        monkeypatch.setattr(places, "cores", lambda: cores)
        return looked

    return made


@pytest.mark.parametrize(
    ("free", "need", "expected"),
    [
        (80 * GIB, SMALL, 4),
        (13 * GIB, SMALL, 3),  # 0.9 of 13 holds 3 GiB three times
        (10 * GIB, SMALL, 3),  # 9 GiB exactly
        (9 * GIB, SMALL, 2),
        (1 * GIB, SMALL, 1),  # too little for one: it is tried all the same, and halves its lanes
        (80 * GIB, LARGE, 1),
        (80 * GIB, Demand(3 * GIB, FILLS), 1),
        (80 * GIB, WHOLE, 1),
    ],
)
def test_memory_and_work_bound_how_many_share_a_gpu(free, need, expected):
    assert side_by_side(free, need) == expected


@pytest.mark.parametrize("number", [1, 2, 4])
def test_runs_are_spread_over_all_gpus(number):
    assert spread(cards(number), 0, [SMALL, SMALL], 64) == [Place(i, 4) for i in range(number)]
    assert spread(cards(number), 0, [LARGE], 64) == [Place(i, 1) for i in range(number)]


def test_the_neediest_run_decides():
    assert spread(cards(2), 0, [SMALL, LARGE], 64) == [Place(0, 1), Place(1, 1)]


def test_a_fuller_gpu_takes_fewer():
    assert spread([Gpu(0, 80 * GIB), Gpu(1, 7 * GIB)], 0, [SMALL], 64) == [Place(0, 4), Place(1, 2)]


def test_every_run_has_a_core():
    assert spread(cards(2), 0, [SMALL], 4) == [Place(0, 2), Place(1, 2)]
    assert spread(cards(4), 0, [SMALL], 2) == [Place(i, 1) for i in range(4)]


@pytest.mark.parametrize(
    ("number", "asked", "slots"), [(1, 3, [3]), (2, 3, [2, 1]), (4, 2, [1, 1]), (4, 9, [3, 2, 2, 2]), (2, 1, [1])]
)
def test_so_many_as_asked_go_round_the_gpus(number, asked, slots):
    found = spread(cards(number), asked, [LARGE], 1)
    assert [place.slots for place in found] == slots
    assert [place.gpu for place in found] == list(range(len(slots)))


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_run_on_any_gpu_goes_to_any(machine, device):
    machine(2)
    assert places.places([quick(device=device)] * 9) == [Place(0, 4), Place(1, 4)]
    assert places.places([quick(device=device)] * 9, 3) == [Place(0, 2), Place(1, 1)]


def test_a_run_that_names_its_gpu_keeps_its_name_for_it(machine):
    machine(2)
    assert places.places([quick(device="cuda:1")] * 9) == [Place(None, 4)]
    assert places.places([quick(device="cuda:1")] * 9, 2) == [Place(None, 2)]


@pytest.mark.parametrize(("number", "device"), [(2, "cuda:5"), (0, "cuda"), (0, "cuda:0"), (2, "cuda:x")])
def test_a_gpu_that_is_not_there_is_missed_by_the_first_run(machine, number, device):
    machine(number)
    assert places.places([quick(device=device)] * 9, 4) == [Place(None, 1)]


@pytest.mark.parametrize(("number", "device"), [(0, "auto"), (2, "cpu"), (0, "mps")])
def test_on_processors_it_is_one_a_core_or_what_is_asked(machine, number, device):
    machine(number, cores=6)
    assert places.places([quick(device=device)] * 9) == [Place(None, 6)]
    assert places.places([quick(device=device)] * 9, 3) == [Place(None, 3)]


def test_memory_is_looked_at_only_where_it_decides(machine):
    looked = machine(1)
    assert places.places([Experiment(data="digits")] * 9) == [Place(0, 1)]
    places.places([quick(device="auto")] * 9, 4)
    assert places.places([quick(device="auto")]) == [Place(0, 1)]
    assert not looked
    assert places.places([quick(device="auto")] * 9) == [Place(0, 4)]
    assert looked == [1]


def test_little_free_memory_is_one_run_at_a_time(machine):
    machine(1, free=4 * GIB)
    assert places.places([quick(device="auto")] * 9) == [Place(0, 1)]


def test_the_next_run_goes_where_the_fewest_are():
    there = [Place(0, 2), Place(1, 2), Place(2, 1)]
    taken: list[Place] = []
    while (place := emptiest(there, taken)) is not None:
        taken.append(place)
    assert [place.gpu for place in taken] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("gpu", "said", "expected"),
    [(0, None, "0"), (3, None, "3"), (0, "5", "5"), (1, "2, 0", "0"), (1, "GPU-aa,MIG-bb/1/0", "MIG-bb/1/0")],
)
def test_gpus_are_named_as_the_environment_names_them(gpu, said, expected):
    assert visible(gpu, said) == expected


@pytest.mark.parametrize(
    ("there", "runs", "words"),
    [
        ([Place(0, 4)], 9, "4 at a time on one GPU"),
        ([Place(0, 2), Place(1, 2)], 9, "4 at a time on 2 GPUs"),
        ([Place(0, 2), Place(1, 2)], 1, "1 at a time on one GPU"),
        ([Place(i, 1) for i in range(4)], 3, "3 at a time on 3 GPUs"),
        ([Place(None, 8)], 20, "8 at a time"),
    ],
)
def test_the_pace_is_said_in_words(there, runs, words):
    assert pace(there, runs) == words
