"""Runs on a Ray cluster, in a network namespace with nothing but loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from loopback import loopback
from needs import needs
from tiny_data import QUICK

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
PORT = 6391


@contextmanager
def cluster(inside: list[str], folder: Path) -> Iterator[str]:
    """Start a head node; stop it with all its children by the process group."""
    command = [*inside, sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={PORT}"]
    command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats", "--num-cpus=2"]
    command += [f"--temp-dir={folder}"]
    with (folder / "head.log").open("wb") as log:
        head = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + 90
            while b"Ray runtime started" not in (folder / "head.log").read_bytes() and time.monotonic() < deadline:
                assert head.poll() is None, (folder / "head.log").read_text()
                time.sleep(0.2)
            yield f"127.0.0.1:{PORT}"
        finally:
            os.killpg(head.pid, signal.SIGTERM)
            try:
                head.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(head.pid, signal.SIGKILL)
                head.wait()


def run_command(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output and exit code."""
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=240)


def test_runs_on_a_cluster_equal_local_ones_and_errors_are_one_line(tmp_path, tmp_path_factory):
    needs("root", "netns")
    words = [f"{key}={value}" for key, value in QUICK.items() if key != "data"]
    command = [sys.executable, "-m", "fedheal", "compare", "fedavg", "fedheal", "--data", QUICK["data"], "--seeds", "2"]
    # Ray's sockets need short paths.
    sockets = Path("/tmp") / f"ray-{uuid.uuid4().hex[:6]}"
    sockets.mkdir()
    with loopback() as inside, ThreadPoolExecutor() as pool:
        # Meanwhile, what needs no cluster: one of these waits for an answer that does not come.
        local = pool.submit(run_command, [*command, *words, "--jobs", "1", "--json", "--out", str(tmp_path / "here")])
        refused = [*inside, *command, *words, "--ray", "127.0.0.1:1", "--out", str(tmp_path / "none")]
        unanswered = pool.submit(run_command, refused)
        with cluster(inside, sockets) as address:
            on_ray = [*inside, *command, *words, "--ray", address]
            there = run_command([*on_ray, "--json", "--out", str(tmp_path / "there")])
            wrong = run_command([*on_ray, "width=4", "--out", str(tmp_path / "wrong")])
        here, no_cluster = local.result(), unanswered.result()
    assert here.returncode == 0, here.stderr
    assert no_cluster.returncode == 2
    assert "no Ray cluster answers at '127.0.0.1:1'" in no_cluster.stderr
    assert "Traceback" not in no_cluster.stderr
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr
    said = wrong.stderr.splitlines()[-1]  # after what Ray has to say on its connection
    assert said.startswith("fedheal: the model 'tiny_data:linear' cannot be built from classes, width: ")
    assert there.returncode == 0, there.stderr
    assert json.loads(there.stdout)["rows"] == json.loads(here.stdout)["rows"]
    one, two = (tmp_path / where / "fedavg-tiny_data_load-seed1" for where in ("here", "there"))
    assert {p.name for p in one.iterdir()} == {p.name for p in two.iterdir()}
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
