"""Time a round's aggregation in a Flower strategy, beside the core alone and Flower's own strategies.

    python benchmarks/flower.py             20 replies of the paper's ResNet-10 (4,903,242 parameters)
    python benchmarks/flower.py --quick     a small model, to see that it runs

Every strategy aggregates the same replies. Its time is that of `aggregate_train`: read the messages, aggregate them, and make
the next record to send. The core alone is `Aggregator.apply` on a matrix of updates. A checkpoint delays the round by its
foreground time. Its background time passes while clients train. The strategies take turns several times, and the best time of
each counts. Messages leave out the batch counters of batch normalisation, because Flower's QFedAvg stops at whole numbers.
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

Timer = Callable[[], dict[str, float]]  # returns seconds by name

# Flower wants to know the task that makes a message. Here it is the benchmark.
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


class Nodes:
    """A grid that only names its nodes: the strategies need no more here."""

    def __init__(self, clients: int) -> None:
        self.ids = list(range(1, clients + 1))

    def get_node_ids(self) -> list[int]:
        return self.ids


def make_replies(messages: list[Message], model: dict[str, torch.Tensor]) -> list[Message]:
    """Return the replies of the nodes: each has a copy of the model with a little noise."""
    generator = torch.Generator().manual_seed(0)
    replies = []
    for message in messages:
        message.metadata.__dict__["_message_id"] = str(message.metadata.dst_node_id)
        local = {name: value + 0.01 * torch.randn(value.shape, generator=generator) for name, value in model.items()}
        info = ConfigRecord({"client": f"site-{message.metadata.dst_node_id:02d}"})
        metrics = MetricRecord({"num-examples": 100, "train_loss": 1.0})
        content = RecordDict({"arrays": ArrayRecord(local), "metrics": metrics, "fedheal": info})
        replies.append(Message(content, reply_to=message))
    return replies


def make_timers(model_name: str, clients: int, folder: str) -> tuple[list[Timer], list[Timer], int]:
    """Return the timers of our strategies and of Flower's, and the model's number of parameters."""
    torch.manual_seed(0)
    state_dict = build(model_name, classes=10).state_dict()
    model = {name: value for name, value in state_dict.items() if value.is_floating_point()}
    initial = ArrayRecord(model)
    layout = messages.infer_layout(initial)
    grid: Any = Nodes(clients)
    messages_out = FedAvg(min_available_nodes=clients).configure_train(1, initial, ConfigRecord(), grid)
    replies = make_replies(list(messages_out), model)

    def make_strategy_timer(name: str, strategy: Any) -> Timer:
        rounds, run_folder = itertools.count(1), getattr(strategy, "folder", None)
        if run_folder is not None:
            strategy._num_rounds = 10**9  # like `start`, so that no result is written after each round

        def time_round() -> dict[str, float]:
            number = next(rounds)
            strategy.configure_train(number, initial, ConfigRecord(), grid)
            # Some strategies empty the records they read. Each gets its own records, over the same bytes.
            copies = [_copy_message(message) for message in replies]
            start = time.perf_counter()
            strategy.aggregate_train(number, copies)
            aggregated = time.perf_counter()
            if run_folder is None:
                return {name: aggregated - start}
            strategy.aggregate_evaluate(number, [])
            foreground_end = time.perf_counter()
            run_folder.settle()
            background = time.perf_counter() - foreground_end
            return {f"{name}, foreground": foreground_end - aggregated, f"{name}, background": background}

        return time_round

    global_model = layout.pack(model)
    local_models = [layout.pack(message.content["arrays"].to_torch_state_dict()) for message in replies]
    updates = Updates(
        [f"site-{i:02d}" for i in range(1, clients + 1)],
        torch.stack([local_model.params - global_model.params for local_model in local_models]),
        [100] * clients,
        torch.stack([local_model.buffers for local_model in local_models]),
    )

    def make_core_timer(name: str, aggregator: aggregate.Aggregator) -> Timer:
        state = [aggregator.init(layout)]

        def time_round() -> dict[str, float]:
            start = time.perf_counter()
            state[0] = aggregator.apply(global_model, updates, state[0], donate=True).state
            return {name: time.perf_counter() - start}

        return time_round

    settings = {"min_available_nodes": clients}
    ours = [
        make_core_timer("core alone, fedheal()", aggregate.fedheal()),
        make_strategy_timer("fedheal.flower.FedHEAL", FedHEAL(**settings)),
        make_strategy_timer("checkpoint of FedHEAL", FedHEAL(**settings, folder=f"{folder}/fedheal")),
        make_core_timer("core alone, uniform()", aggregate.uniform()),
        make_strategy_timer("fedheal.flower.Uniform", Uniform(**settings)),
        make_strategy_timer("checkpoint of Uniform", Uniform(**settings, folder=f"{folder}/uniform")),
    ]
    theirs = [
        make_strategy_timer("flwr FedAvg", FedAvg(**settings)),
        make_strategy_timer("flwr QFedAvg", QFedAvg(client_learning_rate=0.01, q=1.0, **settings)),
    ]
    return ours, theirs, layout.sizes().params


def _copy_message(message: Message) -> Message:
    content = RecordDict(dict(message.content.items()))
    content["arrays"] = ArrayRecord(dict(message.content["arrays"].items()))
    copy = Message(content, reply_to=message)
    copy.metadata.__dict__["_src_node_id"] = message.metadata.src_node_id
    return copy


def measure_best(timers: list[Timer], repeats: int) -> dict[str, float]:
    """Return the best time of each. The timers take turns, so that a busy moment of the machine hits all of them."""
    best: dict[str, float] = {}
    for turn in range(repeats + 1):
        for time_round in timers:
            for name, seconds in time_round().items():
                if turn:  # the first turn warms up
                    best[name] = min(seconds, best.get(name, seconds))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    is_quick = parser.parse_args().quick
    logging.getLogger("flwr").setLevel(logging.ERROR)
    clients = 4 if is_quick else 20
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs, size = make_timers("small_cnn" if is_quick else "resnet10", clients, folder)
        # Flower's strategies are slow, and their memory would slow ours down: they take turns among themselves.
        times = measure_best(ours, 2 if is_quick else 20) | measure_best(theirs, 1 if is_quick else 5)
    cores = len(os.sched_getaffinity(0))
    print(
        f"{platform.machine()}, {cores} CPU cores; Python {platform.python_version()}, fedheal {fedheal.__version__}, "
        f"flwr {flwr.__version__}, torch {torch.__version__}, numpy {np.__version__}"
    )
    print(f"{clients} replies of {size:,} float32 parameters ({4 * clients * size / 1e6:.0f} MB)\n")
    print("| aggregation of one round | ms | x core |\n|---|---|---|")
    for name, seconds in times.items():
        core = times["core alone, uniform()" if "niform" in name else "core alone, fedheal()"]
        print(f"| {name} | {seconds * 1e3:.0f} | {seconds / core:.2f} |")


if __name__ == "__main__":
    main()
