"""tools/results_table1.py shows the rows of the paper's first table that were run, and lists the others."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from fedheal import Experiment
from made_up import make_run

ROOT = Path(__file__).parents[2]
ACCURACY = {"mnist": 90.0, "usps": 80.0, "svhn": 70.0, "syn_standin": 30.0}


@pytest.fixture
def table1(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    importlib.import_module("results")
    return importlib.import_module("results_table1")


def test_runs_of_the_headline_are_rows_too(table1, tmp_path):
    make_run(tmp_path / "digits", "digits", "fedavg+fedheal", ACCURACY, 200)
    make_run(tmp_path / "digits", "digits", "fedavg", ACCURACY, 200, seed=1)  # the table has seed 0
    make_run(tmp_path / "digits", "digits", "fedavg+fael", ACCURACY, 200)  # not in the paper's table
    make_run(tmp_path / "table1" / "digits", "digits", "moon+afl", ACCURACY, 200)
    page = "\n".join(table1.write_table1(tmp_path))
    assert "seed 0: 2 of 35 rows." in page
    assert "| FedAvg + FedHEAL | ours | 90.00 | 80.00 | 70.00 | 30.00 |" in page
    assert "| MOON + AFL | ours | 90.00 |" in page
    (missing,) = (line for line in page.splitlines() if line.startswith("Open ("))
    assert "then `collect`): FedAvg, FedAvg + uniform weights, FedAvg + AFL, FedAvg + q-FFL, FedProx, " in missing
    assert "MOON + AFL" not in missing


def test_a_run_of_scaffold_is_its_own_control(table1, tmp_path):
    make_run(tmp_path / "table1" / "digits", "digits", "scaffold", ACCURACY, 200)
    page = "\n".join(table1.write_table1(tmp_path))
    assert "seed 0: 2 of 35 rows." in page
    assert "| SCAFFOLD + uniform weights | ours |" in page


def test_nothing_is_written_without_runs(table1, tmp_path):
    assert table1.write_table1(tmp_path) == []


def test_collecting_knows_where_a_row_is_kept(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "tools")
    results = importlib.import_module("results")
    row = Experiment(data="digits", method="moon+afl", rounds=200, seed=0)
    target, _ = results.find_place(row, tmp_path)
    assert target == tmp_path / "table1" / "digits" / row.folder_name
    target, problem = results.find_place(row.model_copy(update={"seed": 1}), tmp_path)
    assert target is None
    assert problem == "moon+afl is not in the plan"
