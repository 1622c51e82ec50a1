"""Does the embedded data put fairness at stake? Each domain trained alone, FedAvg, uniform weights, all data pooled.

    python benchmarks/embedded.py --seeds 3         writes a Markdown table

Alone and pooled: the same model, optimiser and number of local epochs (rounds x epochs) as in the federation, on one machine
that holds the data of the domain's clients, or of all clients. Accuracy in percent, mean of the last five rounds.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from fedheal import data as datasets
from fedheal.aggregate import fedavg
from fedheal.data.domains import Domains, Split
from fedheal.engine.serial import train
from fedheal.experiment import Experiment, build
from fedheal.metrics import last_mean
from fedheal.run import Federation, initial_state, rounds

CPU = torch.device("cpu")


def accuracy(federation: Federation, number: int) -> dict[str, float]:
    """Last-five accuracy per domain after `number` rounds."""

    def trainer(model, cohort, t):  # type: ignore[no-untyped-def]
        return (train(federation.bench, model, client, t) for client in cohort)

    history = [record for _, record in rounds(federation, initial_state(federation), trainer, number)]
    return last_mean([record.domains or {} for record in history])


def alone(experiment: Experiment, domains: Domains, members: set[str]) -> dict[str, float]:
    """One machine with the data of all clients of these domains."""
    whole = build(experiment, domains, CPU)
    held = [split for client, split in whole.bench.examples.items() if whole.homes[client] in members]
    pooled = Split(torch.cat([s.images for s in held]), torch.cat([s.labels for s in held]))
    single = replace(
        whole,
        bench=replace(whole.bench, examples={"all": pooled}),
        clients=("all",),
        homes={"all": next(iter(members))},
        aggregator=fedavg(),
        tests={name: split for name, split in whole.tests.items() if name in members},
    )
    return accuracy(single, experiment.rounds)


def study(seed: int, number: int | None = None) -> dict[str, dict[str, float]]:
    """Row -> domain -> accuracy for one seed."""
    domains = datasets.load("embedded")
    names = [domain.name for domain in domains.domains]
    extra = {} if number is None else {"rounds": number}
    experiment = Experiment(method="fedavg", seed=seed, **extra)
    even = Experiment(method="fedavg+uniform", seed=seed, **extra)
    return {
        "alone": {name: alone(experiment, domains, {name})[name] for name in names},
        "fedavg": accuracy(build(experiment, domains, CPU), experiment.rounds),
        "fedavg+uniform": accuracy(build(even, domains, CPU), even.rounds),
        "pooled": alone(experiment, domains, set(names)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(options.seeds):
        table = study(seed, options.rounds)
        names = list(table["alone"])
        if seed == 0:
            print(f"| seed | trained | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
        for row, values in table.items():
            print(f"| {seed} | {row} | {' | '.join(f'{values[n]:.1f}' for n in names)} |", flush=True)


if __name__ == "__main__":
    main()
