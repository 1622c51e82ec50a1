"""All local methods, stages and whole methods on the embedded digits: finite accuracies, and a training loss that falls."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from pathlib import Path

import pytest

from fedheal import methods
from fedheal.aggregate import registry

pytestmark = pytest.mark.usefixtures("one_thread")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "methods.py"
spec = importlib.util.spec_from_file_location("methods_benchmark", BENCHMARK)
benchmark = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = benchmark  # its dataclasses look themselves up
spec.loader.exec_module(benchmark)


def test_every_local_method_is_combined_with_the_stages_that_change_it_and_whole_methods_with_none():
    changing = [name for name, make in registry.STAGES.items() if make().gives]
    assert {"uniform", "afl", "qffl", "fedheal", "fphl", "fael", "fael-exact", "mix", "total-variance"} <= {*changing}
    expected = {*methods.LOCAL, *methods.WHOLE}
    expected |= {f"{local}+{stage}" for local, stage in itertools.product(methods.LOCAL, changing)}
    assert sorted(methods.names()) == sorted(expected)  # each once
    assert {"fedfv", "ditto", "fedbn", "fpl", "fedce", "fedga", "fedpw", "fedism"} <= set(methods.WHOLE)


PLAIN = [name for name in methods.names() if "+" not in name or name.startswith("fedavg+")]
OTHERS = [name for name in methods.LOCAL if name != "fedavg"]
STAGES = [name.partition("+")[2] for name in PLAIN if "+" in name]
# Slow steps; the contract tests cover what they do.
LONG = {"fccl", "fcclplus", "feddg", "fedsam", "fedlesam", "fedism"}
PAIRS = [*zip(OTHERS, STAGES, strict=False)]
# Local methods and stages that a pair shows to learn: alone in the long trials.
PAIRED = {name for local, stage in PAIRS if local not in LONG for name in (local, f"fedavg+{stage}")}
NAMES = [*PLAIN, *(f"{local}+{stage}" for local, stage in PAIRS)]


def is_long(name):
    return name.partition("+")[0] in LONG or name in PAIRED


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak if is_long(name) else pytest.mark.slow) for name in NAMES],
)
def test_it_learns(name):
    cost = benchmark.measure_cost(name)
    assert all(math.isfinite(loss) for loss in cost.losses)
    assert cost.losses[-1] < cost.losses[0] - 0.05
    assert len(cost.accuracy) == 4
    assert all(0 <= accuracy <= 100 for accuracy in cost.accuracy.values())
