"""What `fedheal methods` says a part costs, against the measurements in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedheal import methods
from fedheal.aggregate.registry import STAGES
from fedheal.methods.costs import COSTS

DOCS = Path(__file__).parents[2] / "docs" / "methods.md"


def read_training_times() -> dict[str, str]:
    """The training times of the section on costs, by part: "1.9" or "1.2 to 1.3" times that of FedAvg."""
    section = DOCS.read_text(encoding="utf-8").partition("\n## Costs\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`)(?:, also .*?)? \| (?:x )?([\d. to]+) \|", section, re.MULTILINE)
    return {name: time for names, time in rows for name in re.findall(r"`([\w-]+)`", names)}


def test_costs_name_parts_that_exist() -> None:
    assert set(COSTS) <= {*methods.LOCAL, *STAGES, *methods.WHOLE, *methods.SERVERS}


@pytest.mark.parametrize("name", [*methods.LOCAL, *STAGES, *methods.WHOLE])
def test_stated_training_times_are_the_measured_ones(name: str) -> None:
    """A part that is not measured states none."""
    measured = read_training_times().get(name, "1")
    times = re.findall(r"training x ([\d.]+(?: to [\d.]+)?)", COSTS.get(name, ""))
    assert times == ([] if float(measured.split()[0]) <= 1 else [measured])


def test_the_command_states_costs(call) -> None:
    assert "costs more than fedavg" in call("methods").out
    done = call("methods", "fedsam+fedheal+fedadam")
    assert "fedsam costs more than fedavg: training x 1.9.\n" in done.out
    assert "fedadam costs more than fedavg: server keeps two vectors as long as the model.\n" in done.out
    assert "costs more" not in call("methods", "fedprox").out


def test_a_bound_of_the_list_is_explained(call) -> None:
    assert "standalone (bound)" in call("methods").out
    done = call("methods", "standalone")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(
        "standalone is a bound for comparisons, not a method, and has no parameters: one model per"
    )
