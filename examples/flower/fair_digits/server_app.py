"""The server: one strategy, and a run folder that survives a crash."""

from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fair_digits.task import DOMAINS, describe_experiment
from fedheal import methods
from fedheal.flower import FairStrategy, FedHEAL
from fedheal.simulate.build import build_module

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    experiment = describe_experiment(context, len(DOMAINS))  # the model does not depend on how many sites there are
    method = experiment.method_name
    if any(term.validates for term in experiment.resolved_method.local) and not experiment.validation:
        # Otherwise every site would fail in every round, and the run would end with the initial model.
        raise ValueError(f"method = '{method}' needs examples held out at each site: set validation = 0.2")
    module = build_module(experiment, classes=10)
    min_nodes = int(config["min-nodes"])
    settings = {
        "model": module,
        "folder": str(config["folder"]) or f"runs/{context.run_id}",
        "resume": bool(config["resume"]),
        "data": "embedded",
        "seed": int(config["seed"]),
        "fraction_train": float(config["fraction-train"]),
        "min_train_nodes": min(2, min_nodes),
        "min_evaluate_nodes": min(2, min_nodes),
        "min_available_nodes": min_nodes,
        "wait_seconds": float(config["wait-seconds"]),
    }
    if config["placement"] == "client":
        strategy = make_client_placed_strategy(method, **settings)
    else:
        strategy = FairStrategy(experiment.resolved_method, placement=str(config["placement"]), **settings)
    rounds, timeout = int(config["num-server-rounds"]), float(config["timeout"])
    strategy.start(grid, ArrayRecord(module.state_dict()), num_rounds=rounds, timeout=timeout)


def make_client_placed_strategy(method: str, **settings: Any) -> FairStrategy:
    """Return FedHEAL with the parameters in `method` and FPHL's mask on the sites; no other method can be placed there."""
    keys = {k: v for k, v in methods.get(method).parameters.items() if k in ("tau", "beta", "variant", "fphl", "fael")}
    if "tau" not in keys or methods.get("fedheal", **keys).name != method:
        raise ValueError(
            f"placement = 'client' with method = '{method}': use 'fedheal', with tau, beta or fael if you like"
        )
    return FedHEAL(placement="client", **keys, **settings)
