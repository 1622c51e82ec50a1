"""The real thing: SuperLink, SuperNodes and runs as processes, and what happens when they die."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedheal
from flower.deployment import Deployment, until
from flower.keys import certificates, node_key
from loopback import loopback
from needs import needs
from tiny_data import QUICK

pytestmark = pytest.mark.slow
SITES = ("plain-0", "plain-1", "noisy-0", "noisy-1")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Iterator[Deployment]:
    needs("root", "netns")
    with loopback() as inside:
        deployment = Deployment(tmp_path_factory.mktemp("plain") / "d", inside)
        deployment.start_link()
        for number in range(4):
            deployment.start_node(number)
        yield deployment
        deployment.close()


@pytest.fixture(scope="module")
def secure(tmp_path_factory) -> Iterator[Deployment]:
    """With TLS and node keys; SuperNodes 0 to 3 have registered keys, 4 has one that is not."""
    needs("root", "netns")
    folder = tmp_path_factory.mktemp("secure")
    certificates(folder, "good")
    certificates(folder, "other")
    for number in range(5):
        node_key(folder / f"key{number}")
    good = folder / "good"
    link = ["--ssl-ca-certfile", f"{good}.ca", "--ssl-certfile", f"{good}.crt", "--ssl-keyfile", f"{good}.key"]
    with loopback() as inside:
        deployment = Deployment(
            folder / "d",
            inside,
            [*link, "--enable-supernode-auth"],
            lambda number: [
                "--root-certificates",
                f"{good}.ca",
                "--auth-supernode-private-key",
                f"{folder}/key{number}",
            ],
            f'root-certificates = "{good}.ca"',
        )
        deployment.start_link()
        for number in range(4):
            words = ["flwr", "supernode", "register", f"{folder}/key{number}.pub", "dep", "--name", f"site-{number}"]
            assert deployment.start("register", words).wait(90) == 0, deployment.log("register")
            deployment.start_node(number)
        yield deployment
        deployment.close()


def simulated(rounds: int, method: str = "fedheal") -> dict[str, torch.Tensor]:
    """The model that the project's own simulator makes of the same clients and seeds."""
    experiment = fedheal.Experiment(
        **QUICK | {"model": "tiny_data:featured", "rounds": rounds, "method": method}, only=SITES
    )
    return fedheal.run(experiment).model.state_dict()


def difference(folder: Path, expected: dict[str, torch.Tensor]) -> float:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    return max(float((found[name].double() - value.double()).abs().max()) for name, value in expected.items())


def rounds(folder: Path) -> list[dict]:
    path = folder / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait(deployment: Deployment, run, folder: Path, seconds: float) -> None:
    assert run.wait(seconds) == 0, deployment.log(f"run-{folder.name}")
    assert (folder / "model.safetensors").exists(), deployment.log(f"run-{folder.name}")


def test_over_tls_with_node_keys_the_model_is_the_simulators(secure, tmp_path):
    run = secure.run(tmp_path / "parity", rounds=3, evaluate=1.0, every=3)
    # Meanwhile two that must stay outside: a key nobody registered, and a node that trusts another authority.
    secure.start_node(4)
    until(lambda: secure.nodes[4].poll() is not None or "412" in secure.log("node4"), 90, lambda: secure.log("node4"))
    other = secure.folder.parent / "other.ca"
    words = ["flower-supernode", "--superlink", "127.0.0.1:8000", "--root-certificates", str(other)]
    words += ["--host", "127.0.0.1", "--port", "9199", "--max-retries", "1"]
    stranger = secure.start("stranger", words)
    until(lambda: "CERTIFICATE_VERIFY_FAILED" in secure.log("stranger"), 90, lambda: secure.log("stranger"))
    wait(secure, run, tmp_path / "parity", 240)
    for process in (stranger, secure.nodes.pop(4)):
        secure.kill(process)
    assert difference(tmp_path / "parity", simulated(3)) <= 1e-6
    found = rounds(tmp_path / "parity")
    assert [record["cohort"] for record in found] == [4, 4, 4]  # the strangers were never asked
    result = json.loads((tmp_path / "parity" / "result.json").read_text())
    assert result["trained"] == {site: site.split("-")[0] for site in sorted(SITES)}
    assert result["test_sizes"] == {"noisy": 15, "plain": 20}


def test_a_round_survives_a_dead_node_a_raising_site_and_nan(plain, tmp_path):
    folder = tmp_path / "faults"
    run = plain.run(folder, rounds=3, timeout=90.0, faults="raise plain-1 2, nan noisy-0 2, sleep noisy-1 2")
    until(lambda: len(rounds(folder)) == 1, 180, lambda: plain.log("run-faults"))
    until(lambda: len(plain.processes("flwr-clientapp")) > 0, 60)
    plain.kill(plain.nodes[3])  # the site that sleeps in round 2
    plain.start_node(3)
    wait(plain, run, folder, 300)
    first, second, third = rounds(folder)
    assert set(first["weights"]) == set(SITES)
    skipped, missing = second["report"]["skipped"], second["report"]["missing"]
    assert {*skipped, *missing} == {
        "plain-1",
        "noisy-0",
        "noisy-1",
    }  # of the dead node the SuperLink may tell, or nobody
    assert "out of order" in skipped["plain-1"]
    assert "NaN" in skipped["noisy-0"]
    assert (second["cohort"], second["replied"]) == (4, 2)
    assert second["seconds"]["train"] < 90 + 15  # no longer than the timeout that was given
    assert {"plain-0", "plain-1", "noisy-0"} <= set(third["weights"])
    assert all(bool(v.isfinite().all()) for v in load_file(folder / "model.safetensors").values())


def test_killed_servers_are_resumed_to_the_same_model(plain, tmp_path):
    """Method with memory on both sides; the ServerApp dies after round 2, the SuperLink after round 3."""
    folder, config = tmp_path / "killed", {"rounds": 4, "method": "scaffold+fedheal", "memory": str(tmp_path / "sites")}
    run = plain.run(folder, **config)
    until(lambda: len(rounds(folder)) == 2, 240, lambda: plain.log("run-killed"))
    servers = until(lambda: plain.processes("flwr-serverapp"), 10)
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    plain.kill(run, signal.SIGTERM)
    run = plain.run(folder, resume=True, **config)
    until(lambda: len(rounds(folder)) == 3, 240, lambda: plain.log("run-killed"))
    assert plain.link is not None
    os.kill(plain.link.pid, signal.SIGKILL)
    plain.link.wait(30)
    plain.kill(run, signal.SIGTERM)
    plain.start_link()
    for pid in plain.processes("flwr-serverapp"):  # it may not notice for minutes, and holds the folder until then
        os.kill(pid, signal.SIGKILL)
    until(lambda: not plain.processes("flwr-serverapp"), 30)
    run = plain.run(folder, resume=True, **config)
    wait(plain, run, folder, 300)
    assert [record["round"] for record in rounds(folder)] == [1, 2, 3, 4]
    assert difference(folder, simulated(4, "scaffold+fedheal")) <= 1e-6
