"""Made-up runs to report on."""

from __future__ import annotations

import pytest

from made_up import run_folder


@pytest.fixture(scope="session")
def few(tmp_path_factory):
    """Three methods, two seeds."""
    folder = tmp_path_factory.mktemp("few")
    for method in ("fedavg", "fedavg+uniform", "fedavg+fedheal"):
        for seed in (0, 1):
            run_folder(folder / f"{method}-{seed}", method, seed=seed)
    return folder


@pytest.fixture(scope="session")
def table1(tmp_path_factory):
    """As many runs as the paper's first table of results: 28 methods on two data sets, 200 rounds, 20 clients, 32 layers."""
    folder = tmp_path_factory.mktemp("table1")
    for data in ("digits", "office-caltech"):
        for local in ("fedavg", "fedprox", "scaffold", "moon", "feddyn", "fedproc", "fedproto"):
            for stage in ("", "+afl", "+qffl", "+fedheal"):
                run_folder(folder / data / (local + stage), local + stage, data, rounds=200, tensors=32)
    return folder
