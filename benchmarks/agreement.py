"""Do two engines learn the same? Accuracy after some rounds, each engine several times on the same seed.

    python benchmarks/agreement.py --data digits --repeats 8 rounds=20 epochs=1 lr=0.01
    python benchmarks/agreement.py --data digits --engines cohort,lanes precision=bf16

An engine may repeat its results bit for bit, and another order of sums alone would still lead elsewhere. So every repeat
changes the learning rate by a millionth more, which is a rounding error of the update: the spread of repeats is the noise that
a difference between the engines has to be judged by. On a CPU there is one engine, and nothing to compare.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from scipy import stats

import fedheal
from arguments import exit_with_error, parse_names
from fedheal.simulate.build import build_federation, load_domains
from fedheal.simulate.devices import describe_hardware, resolve_device
from fedheal.simulate.experiment import Experiment, parse_overrides

ENGINES = ("cohort", "lanes", "serial")
PROTOCOL = {"model": "resnet10", "rounds": 20, "epochs": 1, "lr": 0.01}
CHANGE = 1e-6  # of the learning rate, from repeat to repeat
OURS = ("data", "device", "engine", "eval_every")  # fields that the options and the comparison itself set


def accuracy(keys: dict[str, Any]) -> dict[str, float]:
    """By domain and on average, after the last round."""
    result = fedheal.run(Experiment.of(keys | {"eval_every": keys["rounds"]}), progress=False)
    return {**result.domains, "AVG": result.avg}


def wanted(asked: argparse.Namespace) -> tuple[torch.device, dict[str, Any]]:
    """Where to run and what, tried out here: in a process of its own an error comes late and with a traceback."""
    if asked.repeats < 2:
        raise ValueError(f"repeats = {asked.repeats}: a spread needs at least 2")
    if asked.engines and len(asked.engines) != 2:
        raise ValueError(f"engines = {','.join(asked.engines)}: give two, such as cohort,lanes")
    if asked.at_a_time < 1:
        raise ValueError(f"at-a-time = {asked.at_a_time}: use 1 or more")
    said = parse_overrides(asked.words)
    if taken := [key for key in said if key in OURS]:
        raise ValueError(
            f"{taken[0]} cannot be given as {taken[0]}={said[taken[0]]}: the options or the comparison set it"
        )
    device = resolve_device(asked.device)
    if asked.engines and device.type != "cuda":
        raise ValueError(f"engines = {','.join(asked.engines)}: two engines can be compared on a GPU only")
    keys = PROTOCOL | said | {"data": asked.data, "device": str(device)}
    experiment = Experiment.of(keys)
    build_federation(experiment, load_domains(experiment), device)
    return device, keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("words", nargs="*", metavar="key=value", help="what differs from the protocol")
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--engines", type=parse_names(ENGINES), help="two of cohort, lanes and serial; default: lanes,serial"
    )
    parser.add_argument("--repeats", type=int, default=8, help="of each engine, at least 2")
    parser.add_argument("--at-a-time", type=int, default=4, help="runs in processes of their own")
    asked = parser.parse_intermixed_args()  # words may stand after options, too
    try:
        device, keys = wanted(asked)
    except ValueError as error:
        exit_with_error(str(error))
    engines = (asked.engines or ["lanes", "serial"]) if device.type == "cuda" else ["serial"]
    with ProcessPoolExecutor(asked.at_a_time, get_context("spawn")) as pool:
        rates = [keys["lr"] * (1 + CHANGE * i) for i in range(asked.repeats)]
        found = list(pool.map(accuracy, [keys | {"engine": e, "lr": lr} for e in engines for lr in rates]))
    names = list(found[0])
    by_engine = {
        engine: np.array([[run[name] for name in names] for run in found[i * asked.repeats : (i + 1) * asked.repeats]])
        for i, engine in enumerate(engines)
    }
    print(f"{date.today()} {describe_hardware(device)}, torch {torch.__version__}, {asked.data}", end=", ")
    print(f"{keys['rounds']} rounds of {keys['epochs']} epochs, {asked.repeats} repeats of one seed\n")
    print(f"| accuracy in percent, mean ± sd | {' | '.join(names)} |")
    print("|---" * (len(names) + 1) + "|")
    for engine, runs in by_engine.items():
        spread = zip(runs.mean(axis=0), runs.std(axis=0, ddof=1), strict=True)
        print(f"| {engine} | {' | '.join(f'{mean:.2f} ± {sd:.2f}' for mean, sd in spread)} |")
    if len(engines) > 1:
        one, two = by_engine.values()
        gap, test = one.mean(axis=0) - two.mean(axis=0), stats.ttest_ind(one, two, equal_var=False)
        print(f"| difference | {' | '.join(f'{points:+.2f}' for points in gap)} |")
        print(f"| p (Welch, not corrected for {len(names)} columns) | {' | '.join(f'{p:.2f}' for p in test.pvalue)} |")
    else:
        print("\nNothing is compared: there is one engine on a CPU, and lanes need a GPU.")


if __name__ == "__main__":
    main()
