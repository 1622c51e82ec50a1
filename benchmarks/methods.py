"""What every method costs: seconds, memory and bytes per round, on the embedded digits; and that each one learns.

    python benchmarks/methods.py                 a Markdown table over all names
    python benchmarks/methods.py scaffold moon   only these

A few rounds of one epoch with 80 examples a client: enough to see the loss fall, not to compare accuracies. *State*: what a run
must keep from round to round, beside the model (server and clients together).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from fedheal import data as datasets
from fedheal import methods
from fedheal.engine.workers import trainer
from fedheal.execute import device_of
from fedheal.experiment import Experiment, build
from fedheal.run import initial_state, rounds

ROUNDS = 3


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
    federation = build(experiment, datasets.load("embedded"), device_of("cpu"))
    with trainer(federation.bench, 1, 1) as train:
        done = list(rounds(federation, initial_state(federation), train, ROUNDS, every=ROUNDS))
    state, history = done[-1][0], [record for _, record in done]
    arrays, _ = state.to_arrays()
    kept = sum(tensor.nbytes for key, tensor in arrays.items() if not key.startswith("model."))
    return Cost(
        tuple(record.train_loss or float("nan") for record in history),
        dict(history[-1].domains or {}),
        sum(record.seconds["train"] for record in history) / ROUNDS,
        sum(record.seconds["aggregate"] for record in history) / ROUNDS,
        kept,
        state.sent / ROUNDS,
        state.received / ROUNDS,
    )


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    columns = ["method", "loss, round 1 to 3", "train s", "aggregate s", "state MB", "MB sent", "MB received"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name in names or methods.names():
        found = cost(name)
        losses = " ".join(f"{loss:.2f}" for loss in found.losses)
        numbers = f"{found.train:.2f} | {found.aggregate:.3f} | {found.state / 1e6:.2f}"
        print(f"| {name} | {losses} | {numbers} | {found.sent / 1e6:.2f} | {found.received / 1e6:.2f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
