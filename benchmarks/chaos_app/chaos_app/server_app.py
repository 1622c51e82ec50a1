"""The server: FedHEAL with a run folder that it can resume."""

from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from chaos_app.site_training import SITES, make_model
from fedheal.flower import FedHEAL

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = FedHEAL(
        folder=str(config["folder"]),
        resume=bool(config["resume"]),
        fraction_evaluate=0.0,
        wait_seconds=180.0,
        clients=len(SITES),
    )
    initial = ArrayRecord({name: Array(value) for name, value in make_model().items()})
    strategy.start(grid, initial, num_rounds=int(config["rounds"]), timeout=float(config["timeout"]))
