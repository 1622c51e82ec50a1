"""The server: FedHEAL with secure aggregation, and a run folder that survives a crash."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedheal.flower.secure import SecureFedHEAL
from fedheal.simulate.build import build_module
from secure_digits.task import DOMAINS, describe_experiment

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    module = build_module(describe_experiment(context, len(DOMAINS)), classes=10)
    strategy = SecureFedHEAL(
        tau=float(config["tau"]),
        beta=float(config["beta"]),
        threshold=float(config["threshold"]),
        model=module,
        folder=str(config["folder"]) or f"runs/{context.run_id}",
        resume=bool(config["resume"]),
        data="embedded",
        seed=int(config["seed"]),
        min_available_nodes=int(config["min-nodes"]),
    )
    rounds, timeout = int(config["num-server-rounds"]), float(config["timeout"])
    strategy.start(grid, ArrayRecord(module.state_dict()), num_rounds=rounds, timeout=timeout)
