"""Show that the embedded data put fairness at stake: train each domain alone, FedAvg, uniform weights, and all data pooled.

    python benchmarks/embedded.py --seeds 3         prints a Markdown table

Alone and pooled, one machine holds the data of the domain's clients, or of all clients. It trains the same model with the same
optimiser for as many epochs as a client of the federation (rounds x epochs). Accuracy is in percent, the mean of the last five
rounds.
"""

from __future__ import annotations

import argparse

import fedheal
from fedheal import Experiment
from fedheal.data import load_dataset


def measure_accuracies(
    seed: int, rounds: int | None = None, *, with_pooled: bool = True, **fields: object
) -> dict[str, dict[str, float]]:
    """Return the accuracy by row and domain for one seed. `fields` are those of the experiments."""
    names = [domain.name for domain in load_dataset("embedded").domains]
    common = fields | ({"seed": seed} if rounds is None else {"seed": seed, "rounds": rounds})

    def run_experiment(**own_fields: object) -> dict[str, float]:
        return dict(fedheal.run(Experiment.of(common | own_fields), progress=False).domains)

    pooled = {"pooled": run_experiment(method="fedavg", pool=True)} if with_pooled else {}
    return {
        "alone": {name: run_experiment(method="fedavg", only=[name], pool=True)[name] for name in names},
        "fedavg": run_experiment(method="fedavg"),
        "fedavg+uniform": run_experiment(method="fedavg+uniform"),
        **pooled,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=None)
    options = parser.parse_args()
    if options.seeds < 1 or (options.rounds is not None and options.rounds < 1):
        parser.error("use at least one seed and one round")
    for seed in range(options.seeds):
        table = measure_accuracies(seed, options.rounds)
        names = list(table["alone"])
        if seed == 0:
            print(f"| seed | trained | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
        for row, accuracies in table.items():
            cells = " | ".join(f"{accuracies[name]:.1f}" for name in names)
            print(f"| {seed} | {row} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
