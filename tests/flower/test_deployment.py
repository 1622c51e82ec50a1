"""One deployment with TLS and node keys for all tests: SuperLink, SuperNodes and runs as processes, some of which are killed.

The tests run in this order; the last one leaves a node dead.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedheal
from flower.deployment import Deployment, start_secure_deployment, wait_for
from flower.keys import write_certificates, write_node_key
from loopback import loopback
from needs import needs
from tiny_data import QUICK

pytestmark = pytest.mark.slow
SITES = ("plain-0", "noisy-0")  # of the first test: each message starts a process, which takes seconds


@pytest.fixture(scope="module")
def deployment(tmp_path_factory) -> Iterator[Deployment]:
    """SuperNodes 0 to 3 have registered keys, 4 has one that is not; 0 and 1 are started."""
    needs("root", "netns")
    folder = tmp_path_factory.mktemp("secure")
    write_certificates(folder, "other")
    write_node_key(folder / "key4")
    with loopback() as inside:
        deployment = start_secure_deployment(folder, inside, nodes=4, started=2)
        yield deployment
        deployment.close()


def run_simulation(rounds: int, method: str = "fedheal") -> dict[str, torch.Tensor]:
    """Return the model of the simulator with the same clients and seeds."""
    experiment = fedheal.Experiment(
        **QUICK | {"model": "tiny_data:feature_model", "rounds": rounds, "method": method}, only=SITES
    )
    return fedheal.run(experiment).model.state_dict()


def measure_difference(folder: Path, expected: dict[str, torch.Tensor]) -> float:
    state_dict = load_file(folder / "model.safetensors")
    assert state_dict.keys() == expected.keys()
    return max(float((state_dict[name].double() - value.double()).abs().max()) for name, value in expected.items())


def read_rounds(folder: Path) -> list[dict]:
    path = folder / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_run(deployment: Deployment, run, folder: Path, seconds: float) -> None:
    assert run.wait(seconds) == 0, deployment.log(f"run-{folder.name}")
    assert (folder / "model.safetensors").exists(), deployment.log(f"run-{folder.name}")


def test_over_tls_with_node_keys_killed_servers_resume_to_the_simulators_model(deployment, tmp_path):
    """A method with state on both sides. The ServerApp dies after round 1, then the SuperLink before round 2 is over."""
    folder = tmp_path / "killed"
    config = {"rounds": 2, "method": "scaffold+fedheal", "memory": str(tmp_path / "memory")}
    config |= {"evaluate": 1.0, "every": 2, "nodes": 2, "sites": 2}
    run = deployment.run(folder, **config)
    # Meanwhile two that must stay outside: a key that is not registered, and a node that trusts another authority.
    deployment.start_node(4)
    wait_for(
        lambda: deployment.nodes[4].poll() is not None or "412" in deployment.log("node4"),
        90,
        lambda: deployment.log("node4"),
    )
    other = deployment.folder.parent / "other.ca"
    words = ["flower-supernode", "--superlink", "127.0.0.1:8000", "--root-certificates", str(other)]
    words += ["--host", "127.0.0.1", "--port", "9199", "--max-retries", "1"]
    stranger = deployment.start("stranger", words)
    wait_for(lambda: "CERTIFICATE_VERIFY_FAILED" in deployment.log("stranger"), 90, lambda: deployment.log("stranger"))
    for process in (stranger, deployment.nodes.pop(4)):
        deployment.kill(process)
    wait_for(lambda: len(read_rounds(folder)) == 1, 240, lambda: deployment.log("run-killed"))
    for pid in wait_for(lambda: deployment.processes("flwr-serverapp"), 10):
        os.kill(pid, signal.SIGKILL)
    deployment.kill(run, signal.SIGTERM)
    # The ClientApps of the first run end now, except one whose model was still on its way: it would wait for that for hours.
    with suppress(AssertionError):
        wait_for(lambda: not deployment.processes("flwr-clientapp"), 60)
    for pid in deployment.processes("flwr-clientapp"):
        os.kill(pid, signal.SIGKILL)
    run = deployment.run(folder, resume=True, **config)
    # The ServerApp as well: one that has not begun yet would be started by the next SuperLink, and lock the folder.
    for word in ("flwr-serverapp", "flwr-clientapp"):
        wait_for(partial(deployment.processes, word), 240, lambda: deployment.log("run-killed"))
    assert deployment.link is not None
    os.kill(deployment.link.pid, signal.SIGKILL)
    deployment.link.wait(30)
    deployment.kill(run, signal.SIGTERM)
    deployment.start_link()
    for pid in deployment.processes("flwr-serverapp"):  # it may not notice for minutes, and locks the folder until then
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not deployment.processes("flwr-serverapp"), 30)
    run = deployment.run(folder, resume=True, **config)
    wait_for_run(deployment, run, folder, 300)
    records = read_rounds(folder)
    assert [record["round"] for record in records] == [1, 2]
    assert [record["cohort"] for record in records] == [2, 2]  # the strangers were never asked
    assert measure_difference(folder, run_simulation(2, "scaffold+fedheal")) <= 1e-6
    result = json.loads((folder / "result.json").read_text())
    assert result["trained"] == {site: site.split("-")[0] for site in sorted(SITES)}
    assert result["test_sizes"] == {"noisy": 15, "plain": 20}


def test_a_round_survives_a_dead_node_a_raising_site_and_nan(deployment, tmp_path):
    folder, faults = tmp_path / "faults", "raise plain-1 1, nan noisy-0 1, sleep noisy-1 1"
    for number in (2, 3):
        deployment.start_node(number)
    timeout = max(40.0, 8 * deployment.seconds_to_register)  # a site's process takes longer to start where others run
    run = deployment.run(folder, rounds=2, nodes=3, timeout=timeout, faults=faults)
    wait_for((folder / "federation.toml").exists, 80 + timeout, lambda: deployment.log("run-faults"))
    wait_for(lambda: deployment.processes("flwr-clientapp"), 20 + timeout, lambda: deployment.log("run-faults"))
    deployment.kill(deployment.nodes[3])  # the site that sleeps in round 1
    wait_for_run(deployment, run, folder, 220 + 2 * timeout)
    first, second = read_rounds(folder)
    skipped, missing = first["report"]["skipped"], first["report"]["missing"]
    assert len({*skipped, *missing}) == 3  # the SuperLink may report the dead node, or nobody
    assert (
        sum("out of order" in reason for reason in skipped.values()) == 1
    )  # in the first round a node has no name yet
    assert "NaN" in skipped["noisy-0"]
    assert (first["cohort"], first["replied"]) == (4, 2)
    assert first["seconds"]["train"] < timeout + 15
    assert {"plain-0", "plain-1", "noisy-0"} <= set(second["weights"])
    assert all(bool(v.isfinite().all()) for v in load_file(folder / "model.safetensors").values())
