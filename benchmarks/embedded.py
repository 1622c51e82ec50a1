"""Does the embedded data put fairness at stake? Each domain trained alone, FedAvg, uniform weights, all data pooled.

    python benchmarks/embedded.py --seeds 3         writes a Markdown table

Alone and pooled: the same model, optimiser and number of local epochs (rounds x epochs) as in the federation, on one machine
that holds the data of the domain's clients, or of all clients. Accuracy in percent, mean of the last five rounds.
"""

from __future__ import annotations

import argparse

import fedheal
from fedheal import Experiment
from fedheal.data import load_dataset


def study(
    seed: int, rounds: int | None = None, *, with_pooled: bool = True, **fields: object
) -> dict[str, dict[str, float]]:
    """Row -> domain -> accuracy for one seed; `fields` are of the experiments."""
    names = [domain.name for domain in load_dataset("embedded").domains]
    common = fields | ({"seed": seed} if rounds is None else {"seed": seed, "rounds": rounds})

    def accuracy(**keys: object) -> dict[str, float]:
        return dict(fedheal.run(Experiment.of(common | keys), progress=False).domains)

    pooled = {"pooled": accuracy(method="fedavg", pool=True)} if with_pooled else {}
    return {
        "alone": {name: accuracy(method="fedavg", only=[name], pool=True)[name] for name in names},
        "fedavg": accuracy(method="fedavg"),
        "fedavg+uniform": accuracy(method="fedavg+uniform"),
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
        table = study(seed, options.rounds)
        names = list(table["alone"])
        if seed == 0:
            print(f"| seed | trained | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
        for row, values in table.items():
            print(f"| {seed} | {row} | {' | '.join(f'{values[n]:.1f}' for n in names)} |", flush=True)


if __name__ == "__main__":
    main()
