"""tools/results_confirmation.py reads, compares and lists the runs that the search plan fixed."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from fedheal import Experiment
from fedheal.analysis.paired_tests import sign_flip_p
from made_up import make_run

ROOT = Path(__file__).parents[2]
START = {"mnist": 90.0, "usps": 90.0, "svhn": 80.0, "syn_standin": 30.0}


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("results")


@pytest.fixture
def confirmation(tool):
    return importlib.import_module("results_confirmation")


def make_runs(folder, method, gain, seeds, rounds=200):
    for seed in seeds:
        make_run(folder, "digits", method, {d: value + gain for d, value in START.items()}, rounds, seed=seed)


def test_controls_of_the_headline_and_runs_of_the_confirmation_are_compared(confirmation, tmp_path):
    make_runs(tmp_path / "digits", "fedavg+uniform", 0.0, (0, 8, 9, 10))  # seed 0 is not planned
    make_runs(tmp_path / "digits", "fedavg+fedheal", 1.0, (8, 9))
    make_runs(tmp_path / "digits", "fedavg", 5.0, (8, 9))  # not a row of the confirmation
    make_runs(tmp_path / "confirmation" / "digits", confirmation.OF_SEARCH.chosen.method, 2.0, (8, 9))
    page = "\n".join(confirmation.write_confirmations(tmp_path))
    assert "| percent, mean of seeds 8, 9 | AVG | STD | worst | runs with seeds |" in page
    assert "| uniform weights | 72.50 | " in page
    assert "| the chosen method | 74.50 | " in page
    assert "| uniform weights | AVG | -2.00 | -2.00 to -2.00 | 0 of 2 | 1.000 | 1.000 |" in page
    assert "| FedHEAL (paper) | AVG | -1.00 | -1.00 to -1.00 | 0 of 2 | 1.000 | 1.000 |" in page
    assert "Holm's correction over 4 comparisons" in page
    assert "The rounds of 7 runs took 23 minutes by their records." in page  # 200 rounds of a second each
    command = "python tools/results.py run --recipe confirmation --data digits --seeds 8,9,10,11,12,13,14,15"
    assert f"Open are 25 of 32 runs (`{command}`, then `collect`)" in page
    assert "- uniform weights: seeds 11, 12, 13, 14, 15\n" in page
    assert "- the chosen method: seeds 10, 11, 12, 13, 14, 15" in page


def test_a_control_that_is_better_on_some_seeds_is_counted(confirmation, tmp_path):
    make_runs(tmp_path / "confirmation" / "digits", confirmation.OF_SEARCH.chosen.method, 1.0, range(8, 16))
    make_runs(tmp_path / "digits", "fedavg+uniform", 0.0, range(8, 15))
    make_runs(tmp_path / "digits", "fedavg+uniform", 4.0, (15,))
    page = "\n".join(confirmation.write_confirmations(tmp_path))
    assert "| uniform weights | AVG | -0.50 | " in page
    assert "| 1 of 8 |" in page


def test_runs_with_other_rounds_are_no_part_of_it(confirmation, tmp_path):
    make_runs(tmp_path / "confirmation" / "digits", confirmation.OF_SEARCH.chosen.method, 1.0, (8,), rounds=20)
    assert confirmation.write_confirmations(tmp_path) == []


def test_a_finished_confirmation_says_so(confirmation, tmp_path):
    for row in confirmation.OF_SEARCH.list_rows("digits"):
        make_runs(tmp_path / "confirmation" / "digits", row.method, 0.0, range(8, 16))
    assert "All 32 runs are finished." in confirmation.write_confirmations(tmp_path)


def test_a_finished_confirmation_is_repeated_without_the_stand_in(confirmation, tmp_path):
    of_scaffold = confirmation.OF_SCAFFOLD
    seeds = of_scaffold.seeds["digits"]
    make_runs(tmp_path / "digits", "fedavg+uniform", 0.0, seeds)
    make_runs(tmp_path / "digits", "fedavg+fedheal", 1.0, seeds)
    folder = tmp_path / of_scaffold.folder / "digits"
    for seed in seeds:  # SCAFFOLD gains on the stand-in alone, and loses elsewhere
        make_run(folder, "digits", "scaffold", {d: v + (20.0 if d == "syn_standin" else -2.0) for d, v in START.items()}, 200,
                 seed=seed)  # fmt: skip
    page, _, reduced = "\n".join(confirmation.write_confirmations(tmp_path)).partition("without the stand-in\n")
    assert "| uniform weights | AVG | -3.50 | " in page  # (20 - 3 x 2) / 4
    assert "| uniform weights | AVG | +2.00 | " in reduced
    assert "| FedHEAL (paper) | AVG | +3.00 | " in reduced
    assert "This table was made after the results were known." in reduced


def test_an_open_confirmation_is_not_repeated_without_the_stand_in(confirmation, tmp_path):
    for row in confirmation.OF_SCAFFOLD.list_rows("digits"):
        make_runs(tmp_path / "confirmation-scaffold" / "digits", row.method, 0.0, (1, 2))
    page = "\n".join(confirmation.write_confirmations(tmp_path))
    assert "Confirmation of SCAFFOLD on digits" in page
    assert "without the stand-in" not in page


def test_fedheal_has_the_papers_tau(confirmation):
    methods = {
        data: [row.method for row in confirmation.OF_SEARCH.list_rows(data)] for data in ("digits", "office-caltech")
    }
    assert methods["digits"][1] == "fedavg+fedheal"
    assert methods["office-caltech"][1] == "fedavg+fedheal:tau=0.4"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"device": "cuda", "precision": "bf16"}, True),
        ({"seed": 3}, False),
        ({"rounds": 20}, False),
        ({"lr": 0.01}, False),
        ({"method": "fedavg+afl"}, False),
    ],
)
def test_collecting_knows_the_runs_of_the_confirmation(tool, confirmation, fields, expected):
    planned = {"data": "digits", "method": confirmation.OF_SEARCH.chosen.method, "seed": 9, "rounds": 200}
    departure = tool.CAMPAIGNS["confirmation"].find_departure(Experiment(**planned | fields))
    assert (departure == "") is expected


def test_the_rows_can_be_planned(tool, tmp_path, capsys):
    words = ["run", "--recipe", "confirmation", "--data", "office-caltech", "--device", "cpu", "--seconds", "1e-9"]
    assert tool.main([*words, "--seeds", "8-9", "--runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("open: uniform weights, seed 8, FedHEAL (paper), seed 8, ")
    assert out.count("seed") == 8


def test_the_least_final_p_is_reached_by_clear_gains_and_never_undercut(confirmation):
    # Two losses and a small gain: of the eight flips, only the one that also makes the gain a loss has a smaller sum.
    assert confirmation.bound_final_p([-4.5, -4.1, 0.2], 8) == 2 * 7 / 256
    assert confirmation.bound_final_p([], 8) == 2 / 256
    rng = np.random.default_rng(0)
    for _ in range(200):
        known = rng.normal(0, 1, rng.integers(1, 7))
        bound = confirmation.bound_final_p(known.tolist(), 8)
        assert sign_flip_p([*known, *[100.0] * (8 - len(known))]) == bound
        gains = [*known, *rng.normal(1, 2, 8 - len(known))]
        assert sum(gains) <= 0 or sign_flip_p(gains) >= bound


def test_the_page_says_when_yes_is_excluded(confirmation, tmp_path):
    for gain, seed in ((1.0, 8), (1.0, 9), (-1.5, 10)):  # on the worst domain: in AVG and in STD
        domains = START | {"syn_standin": START["syn_standin"] + gain}
        make_run(
            tmp_path / "confirmation" / "digits",
            "digits",
            confirmation.OF_SEARCH.chosen.method,
            domains,
            200,
            seed=seed,
        )
    make_runs(tmp_path / "digits", "fedavg+uniform", 0.0, (8, 9))
    assert "not *yes*" not in "\n".join(confirmation.write_confirmations(tmp_path))
    make_runs(tmp_path / "digits", "fedavg+uniform", 0.0, (10,))
    page = "\n".join(confirmation.write_confirmations(tmp_path))
    # Four flips of 1, 1, -1.5 have a sum of at least 0.5, and so do their mirror images below -0.5: p is at least 8 / 256, and
    # twice that for the last two comparisons of Holm's correction.
    assert "**The answer is not *yes*.**" in page
    assert "will be at least 0.062 for AVG against uniform weights, 0.062 for STD against uniform weights." in page


def test_a_longer_run_of_the_headline_leaves_the_confirmations_run(tool, confirmation, tmp_path, capsys):
    domains = {"amazon": 50.0, "webcam": 50.0, "dslr": 40.0}
    for rounds in (100, 200):
        make_run(
            tmp_path / f"runs{rounds}", "office-caltech", "fedavg+uniform", domains, rounds, seed=8, allow_missing=True
        )
        words = ["collect", "--runs", str(tmp_path / f"runs{rounds}"), "--results", str(tmp_path / "results")]
        assert tool.main(words) == 0
    assert "with 200 rounds in place of 100" in capsys.readouterr().out
    (run,) = confirmation.read_confirmation(confirmation.OF_SEARCH, tmp_path / "results", "office-caltech")
    assert run.folder.parent == tmp_path / "results" / "confirmation" / "office-caltech"
    assert run.experiment.rounds == 100


def test_scaffold_has_seeds_of_its_own_on_each_data_set(tool, confirmation, tmp_path):
    make_runs(tmp_path / "digits", "fedavg+uniform", 0.0, (0, 1, 2, 8))  # seed 0 is not planned
    assert confirmation.write_confirmation(confirmation.OF_SCAFFOLD, tmp_path) == []  # SCAFFOLD itself has not begun
    make_runs(tmp_path / "confirmation-scaffold" / "digits", "scaffold", 2.0, (1, 2))
    page = "\n".join(confirmation.write_confirmations(tmp_path))
    assert "| uniform weights | 72.50 | 28.72 | 30.00 | 1, 2, 8 |" in page
    assert "| uniform weights | AVG | -2.00 | -2.00 to -2.00 | 0 of 2 | 1.000 | 1.000 |" in page
    command = "python tools/results.py run --recipe confirmation-scaffold --data digits --seeds 1,2,8,9,10,11,12,13"
    assert f"Open are 19 of 24 runs (`{command}`, then `collect`)" in page
    find_departure = tool.CAMPAIGNS["confirmation-scaffold"].find_departure
    digits = Experiment(data="digits", method="scaffold", rounds=200, seed=13)
    office = Experiment(data="office-caltech", method="scaffold", rounds=100, seed=0, allow_missing=True)
    for experiment, other_seed in ((digits, 0), (office, 15)):
        assert find_departure(experiment) == ""
        departure = find_departure(experiment.model_copy(update={"seed": other_seed}))
        assert departure == f"seed {other_seed} is not in the plan"
