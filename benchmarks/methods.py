"""Measure what every method costs a round on the embedded digits: seconds, memory and bytes. Show that its loss falls.

    python benchmarks/methods.py                 a Markdown table of all methods
    python benchmarks/methods.py scaffold moon   only these

Each method trains a few rounds of one epoch with 80 examples a client. That is enough to see the loss fall, but not to compare
accuracies. Seconds are processor time of one thread, which other programs hardly change. *Peak* is how much the memory of the
method's process grows. *State* is what server and clients keep from round to round beside the model.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from fedheal import data as datasets
from fedheal import methods
from fedheal.core.layout import Packed
from fedheal.engine.serial import ClientResult, SerialEngine, Shared, Task
from fedheal.simulate.build import build_federation
from fedheal.simulate.devices import resolve_device
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.round import initial_state, run_rounds

ROUNDS = 3
EXTENSIONS = [f"fedavg+fedheal:{key}" for key in ("per_step=true", "soft=true", "forget=0.1", "per_domain=true")]
NAMES = [*methods.names(), *EXTENSIONS]


@dataclass(frozen=True)
class Cost:
    """What a method costs; seconds and bytes are means per round."""

    losses: tuple[float, ...]
    accuracy: dict[str, float]
    train: float
    aggregate: float
    state: int
    sent: float
    received: float


def measure_cost(name: str) -> Cost:
    """Run a method for a few rounds and return its cost."""
    validation = {"validation": 0.2} if name in ("fedce", "fedga") else {}
    experiment = Experiment(method=name, rounds=ROUNDS, epochs=1, samples_per_client=80, **validation)
    federation = build_federation(experiment, datasets.load_dataset("embedded"), resolve_device("cpu"))
    spans, ends, history = [], [], []

    class TimedEngine(SerialEngine):
        def train(self, model: Packed, shared: Shared, tasks: Sequence[Task]) -> Iterator[ClientResult]:
            start = time.process_time()
            yield from super().train(model, shared, tasks)
            spans.append((start, time.process_time()))

    engine = TimedEngine(federation.local_training)
    for state_and_record in run_rounds(federation, initial_state(federation), engine, ROUNDS, eval_every=ROUNDS):
        ends.append(time.process_time())
        history.append(state_and_record)
    state, records = history[-1][0], [record for _, record in history]
    arrays, _ = state.to_arrays()
    state_bytes = sum(tensor.nbytes for key, tensor in arrays.items() if not key.startswith("model."))
    return Cost(
        tuple(record.train_loss or float("nan") for record in records),
        dict(records[-1].domains or {}),
        sum(stop - start for start, stop in spans) / ROUNDS,
        # The last round also evaluates.
        sum(end - stop for end, (_, stop) in zip(ends[:-1], spans[:-1], strict=True)) / (ROUNDS - 1),
        state_bytes,
        state.sent / ROUNDS,
        state.received / ROUNDS,
    )


def measure_cost_and_peak(name: str) -> tuple[Cost, float]:
    """Measure a method in a process of its own. Return its cost, and by how many bytes the process grew."""
    context = get_context("fork")  # so that everything is imported and compiled already
    here, there = context.Pipe()
    process = context.Process(target=_send_cost, args=(name, there))
    process.start()
    there.close()  # so that a process which fails ends the pipe
    cost, growth = here.recv()
    process.join()
    return cost, growth


def _send_cost(name: str, parent: Connection) -> None:
    bytes_before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    cost = measure_cost(name)
    parent.send((cost, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - bytes_before))


def parse_method(name: str) -> str:
    """Return the canonical name of a method."""
    try:
        return methods.get(name).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", type=parse_method, metavar="METHOD", help="only these, instead of all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure_cost("fedheal")  # compiles the kernels
    experiment, embedded = Experiment(method="fedavg"), datasets.load_dataset("embedded")
    print(
        f"Per round of {sum(embedded.clients_per_domain)} clients on the embedded digits ({experiment.model}, 80 examples a "
        f"client, one epoch), in processor seconds of one thread\non a machine of {os.cpu_count()} cores without a GPU "
        f"({platform.machine()}, torch {torch.__version__.split('+')[0]}):\n"
    )
    columns = [
        "method",
        "loss, round 1 to 3",
        "train s",
        "aggregate s",
        "peak MB",
        "state MB",
        "MB sent",
        "MB received",
    ]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name in options.names or NAMES:
        cost, peak = measure_cost_and_peak(name)
        losses = " ".join(f"{loss:.2f}" for loss in cost.losses)
        numbers = f"{cost.train:.2f} | {cost.aggregate:.3f} | {peak / 1e6:.0f} | {cost.state / 1e6:.2f}"
        print(f"| `{name}` | {losses} | {numbers} | {cost.sent / 1e6:.2f} | {cost.received / 1e6:.2f} |", flush=True)


if __name__ == "__main__":
    main()
