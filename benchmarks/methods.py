"""What every method costs: seconds, memory and bytes per round, on the embedded digits; and that each one learns.

    python benchmarks/methods.py                 a Markdown table over all names
    python benchmarks/methods.py scaffold moon   only these

A few rounds of one epoch with 80 examples a client: enough to see the loss fall, not to compare accuracies. *State*: what a run
must keep from round to round, beside the model (server and clients together). Seconds are those of the processor in one thread,
which other work on the machine hardly changes. *Peak*: how far the process grew beyond what
it held before, in a process of its own.
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
    """One method's numbers; seconds and bytes are means per round."""

    losses: tuple[float, ...]
    accuracy: dict[str, float]
    train: float
    aggregate: float
    state: int
    sent: float
    received: float


def cost(name: str) -> Cost:
    """Run a method for a few rounds."""
    validation = {"validation": 0.2} if name in ("fedce", "fedga") else {}
    experiment = Experiment(method=name, rounds=ROUNDS, epochs=1, samples_per_client=80, **validation)
    federation = build_federation(experiment, datasets.load("embedded"), resolve_device("cpu"))
    spans, ends, done = [], [], []

    class TimedEngine(SerialEngine):
        def train(self, model: Packed, shared: Shared, tasks: Sequence[Task]) -> Iterator[ClientResult]:
            start = time.process_time()
            yield from super().train(model, shared, tasks)
            spans.append((start, time.process_time()))

    engine = TimedEngine(federation.local_training)
    for after in run_rounds(federation, initial_state(federation), engine, ROUNDS, eval_every=ROUNDS):
        ends.append(time.process_time())
        done.append(after)
    state, history = done[-1][0], [record for _, record in done]
    arrays, _ = state.to_arrays()
    kept = sum(tensor.nbytes for key, tensor in arrays.items() if not key.startswith("model."))
    return Cost(
        tuple(record.train_loss or float("nan") for record in history),
        dict(history[-1].domains or {}),
        sum(stop - start for start, stop in spans) / ROUNDS,
        # The last round also evaluates.
        sum(end - stop for end, (_, stop) in zip(ends[:-1], spans[:-1], strict=True)) / (ROUNDS - 1),
        kept,
        state.sent / ROUNDS,
        state.received / ROUNDS,
    )


def cost_and_peak(name: str) -> tuple[Cost, float]:
    """The same in a process of its own, and by how many bytes that grew."""
    context = get_context("fork")  # which starts with everything imported and compiled
    here, there = context.Pipe()
    process = context.Process(target=_send, args=(name, there))
    process.start()
    there.close()  # or a process that dies would be waited for
    found, grown = here.recv()
    process.join()
    return found, grown


def _send(name: str, there: Connection) -> None:
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found = cost(name)
    there.send((found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before))


def known(name: str) -> str:
    try:
        return methods.get(name).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", type=known, metavar="METHOD", help="only these, instead of all")
    names = parser.parse_args().names
    torch.set_num_threads(1)
    cost("fedheal")  # compiles what there is to compile
    experiment, embedded = Experiment(method="fedavg"), datasets.load("embedded")
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
    for name in names or NAMES:
        found, peak = cost_and_peak(name)
        losses = " ".join(f"{loss:.2f}" for loss in found.losses)
        numbers = f"{found.train:.2f} | {found.aggregate:.3f} | {peak / 1e6:.0f} | {found.state / 1e6:.2f}"
        print(f"| `{name}` | {losses} | {numbers} | {found.sent / 1e6:.2f} | {found.received / 1e6:.2f} |", flush=True)


if __name__ == "__main__":
    main()
