"""The server, and a summary of how much it has to store."""

import json
import logging
import resource
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedheal.flower import FairStrategy, FedHEAL
from many_clients.task import make_module

app = ServerApp()
log = logging.getLogger("flwr.many_clients")


@app.main()
def main(grid: Grid, context: Context) -> None:
    rounds, fraction = int(context.run_config["num-server-rounds"]), float(context.run_config["fraction"])
    net = make_module()
    strategy = FedHEAL(
        tau=float(context.run_config["tau"]),
        placement="client",
        fraction_train=fraction,
        fraction_evaluate=fraction,
        evaluate_every=rounds,
        model=net,
    )
    start = time.perf_counter()
    strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=rounds, timeout=600)
    summary = summarise(strategy, sum(p.numel() for p in net.parameters()))
    summary |= {"clients": len(list(grid.get_node_ids())), "seconds": round(time.perf_counter() - start, 1)}
    log.info("%s", json.dumps(summary, indent=2))
    if context.run_config["summary"]:
        Path(str(context.run_config["summary"])).write_text(json.dumps(summary))


def summarise(strategy: FairStrategy, size: int) -> dict[str, object]:
    assert strategy.state is not None
    arrays, described = strategy.state.aggregator.to_arrays()
    seen, last = len(strategy.federation.accepted), strategy.history[-1]
    kept = last.report.get("kept", {})  # empty if the round had no usable reply
    return {
        "rounds": len(strategy.history),
        "asked a round": last.cohort,
        "clients seen": seen,
        "numbers kept per client": sum(array.numel() for array in arrays.values()) / seen if seen else None,
        "bytes kept": sum(array.nbytes for array in arrays.values()) + len(json.dumps(described)),
        "bytes of sign counts on a server": seen * size,
        "kept entries in the last round": sum(kept.values()) / len(kept) if kept else None,
        "training loss": [strategy.history[0].train_loss, last.train_loss],
        "accuracy": last.domains,
        "no reply": sum(record.cohort - record.replied for record in strategy.history),
        "peak megabytes of the server": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
