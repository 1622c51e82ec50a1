"""Runs on a Ray cluster of two nodes, in a network namespace with nothing but loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from fedheal import methods
from fedheal.cli import app
from loopback import loopback
from needs import needs
from tiny_data import QUICK, words

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # 15 by default: workers would wait for all other tests
    "RAY_raylet_start_wait_time_s": "300",  # 30 by default, which is too short on a busy machine
}
FEDHEAL = [sys.executable, "-m", "fedheal"]
RAY_NODES = [sys.executable, str(TESTS / "ray_nodes.py")]


class Nodes(NamedTuple):
    """A cluster: the prefix of commands in its namespace, and its address."""

    inside: list[str]
    address: str


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Start two nodes, whose actors take 0.1 s longer for each step."""
    needs("root", "netns")
    folder = Path("/tmp") / f"ray-{uuid.uuid4().hex[:6]}"  # Ray's sockets need short paths
    folder.mkdir()
    environment = ENVIRONMENT | {"RAY_NODES_FOLDER": str(folder), "TINY_DATA_SLEEP": "0.1"}
    pipe = subprocess.PIPE
    with (
        loopback() as inside,
        (folder / "errors").open("w") as errors,
        subprocess.Popen(
            [*inside, *RAY_NODES], env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, (folder / "errors").read_text()
        yield Nodes(inside, address)
        process.communicate(timeout=60)  # closes its input, and so ends it
    shutil.rmtree(folder, ignore_errors=True)


def run_command(command: list[str], seconds: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output and exit code."""
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=seconds)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["scaffold", "ditto"], id="two that keep something with each client"),
        pytest.param([*methods.LOCAL, *methods.WHOLE], id="every local method", marks=pytest.mark.soak),
    ],
)
def test_a_worker_killed_in_a_round_changes_no_bit(nodes: Nodes, names: list[str]) -> None:
    done = run_command([*nodes.inside, *RAY_NODES, nodes.address, *names], 120 * len(names))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} same" for name in names]
    assert done.stderr.count("a worker on 127.0.0.1 was lost while training client '") == len(names), done.stderr


def test_runs_on_a_cluster_equal_local_ones_and_errors_are_one_line(nodes: Nodes, tmp_path: Path) -> None:
    fields = [f"{key}={value}" for key, value in QUICK.items() if key != "data"]
    compare = ["compare", "fedavg", "fedheal", "--data", QUICK["data"], "--seeds", "2", *fields]
    one_run = [*nodes.inside, *FEDHEAL, "run", *words("method=fedavg", "seed=1"), "--quiet"]
    with ThreadPoolExecutor() as pool:
        # Meanwhile, what needs no cluster: it waits for an answer that does not come.
        refused = [*nodes.inside, *FEDHEAL, *compare, "--ray", "127.0.0.1:1", "--out", str(tmp_path / "none")]
        unanswered = pool.submit(run_command, refused)
        on_ray = [*nodes.inside, *FEDHEAL, *compare, "--ray", nodes.address]
        there = run_command([*on_ray, "--json", "--out", str(tmp_path / "there")])
        wrong = run_command([*on_ray, "width=4", "--out", str(tmp_path / "wrong")])
        spread = run_command([*one_run, "--ray", nodes.address, "--workers", "2", "--out", str(tmp_path / "spread")])
        here = CliRunner().invoke(app, [*compare, "--jobs", "1", "--json", "--out", str(tmp_path / "here")])
        no_cluster = unanswered.result()
    assert here.exit_code == 0, here.output
    assert no_cluster.returncode == 2
    assert "no Ray cluster answers at '127.0.0.1:1'" in no_cluster.stderr
    assert "Traceback" not in no_cluster.stderr
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr
    message = wrong.stderr.splitlines()[-1]  # after what Ray has to say on its connection
    assert message.startswith("fedheal: the model 'tiny_data:linear' cannot be built from classes, width: ")
    assert there.returncode == 0, there.stderr
    assert json.loads(there.stdout)["rows"] == json.loads(here.stdout)["rows"]
    first, second = (tmp_path / where / "fedavg-tiny_data_load-seed1" for where in ("here", "there"))
    assert {p.name for p in first.iterdir()} == {p.name for p in second.iterdir()}
    assert spread.returncode == 0, spread.stderr
    for folder in (second, tmp_path / "spread"):
        assert (folder / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()


@pytest.mark.soak
def test_a_node_killed_in_a_round_changes_no_bit(nodes: Nodes) -> None:
    """The last test: the cluster has one node afterwards."""
    done = run_command([*nodes.inside, "env", "LOSE_NODE=1", *RAY_NODES, nodes.address, "scaffold"])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "scaffold same\n"
    # The worker may live until it next needs something from its node.
    assert re.search(r"a worker on \S+ was lost while (training client '|evaluating)", done.stderr), done.stderr
