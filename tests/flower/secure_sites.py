"""Sites for tests of secure aggregation. Updates depend on site and round alone; the grid loses or changes replies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

from fedheal.core.updates import Updates
from fedheal.flower import client
from fedheal.flower.messages import RoundInstructions, infer_layout
from fedheal.flower.secure import SecureSumMod
from flower.local_grid import LocalGrid

FIRST_NODE = 100
START = ArrayRecord(
    {
        "w": torch.linspace(-1, 1, 600, dtype=torch.float64).reshape(20, 30),
        "bn.running_mean": torch.ones(7, dtype=torch.float64),
        "bn.num_batches_tracked": torch.tensor(3),
    }
)
LAYOUT = infer_layout(START)
STAGE_OF_REPLY = {
    Key.PUBLIC_KEY_1: Stage.SETUP,
    Key.DESTINATION_LIST: Stage.SHARE_KEYS,
    Key.MASKED_PARAMETERS: Stage.COLLECT_MASKED_VECTORS,
    Key.SHARE_LIST: Stage.UNMASK,
}


def make_change(partition: int, number: int) -> dict[str, torch.Tensor]:
    """Return what a site adds to the model: small and large sites, with signs that change from round to round."""
    chance = torch.Generator().manual_seed(1000 * number + partition)
    scale = 0.01 * (1 + partition)
    change = {
        name: scale * torch.randn(START[name].shape, generator=chance, dtype=torch.float64)
        for name in ("w", "bn.running_mean")
    }
    return change | {"bn.num_batches_tracked": torch.tensor(partition)}


def count_examples(partition: int) -> int:
    return 10 + 7 * partition


def make_updates(partitions: list[int], number: int, received: ArrayRecord) -> Updates:
    """Return the updates of these sites as the core takes them."""
    before = {name: torch.from_numpy(array.numpy()) for name, array in received.items()}
    models = [LAYOUT.pack({k: before[k] + v for k, v in make_change(i, number).items()}) for i in partitions]
    return Updates(
        [f"partition-{i}" for i in partitions],
        torch.stack([model.params - LAYOUT.pack(before).params for model in models]),
        [count_examples(i) for i in partitions],
        buffers=torch.stack([model.buffers for model in models]),
        counters=torch.stack([model.counters for model in models]),
    )


def find_stage(message: Message) -> str | None:
    """Return the stage of the protocol that a reply belongs to; None for training and evaluation."""
    if message.has_error() or RECORD_KEY_CONFIGS not in message.content.config_records:
        return None
    config = message.content.config_records[RECORD_KEY_CONFIGS]
    return next(stage for key, stage in STAGE_OF_REPLY.items() if key in config)


class CopyingGrid(LocalGrid):
    """Gives each node a message of its own, as a network does: Flower's mod takes its messages apart."""

    seen: list[Message]  # every reply that reached the server

    def answer(self, message: Message) -> Message | None:
        message.content = copy.deepcopy(message.content)
        return super().answer(message)


def make_grid(
    sites: int,
    lost: dict[int, str] | None = None,
    folder: Path | None = None,
    change: Callable[[int, Message], None] | None = None,
    mods: Sequence[Any] = (SecureSumMod(),),
) -> CopyingGrid:
    """Connect sites. Those in `lost` (by partition) reply up to the stage before the given one; `change` may alter a reply."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        received = client.read_model(message)
        partition, number = int(context.node_config["partition-id"]), RoundInstructions.from_message(message).round
        model = {k: received[k] + v for k, v in make_change(partition, number).items()}
        return client.reply(message, context, model, count_examples(partition), {"train_loss": 1.0}, folder=folder)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return client.reply_evaluation(message, context, 10, {"accuracy": 0.5})

    grid = CopyingGrid(app, {FIRST_NODE + i: {"partition-id": i} for i in range(sites)})
    grid.seen = []

    def spoil(node: int, reply: Message) -> list[Message]:
        stage = find_stage(reply)
        if stage is not None and stage == (lost or {}).get(node - FIRST_NODE):
            grid.dead.add(node)
            return []
        if change is not None:
            change(node - FIRST_NODE, reply)
        grid.seen.append(reply)
        return [reply]

    grid.spoil = spoil
    return grid
