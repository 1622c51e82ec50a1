"""Compare the accuracy of two engines: each trains the same clients several times.

    python benchmarks/agreement.py --data digits --repeats 8 rounds=20 epochs=1 lr=0.01
    python benchmarks/agreement.py --data digits --engines cohort,lanes precision=bf16
    python benchmarks/agreement.py --data digits --engines cohort,lanes --vary seed precision=bf16

Two engines sum in different orders, which alone leads to different models. One engine may repeat its results bit for bit, and
then shows no noise. So every repeat raises the learning rate by another millionth, which changes an update as much as rounding
does. The spread of the repeats is the noise that a difference between the engines must exceed.

With `--vary seed` every repeat has its own initial model and order of batches, the same for both engines. The test is then
paired, and the learning rate stays as it is.

A CPU has one engine, so nothing is compared there.
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
VARIED = ("lr", "seed")
PROTOCOL = {"model": "resnet10", "rounds": 20, "epochs": 1, "lr": 0.01}
LR_CHANGE = 1e-6  # from repeat to repeat, relative
SEEDS = ("init_seed", "batch_seed")  # what `--vary seed` sets
RESERVED_FIELDS = ("data", "device", "engine", "eval_every")  # set by the options and by the comparison


def measure_accuracy(fields: dict[str, Any]) -> dict[str, float]:
    """Run an experiment. Return its accuracy by domain and on average after the last round."""
    result = fedheal.run(Experiment.of(fields | {"eval_every": fields["rounds"]}), progress=False)
    return {**result.domains, "AVG": result.avg}


def check_options(options: argparse.Namespace) -> tuple[torch.device, dict[str, Any]]:
    """Return the device and the fields of the experiment. Raise ValueError if they cannot be used.

    A worker would report an error late, with a traceback.
    """
    if options.repeats < 2:
        raise ValueError(f"repeats = {options.repeats}: a spread needs at least 2")
    if options.engines and len(options.engines) != 2:
        raise ValueError(f"engines = {','.join(options.engines)}: give two, such as cohort,lanes")
    if options.at_a_time < 1:
        raise ValueError(f"at-a-time = {options.at_a_time}: use 1 or more")
    overrides = parse_overrides(options.overrides)
    reserved_fields = (*RESERVED_FIELDS, *(SEEDS if options.vary == "seed" else ()))
    if reserved := [key for key in overrides if key in reserved_fields]:
        key = reserved[0]
        raise ValueError(f"{key} cannot be given as {key}={overrides[key]}: the options or the comparison set it")
    device = resolve_device(options.device)
    if options.engines and device.type != "cuda":
        raise ValueError(f"engines = {','.join(options.engines)}: two engines can be compared on a GPU only")
    fields = PROTOCOL | overrides | {"data": options.data, "device": str(device)}
    experiment = Experiment.of(fields)
    build_federation(experiment, load_domains(experiment), device)
    return device, fields


def list_changes(options: argparse.Namespace, lr: float) -> list[dict[str, Any]]:
    """Return the fields in which each repeat differs from the others."""
    repeats = range(options.repeats)
    if options.vary == "seed":
        return [dict.fromkeys(SEEDS, i) for i in repeats]
    return [{"lr": lr * (1 + LR_CHANGE * i)} for i in repeats]


def compare(first: np.ndarray, second: np.ndarray, paired: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean difference and the p-value of each column. Rows are repeats."""
    test = stats.ttest_rel(first, second) if paired else stats.ttest_ind(first, second, equal_var=False)
    return first.mean(axis=0) - second.mean(axis=0), test.pvalue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields that differ from the protocol")
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--engines", type=parse_names(ENGINES), help="two of cohort, lanes and serial; default: lanes,serial"
    )
    parser.add_argument("--repeats", type=int, default=8, help="of each engine, at least 2")
    parser.add_argument("--vary", choices=VARIED, default="lr", help="what differs between repeats (default: lr)")
    parser.add_argument("--at-a-time", type=int, default=4, help="runs in processes of their own")
    options = parser.parse_intermixed_args()  # fields may also follow options
    try:
        device, fields = check_options(options)
    except ValueError as error:
        exit_with_error(str(error))
    engines = (options.engines or ["lanes", "serial"]) if device.type == "cuda" else ["serial"]
    with ProcessPoolExecutor(options.at_a_time, get_context("spawn")) as pool:
        changes = list_changes(options, fields["lr"])
        experiments = [fields | {"engine": engine} | change for engine in engines for change in changes]
        runs = list(pool.map(measure_accuracy, experiments))
    columns = list(runs[0])
    accuracies = np.array([[run[column] for column in columns] for run in runs])
    by_engine = dict(zip(engines, accuracies.reshape(len(engines), options.repeats, len(columns)), strict=True))
    print(f"{date.today()} {describe_hardware(device)}, torch {torch.__version__}, {options.data}", end=", ")
    what = "seeds" if options.vary == "seed" else "repeats of one seed"
    print(f"{fields['rounds']} rounds of {fields['epochs']} epochs, {options.repeats} {what}\n")
    print(f"| accuracy in percent, mean ± sd | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for engine, repeats in by_engine.items():
        spread = zip(repeats.mean(axis=0), repeats.std(axis=0, ddof=1), strict=True)
        print(f"| {engine} | {' | '.join(f'{mean:.2f} ± {sd:.2f}' for mean, sd in spread)} |")
    if len(engines) > 1:
        first, second = by_engine.values()
        difference, p_values = compare(first, second, paired=options.vary == "seed")
        name = "paired t" if options.vary == "seed" else "Welch"
        print(f"| difference | {' | '.join(f'{points:+.2f}' for points in difference)} |")
        print(f"| p ({name}, not corrected for {len(columns)} columns) | {' | '.join(f'{p:.3f}' for p in p_values)} |")
    else:
        print("\nNothing is compared: a CPU has one engine, and lanes need a GPU.")


if __name__ == "__main__":
    main()
