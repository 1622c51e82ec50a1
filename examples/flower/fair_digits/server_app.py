"""The server: one strategy, and a run folder that a crash cannot spoil."""

from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fair_digits.task import DOMAINS, experiment
from fedheal import methods
from fedheal.flower import FairStrategy, FedHEAL
from fedheal.simulate.build import build_module

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    described = experiment(context, len(DOMAINS))  # the model does not depend on how many sites there are
    if any(term.validates for term in described.resolved_method.local) and not described.validation:
        # Here, since every site would say so in every round, and the run would end with the model it began with.
        raise ValueError(
            f"method = '{described.method_name}' needs examples held out at each site: set validation = 0.2"
        )
    module = build_module(described, classes=10)
    least = int(config["min-nodes"])
    settings = {
        "model": module,
        "folder": str(config["folder"]) or f"runs/{context.run_id}",
        "resume": bool(config["resume"]),
        "data": "embedded",
        "seed": int(config["seed"]),
        "fraction_train": float(config["fraction-train"]),
        "min_train_nodes": min(2, least),
        "min_evaluate_nodes": min(2, least),
        "min_available_nodes": least,
        "wait_seconds": float(config["wait-seconds"]),
    }
    if config["placement"] == "client":
        strategy = placed_on_clients(described.method_name, **settings)
    else:
        strategy = FairStrategy(described.resolved_method, placement=str(config["placement"]), **settings)
    strategy.start(
        grid,
        ArrayRecord(module.state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        timeout=float(config["timeout"]),
    )


def placed_on_clients(method: str, **settings: Any) -> FairStrategy:
    """FedHEAL as `method` describes it, with FPHL's mask on the sites; no other method can be placed there."""
    keys = {k: v for k, v in methods.parameters(method).items() if k in ("tau", "beta", "variant", "fphl", "fael")}
    if "tau" not in keys or methods.get("fedheal", **keys).name != method:
        raise ValueError(
            f"placement = 'client' with method = '{method}': use 'fedheal', with tau, beta or fael if you like"
        )
    return FedHEAL(placement="client", **keys, **settings)
