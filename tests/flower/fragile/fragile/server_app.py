"""The server of the tests' federation."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedheal import Experiment
from fedheal.flower import FairStrategy, FedHEAL
from fedheal.simulate.build import build_module
from tiny_data import QUICK

SITES = ("plain-0", "noisy-0", "plain-1", "noisy-1")  # of SuperNodes 0, 1, ...; a run may have the first few
app = ServerApp()


def describe_experiment(config) -> Experiment:
    """Return the experiment that the simulator would run with these settings."""
    return Experiment(
        **QUICK
        | {"model": "tiny_data:feature_model", "rounds": int(config["rounds"]), "method": str(config["method"])},
        only=SITES[: int(config["sites"])],
    )


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.set_num_threads(1)
    config = context.run_config
    experiment = describe_experiment(config)
    module = build_module(experiment, classes=3)
    settings = {
        "model": module,
        "folder": config["folder"],
        "resume": bool(config["resume"]),
        "data": "tiny",
        "fraction_evaluate": float(config["evaluate"]),
        "evaluate_every": int(config["every"]),
        "min_available_nodes": int(config["nodes"]),
        "wait_seconds": 120,
        "clients": int(config["sites"]),
    }
    strategy = (
        FedHEAL(placement="client", **settings)
        if config["placement"] == "client"
        else FairStrategy(experiment.resolved_method, **settings)
    )
    strategy.start(
        grid,
        ArrayRecord(module.state_dict()),
        num_rounds=int(config["rounds"]),
        timeout=float(config["timeout"]),
    )
