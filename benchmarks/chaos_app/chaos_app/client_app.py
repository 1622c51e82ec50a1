"""A site. It does not import torch: Flower starts a process for every message."""

import math
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from chaos_app.site_training import SITES, train_site

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    site, number = str(context.node_config["name"]), int(message.content.config_records["config"]["server-round"])
    fault = take_order(Path(str(context.run_config["orders"])), site, number)
    if fault == "hang":
        time.sleep(3600)
    received = {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}
    trained = train_site(site, number, received)
    if fault == "NaN reply":
        trained["bias"][0] = math.nan
    content = RecordDict(
        {
            "arrays": ArrayRecord({name: Array(value) for name, value in trained.items()}),
            "metrics": MetricRecord({"num-examples": SITES[site]}),
            "fedheal": ConfigRecord({"client": site, "round": number}),
        }
    )
    if fault == "oversized reply":
        content["junk"] = ArrayRecord({"junk": Array(np.zeros(10**7, np.float32))})
    return Message(content, reply_to=message)


def take_order(folder: Path, site: str, number: int) -> str | None:
    """Return how to fail, and write down the round. Each order is obeyed once."""
    order = folder / site
    if not order.exists():
        return None
    fault = order.read_text()
    order.unlink()
    (folder / f"{site}.taken").write_text(str(number))
    return fault
