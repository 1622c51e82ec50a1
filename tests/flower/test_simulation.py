"""The example app under `flwr run` in Flower's simulation, on Ray, in a network namespace with nothing but loopback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

import fedheal
from fedheal.cli import app
from flower.deployment import make_environment
from loopback import loopback
from needs import needs

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"


def run_flower(inside: list[str], workspace: Path, nodes: int, **config: object) -> str:
    """Run the example app with so many nodes; return what it printed."""
    values = " ".join(f"{key.replace('_', '-')}={value!r}" for key, value in config.items())
    federation = f"num-supernodes={nodes} client-resources-num-cpus=1"
    words = ["flwr", "run", str(EXAMPLES / "flower"), "--stream", "--federation-config", federation]
    done = subprocess.run(
        [*inside, *words, "--run-config", values],
        env=make_environment(workspace / "home"),
        cwd=workspace,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_app_matches_the_simulator_and_a_report_shows_it(tmp_path):
    needs("root", "netns")
    folder = tmp_path / "run"
    with loopback() as inside:
        output = run_flower(inside, tmp_path, 4, num_server_rounds=2, steps=6, folder=str(folder))
    assert "worst served: '" in output
    experiment = fedheal.Experiment(data="embedded", rounds=2, steps=6, clients_per_domain=1, device="cpu")
    result = fedheal.run(experiment)
    state_dict = load_file(folder / "model.safetensors")
    for name, expected in result.model.state_dict().items():
        assert float((state_dict[name].double() - expected.double()).abs().max()) <= 1e-6
    reported = CliRunner().invoke(app, ["report", str(folder)])
    assert reported.exit_code == 0, reported.output
    assert f"{result.avg:.2f}" in reported.output


def test_the_benchmark_runs():
    script = Path(__file__).parents[2] / "benchmarks" / "flower.py"
    done = subprocess.run([sys.executable, script, "--quick"], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| fedheal.flower.") == 2
    assert "| flwr QFedAvg |" in done.stdout
