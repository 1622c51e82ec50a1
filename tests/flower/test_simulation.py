"""The ready apps under `flwr run` in Flower's simulation, on Ray, in a network namespace with nothing but loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

import fedheal
from fedheal.cli import app
from flower.deployment import environment
from loopback import loopback
from needs import needs

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def flwr_run(tmp_path_factory) -> Iterator[Callable[..., str]]:
    """Run an app with so many nodes; what it printed."""
    needs("root", "netns")
    folder = tmp_path_factory.mktemp("simulation")
    with loopback() as inside:

        def run(name: str, nodes: int, **config: object) -> str:
            told = " ".join(f"{key.replace('_', '-')}={value!r}" for key, value in config.items())
            federation = f"num-supernodes={nodes} client-resources-num-cpus=1"
            words = ["flwr", "run", str(EXAMPLES / name), "--stream", "--federation-config", federation]
            done = subprocess.run(
                [*inside, *words, "--run-config", told],
                env=environment(folder / "home"),
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
                timeout=400,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        yield run


def test_the_ready_app_makes_the_simulators_model_and_a_report_shows_it(flwr_run, tmp_path):
    folder = tmp_path / "run"
    shown = flwr_run("flower", 4, num_server_rounds=3, steps=6, folder=str(folder))
    assert "worst served: 'display-0'" in shown
    experiment = fedheal.Experiment(data="embedded", rounds=3, steps=6, clients_per_domain=1, device="cpu")
    result = fedheal.run(experiment)
    found = load_file(folder / "model.safetensors")
    for name, expected in result.model.state_dict().items():
        assert float((found[name].double() - expected.double()).abs().max()) <= 1e-6
    reported = CliRunner().invoke(app, ["report", str(folder)])
    assert reported.exit_code == 0, reported.output
    assert f"{result.avg:.2f}" in reported.output


def test_many_clients_cost_the_server_a_handful_of_numbers_each(flwr_run, tmp_path):
    """As the app's own 2,000 clients and 30 rounds, in a third of the time."""
    summary = tmp_path / "summary.json"
    flwr_run("many_clients", 400, num_server_rounds=8, fraction=0.05, summary=str(summary))
    found = json.loads(summary.read_text())
    assert (found["clients"], found["rounds"], found["asked a round"], found["no reply"]) == (400, 8, 20, 0)
    assert found["clients seen"] > 100
    assert found["numbers kept per client"] == 4
    assert found["bytes kept"] < found["bytes of sign counts on a server"] / 100
    assert 0.5 < found["kept entries in the last round"] < 1  # who comes again drops what disagrees with its history
    assert found["training loss"][1] < found["training loss"][0] / 2


def test_the_benchmark_runs():
    script = Path(__file__).parents[2] / "benchmarks" / "flower.py"
    done = subprocess.run([sys.executable, script, "--quick"], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| fedheal.flower.") == 2
    assert "| flwr QFedAvg |" in done.stdout
