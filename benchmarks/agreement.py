"""Do lanes and the serial engine learn the same? Accuracy after some rounds, each engine several times on the same seed.

    python benchmarks/agreement.py --data digits rounds=20 epochs=1 lr=0.01

Repeats of one engine differ by the order of sums alone, since runs are not asked to be deterministic: their spread is the
noise that a difference between the engines has to be judged by.
"""

from __future__ import annotations

import argparse
import logging
import time
from datetime import date

import numpy as np
import torch

import fedheal
from fedheal.execute import device_of
from fedheal.experiment import Experiment, overridden

PROTOCOL = {"model": "resnet10", "rounds": 20, "epochs": 1, "lr": 0.01}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("words", nargs="*", metavar="key=value", help="what differs from the protocol")
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=4)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    device = device_of(asked.device)
    gpu = device.type == "cuda"
    keys = PROTOCOL | overridden(asked.words) | {"data": asked.data, "device": str(device)}
    found: dict[str, list[np.ndarray]] = {"lanes": [], "serial": []} if gpu else {"serial": []}
    names: list[str] = []
    seconds = dict.fromkeys(found, 0.0)
    for _ in range(asked.repeats):
        for engine, runs in found.items():
            start = time.perf_counter()
            result = fedheal.run(Experiment.of(keys | {"engine": engine, "eval_every": keys["rounds"]}), progress=False)
            seconds[engine] += time.perf_counter() - start
            names = list(result.domains)
            runs.append(np.array([*result.domains.values(), result.avg]))
    where = torch.cuda.get_device_name(device) if gpu else "a CPU"
    print(f"{date.today()} {where}, torch {torch.__version__}, {result.summary['precision']}, {asked.data}", end=", ")
    print(f"{keys['rounds']} rounds of {keys['epochs']} epochs, {asked.repeats} repeats of one seed\n")
    print(f"| accuracy in percent, mean ± sd | {' | '.join([*names, 'AVG'])} | s a run |")
    print("|---" * (len(names) + 3) + "|")
    for engine, runs in found.items():
        mean, sd = np.mean(runs, axis=0), np.std(runs, axis=0, ddof=1)
        cells = " | ".join(f"{m:.2f} ± {s:.2f}" for m, s in zip(mean, sd, strict=True))
        print(f"| {engine} | {cells} | {seconds[engine] / asked.repeats:.1f} |")
    if gpu:
        lanes, serial = np.array(found["lanes"]), np.array(found["serial"])
        gap = lanes.mean(axis=0) - serial.mean(axis=0)
        error = np.sqrt((lanes.var(axis=0, ddof=1) + serial.var(axis=0, ddof=1)) / asked.repeats)
        print(f"| difference | {' | '.join(f'{g:+.2f}' for g in gap)} | |")
        print(f"| in standard errors | {' | '.join(f'{g / e:+.1f}' for g, e in zip(gap, error, strict=True))} | |")


if __name__ == "__main__":
    main()
