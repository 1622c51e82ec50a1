"""Runs with invented numbers to report on."""

from __future__ import annotations

import json
import shutil

import pytest

from fedheal.report.html_page import render_page
from made_up import load_rows, run_folder


@pytest.fixture(scope="session")
def small_runs(tmp_path_factory):
    """A folder with runs of three methods and two seeds."""
    folder = tmp_path_factory.mktemp("few")
    for method in ("fedavg", "fedavg+uniform", "fedavg+fedheal"):
        for seed in (0, 1):
            run_folder(folder / f"{method}-{seed}", method, seed=seed)
    return folder


@pytest.fixture(scope="session")
def table1(tmp_path_factory):
    """As many runs as the paper's first table of results: 28 methods on two data sets, 200 rounds, 20 clients, 32 layers.

    The runs of one stage have the same numbers, which are written once and copied.
    """
    folder = tmp_path_factory.mktemp("table1")
    for data in ("digits", "office-caltech"):
        for stage in ("", "+afl", "+qffl", "+fedheal"):
            first = run_folder(folder / data / f"fedavg{stage}", f"fedavg{stage}", data, rounds=200, tensors=32)
            for local in ("fedprox", "scaffold", "moon", "feddyn", "fedproc", "fedproto"):
                copy = shutil.copytree(first, folder / data / (local + stage))
                summary = json.loads((copy / "result.json").read_text())
                (copy / "result.json").write_text(json.dumps(summary | {"method": local + stage}))
                description = (copy / "experiment.toml").read_text()
                (copy / "experiment.toml").write_text(description.replace(f"fedavg{stage}", local + stage))
    return folder


@pytest.fixture(scope="session")
def table1_page(table1):
    """The page of all these runs."""
    page = table1 / "report.html"
    page.write_text(render_page(load_rows(table1)), encoding="utf-8")
    return page
