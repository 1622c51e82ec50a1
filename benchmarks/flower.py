"""What a round's aggregation costs as a Flower strategy, beside the core alone and Flower's own strategies, in one run.

    python benchmarks/flower.py             20 replies of the paper's ResNet-10 (4,903,242 parameters)
    python benchmarks/flower.py --quick     a small model, to see that it runs

Timed is `aggregate_train` on the same reply messages: reading them, aggregating, and making the record that goes out next.
The core alone is `Aggregator.apply` on a matrix of updates that is already there. A checkpoint costs the round its foreground
time; the background time is how long it is written while clients train. Every strategy is called in turn, several times over;
the best time of each counts. The batch counters of batch normalisation are left out of the messages: Flower's QFedAvg stops at
whole numbers.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import fedheal
from arguments import require_flower
from fedheal import Updates, aggregate
from fedheal.models import build

require_flower()

import flwr  # noqa: E402
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.serverapp.strategy import FedAvg, QFedAvg  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from fedheal.flower import FedHEAL, Uniform, messages  # noqa: E402

Call = Callable[[], dict[str, float]]  # seconds by name

# Messages name the task that made them; a benchmark is its own.
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


class Nodes:
    """All that a strategy asks of a grid here."""

    def __init__(self, number: int) -> None:
        self.ids = list(range(1, number + 1))

    def get_node_ids(self) -> list[int]:
        return self.ids


def replies(asked: list[Message], model: dict[str, torch.Tensor]) -> list[Message]:
    """What the nodes answer: the model, moved a little, in arrays of their own."""
    chance = torch.Generator().manual_seed(0)
    made = []
    for message in asked:
        message.metadata.__dict__["_message_id"] = str(message.metadata.dst_node_id)
        local = {name: value + 0.01 * torch.randn(value.shape, generator=chance) for name, value in model.items()}
        about = ConfigRecord({"client": f"site-{message.metadata.dst_node_id:02d}"})
        metrics = MetricRecord({"num-examples": 100, "train_loss": 1.0})
        content = RecordDict({"arrays": ArrayRecord(local), "metrics": metrics, "fedheal": about})
        made.append(Message(content, reply_to=message))
    return made


def calls(model_name: str, number: int, folder: str) -> tuple[list[Call], list[Call], int]:
    """Return what to time of ours and of Flower's own, and the model's size."""
    torch.manual_seed(0)
    whole = build(model_name, classes=10).state_dict()
    model = {name: value for name, value in whole.items() if value.is_floating_point()}
    initial = ArrayRecord(model)
    layout = messages.infer_layout(initial)
    grid: Any = Nodes(number)
    asked = FedAvg(min_available_nodes=number).configure_train(1, initial, ConfigRecord(), grid)
    answered = replies(list(asked), model)

    def strategy(name: str, one: Any) -> Call:
        rounds, folder = itertools.count(1), getattr(one, "folder", None)
        if folder is not None:
            one._num_rounds = 10**9  # as `start` does: no result is written after each round

        def call() -> dict[str, float]:
            number = next(rounds)
            one.configure_train(number, initial, ConfigRecord(), grid)
            # Some strategies empty the records they read: each gets its own, over the same bytes.
            copies = [_copied(message) for message in answered]
            begin = time.perf_counter()
            one.aggregate_train(number, copies)
            aggregated = time.perf_counter()
            if folder is None:
                return {name: aggregated - begin}
            one.aggregate_evaluate(number, [])
            ended = time.perf_counter()
            folder.settle()
            return {f"{name}, foreground": ended - aggregated, f"{name}, background": time.perf_counter() - ended}

        return call

    before = layout.pack(model)
    local = [layout.pack(message.content["arrays"].to_torch_state_dict()) for message in answered]
    updates = Updates(
        [f"site-{i:02d}" for i in range(1, number + 1)],
        torch.stack([one.params - before.params for one in local]),
        [100] * number,
        torch.stack([one.buffers for one in local]),
    )

    def core(name: str, aggregator: aggregate.Aggregator) -> Call:
        state = [aggregator.init(layout)]

        def call() -> dict[str, float]:
            begin = time.perf_counter()
            state[0] = aggregator.apply(before, updates, state[0], donate=True).state
            return {name: time.perf_counter() - begin}

        return call

    keys = {"min_available_nodes": number}
    ours = [
        core("core alone, fedheal()", aggregate.fedheal()),
        strategy("fedheal.flower.FedHEAL", FedHEAL(**keys)),
        strategy("checkpoint of FedHEAL", FedHEAL(**keys, folder=f"{folder}/fedheal")),
        core("core alone, uniform()", aggregate.uniform()),
        strategy("fedheal.flower.Uniform", Uniform(**keys)),
        strategy("checkpoint of Uniform", Uniform(**keys, folder=f"{folder}/uniform")),
    ]
    theirs = [
        strategy("flwr FedAvg", FedAvg(**keys)),
        strategy("flwr QFedAvg", QFedAvg(client_learning_rate=0.01, q=1.0, **keys)),
    ]
    return ours, theirs, layout.sizes().params


def _copied(message: Message) -> Message:
    content = RecordDict(dict(message.content.items()))
    content["arrays"] = ArrayRecord(dict(message.content["arrays"].items()))
    copy = Message(content, reply_to=message)
    copy.metadata.__dict__["_src_node_id"] = message.metadata.src_node_id
    return copy


def measured(made: list[Call], repeats: int) -> dict[str, float]:
    """The best time of each, called in turn, so that a busy moment of the machine is nobody's alone."""
    found: dict[str, float] = {}
    for turn in range(repeats + 1):
        for call in made:
            for name, seconds in call().items():
                if turn:  # the first warms up
                    found[name] = min(seconds, found.get(name, seconds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    quick = parser.parse_args().quick
    logging.getLogger("flwr").setLevel(logging.ERROR)
    number = 4 if quick else 20
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs, size = calls("small_cnn" if quick else "resnet10", number, folder)
        # The slow ones by themselves: what they allocate and free would weigh on the others.
        found = measured(ours, 2 if quick else 20) | measured(theirs, 1 if quick else 5)
    cores = len(os.sched_getaffinity(0))
    print(
        f"{platform.machine()}, {cores} CPU cores; Python {platform.python_version()}, fedheal {fedheal.__version__}, "
        f"flwr {flwr.__version__}, torch {torch.__version__}, numpy {np.__version__}"
    )
    print(f"{number} replies of {size:,} float32 parameters ({4 * number * size / 1e6:.0f} MB)\n")
    print("| aggregation of one round | ms | x core |\n|---|---|---|")
    for name, seconds in found.items():
        core = found["core alone, uniform()" if "niform" in name else "core alone, fedheal()"]
        print(f"| {name} | {seconds * 1e3:.0f} | {seconds / core:.2f} |")


if __name__ == "__main__":
    main()
