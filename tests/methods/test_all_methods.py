"""All local methods, stages and whole methods on the embedded digits: finite accuracies, and a training loss that falls."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

from fedheal import methods

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "methods.py"
spec = importlib.util.spec_from_file_location("methods_benchmark", BENCHMARK)
benchmark = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = benchmark  # its dataclasses look themselves up
spec.loader.exec_module(benchmark)


def test_there_are_all_combinations_and_seven_methods_of_their_own():
    assert len([name for name in methods.names() if name not in methods.WHOLE]) == 9 * 8
    assert set(methods.WHOLE) == {"fedfv", "ditto", "fedbn", "fpl", "fedce", "fedga", "fedpw"}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PLAIN = [name for name in methods.names() if "+" not in name or name.startswith("fedavg+")]
OTHERS = [name for name in methods.LOCAL if name != "fedavg"]
STAGES = [name.partition("+")[2] for name in PLAIN if "+" in name]


COMBINED = [f"{local}+{stage}" for local, stage in zip(OTHERS, STAGES, strict=False)]


def mark_long(name):
    """FCCL's clients also train on public images, which takes seconds."""
    return pytest.param(name, marks=pytest.mark.soak) if name.startswith("fccl") else name


@pytest.mark.slow
@pytest.mark.parametrize("name", [mark_long(name) for name in [*PLAIN, *COMBINED]])
def test_it_learns(name):
    found = benchmark.cost(name)
    assert all(math.isfinite(loss) for loss in found.losses)
    assert found.losses[-1] < found.losses[0] - 0.05
    assert len(found.accuracy) == 4
    assert all(0 <= accuracy <= 100 for accuracy in found.accuracy.values())
