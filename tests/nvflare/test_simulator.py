"""The example in NVFLARE's simulator: sites that send NaN or raise, a killed server, and the model of `fedheal run`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fedheal
from fedheal.report.rows import find_rows
from fedheal.runs import folder as files
from loopback import list_pids, loopback
from needs import needs

HERE, EXAMPLE = Path(__file__).parent, Path(__file__).parents[2] / "examples" / "nvflare"


def make_app(tmp_path: Path) -> Path:
    """Copy the example app, with tiny data instead of the digits and with the tests' jobs."""
    app = tmp_path / "app"
    shutil.copytree(EXAMPLE, app)
    shutil.copytree(HERE / "app", app, dirs_exist_ok=True)
    return app


def start(inside: list[str], app: Path, job: str, *arguments: str) -> subprocess.Popen[bytes]:
    with (app / "log.txt").open("ab") as log:
        command = [*inside, sys.executable, job, str(app / "run"), str(app / "workspace"), *arguments]
        environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
        return subprocess.Popen(command, cwd=app, env=environment, stdout=log, stderr=log)


def assert_model_of_a_simulation(app: Path, rounds: int) -> None:
    experiment = import_digits(app).describe_experiment(rounds=rounds, steps=2)
    expected = fedheal.run(experiment, progress=False).model.state_dict()
    model = files.load_tensors(app / "run" / "model.safetensors")
    assert model.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(model[name], values, rtol=0, atol=1e-6)


def import_digits(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"digits_{folder.name}", folder / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wait_for(is_reached: Callable[[], bool], process: subprocess.Popen[bytes], app: Path) -> None:
    deadline = time.monotonic() + 400
    while not is_reached():
        assert process.poll() is None, (app / "log.txt").read_text()[-3000:]
        assert time.monotonic() < deadline, (app / "log.txt").read_text()[-3000:]
        time.sleep(0.1)


def kill_all(inside: list[str]) -> None:
    """Kill the server and the sites, each by its id."""
    for pid in list_pids(inside):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def count_rounds(folder: Path) -> int:
    lines = folder / "rounds.jsonl"
    return len(lines.read_text().splitlines()) if lines.exists() else 0


@pytest.mark.slow
def test_a_killed_server_resumes_and_ends_with_the_model_of_a_simulation(tmp_path):
    needs("netns")
    app = make_app(tmp_path)
    folder = app / "run"
    with loopback() as inside:
        first = start(inside, app, "nan_job.py")
        wait_for(lambda: count_rounds(folder) >= 2, first, app)
        kill_all(inside)
        first.wait(60)
        assert count_rounds(folder) < 5
        second = start(inside, app, "nan_job.py", "resume")
        wait_for((folder / "result.json").exists, second, app)
        kill_all(inside)  # NVFLARE takes seconds to end; the other test waits for that
        second.wait(60)
    records = files.read_rounds(folder)
    assert [record.round for record in records] == [1, 2, 3, 4, 5]
    skipped = [record.report["skipped"] for record in records]
    assert [sorted(names) for names in skipped] == [["failing-0", "nan-0"]] * 5
    assert all("NaN" in names["nan-0"] for names in skipped)
    assert all(names["failing-0"].startswith("its reply is an error") for names in skipped[1:])
    assert [record.replied for record in records] == [4, 3, 3, 3, 3]
    (row,) = find_rows([folder])
    assert sorted(row.domains) == ["noisy", "plain"]
    assert_model_of_a_simulation(app, 5)


@pytest.mark.soak
def test_the_stock_workflow_ends_with_the_model_of_a_simulation(tmp_path):
    """NVFLARE builds the aggregator and passes events to it; the sites send differences."""
    needs("netns")
    app = make_app(tmp_path)
    with loopback() as inside:
        assert start(inside, app, "fedavg_job.py").wait(400) == 0, (app / "log.txt").read_text()[-3000:]
    assert [record.replied for record in files.read_rounds(app / "run")] == [2, 2]
    assert_model_of_a_simulation(app, 2)


def test_the_example_has_a_site_of_each_domain_and_one_initial_model():
    digits = import_digits(EXAMPLE)
    assert sorted(site.rpartition("-")[0] for site in digits.SITES) == ["display", "handwritten", "print", "street"]
    assert digits.describe_experiment().only == digits.SITES
    models = [digits.make_model().state_dict().values() for _ in range(2)]
    assert all(map(torch.equal, *models))
