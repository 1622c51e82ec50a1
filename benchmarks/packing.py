"""Several runs at a time on one GPU: seconds a round for each of 1, 2 and 4 processes, of a small model and of a large one.

    python benchmarks/packing.py                       # about a minute
    python benchmarks/packing.py --models small_cnn --at-a-time 1,2,4,8 --rounds 50 --precision tf32
    python benchmarks/packing.py --whole               # also `run_all` from start to end, processes and compilation included

Images are random bytes in the numbers and sizes of the Digits protocol. All processes start and warm up first (kernels are
compiled, graphs captured), and then some of them train while the others wait. *A run's round*: the time in which a round of
every run that is under way is done, divided by their number; where that falls, runs gain by being together. Beside it stand the
number that `fedheal.campaign.placement` would choose, and the memory that a process takes.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from arguments import exit_with_error, parse_positive
from fedheal.campaign.compare import plan
from fedheal.campaign.gpu_estimate import is_small_run
from fedheal.campaign.placement import count_small_runs
from fedheal.campaign.pool import run_all
from fedheal.engine import open_engine
from fedheal.engine.precision import PRECISIONS, use_precision
from fedheal.simulate.build import build_federation
from fedheal.simulate.devices import resolve_device
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.round import initial_state, run_round
from simulate import PROTOCOLS, load_domains

GIB = 2**30


@dataclass(frozen=True)
class Case:
    protocol: str
    epochs: int  # fewer than the protocol's, to be done sooner
    rounds: int


CASES = {"small_cnn": Case("small", 1, 20), "resnet10": Case("digits", 2, 3)}


@dataclass(frozen=True)
class Warm:
    """A process is ready: how long its first round took, and the memory it holds."""

    first: float
    taken: int


def described(model: str, device: str, precision: str) -> Experiment:
    case = CASES[model]
    keys = PROTOCOLS[case.protocol].keys | {"epochs": case.epochs, "precision": precision}
    return Experiment.of({"data": "digits", "method": "fedheal", "device": device, "rounds": 10**6} | keys)


def worker(model: str, device_name: str, precision: str, parent: Connection) -> None:
    """A run that trains so many rounds whenever it is told to."""
    torch.set_num_threads(1)
    device = resolve_device(device_name)
    experiment = described(model, device_name, precision)
    fed = build_federation(experiment, load_domains(PROTOCOLS[CASES[model].protocol]), device)
    with use_precision(fed.local_training.precision, False, device), open_engine(fed.local_training) as engine:
        begun = time.perf_counter()
        state, _ = run_round(fed, initial_state(fed), engine)
        first = time.perf_counter() - begun
        state, _ = run_round(fed, state, engine)
        parent.send(Warm(first, torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0))
        while rounds := parent.recv():
            for _ in range(rounds):
                state, _ = run_round(fed, state, engine)
            parent.send(rounds)


def measured(model: str, device: str, precision: str, numbers: list[int], rounds: int) -> None:
    """Start as many processes as are ever wanted, then let some of them work."""
    context, started, pipes = get_context("spawn"), [], []
    free = free_bytes(device)
    for _ in range(max(numbers)):
        here, there = context.Pipe()
        process = context.Process(target=worker, args=(model, device, precision, there), daemon=True)
        process.start()
        there.close()  # so that a process which fails ends the pipe
        started.append(process)
        pipes.append(here)
    try:
        warm: list[Warm] = [pipe.recv() for pipe in pipes]
        print(f"{model}: first round {max(w.first for w in warm):.1f} s in {len(warm)} processes")
        if free:
            each = (free - free_bytes(device)) / len(warm)
            print(
                f"A process takes {each / GIB:.2f} GiB, {max(w.taken for w in warm) / GIB:.2f} of them by torch; ",
                end="",
            )
            at_a_time = count_small_runs(free) if is_small_run(described(model, device, precision)) else 1
            print(f"the rule: {at_a_time} at a time.")
        print("\n| at a time | a run's round, s | rounds a second, all together | faster than the first line |")
        print("|---|---|---|---|")
        base = 0.0
        for number in numbers:
            begun = time.perf_counter()
            for pipe in pipes[:number]:
                pipe.send(rounds)
            for pipe in pipes[:number]:
                pipe.recv()
            each = (time.perf_counter() - begun) / (number * rounds)
            base = base or each
            print(f"| {number} | {each:.4f} | {1 / each:.1f} | {base / each:.2f} x |", flush=True)
        print()
        for pipe in pipes:
            pipe.send(0)
    except EOFError:
        sys.exit(f"packing.py: a process that ran {model} has failed; what it said stands above")
    finally:
        for process in started:
            process.join(10)
            if process.is_alive():
                process.terminate()


def free_bytes(device: str) -> int:
    return torch.cuda.mem_get_info(resolve_device(device))[0] if device.startswith("cuda") else 0


def whole(device: str, numbers: list[int], rounds: int) -> None:
    """What a user waits for: four short comparisons' runs from start to end."""
    print(f"run_all, four runs of {rounds} rounds on the embedded digits, all included:\n")
    print("| at a time | seconds |\n|---|---|")
    for number in numbers:
        with tempfile.TemporaryDirectory() as name:
            values = {"data": "embedded", "device": device, "rounds": rounds}
            planned = plan(["fedavg", "fedheal"], [0, 1], values, Path(name))
            begun = time.perf_counter()
            for _ in run_all(planned, number):
                pass
            print(f"| {number} | {time.perf_counter() - begun:.1f} |", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--at-a-time", default="1,2,4")
    parser.add_argument("--rounds", type=parse_positive, help="of every run, once warm")
    parser.add_argument("--device", default="cuda", help="cpu: the same with processes on the CPU")
    parser.add_argument("--precision", choices=PRECISIONS, help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--whole", action="store_true")
    asked = parser.parse_args()
    models, words = asked.models.split(","), asked.at_a_time.split(",")
    if unknown := sorted(set(models) - set(CASES)):
        exit_with_error(f"models = {unknown[0]}: use some of {', '.join(CASES)}")
    if not all(word.isdigit() and int(word) for word in words):
        exit_with_error(f"at-a-time = {asked.at_a_time}: use numbers such as 1,2,4")
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        exit_with_error("there is no GPU here; --device cpu does the same with processes on the CPU")
    numbers = [int(word) for word in words]
    gpu = asked.device.startswith("cuda")
    precision = asked.precision or ("bf16" if gpu else "fp32")
    where = torch.cuda.get_device_name(asked.device) if gpu else "a CPU"
    print(f"{date.today()} {where}, {os.cpu_count()} cores, torch {torch.__version__}, ", end="")
    print(f"Python {platform.python_version()}, {precision}\n", flush=True)
    for model in models:
        measured(model, asked.device, precision, numbers, asked.rounds or CASES[model].rounds)
    if asked.whole:
        whole(asked.device, numbers, asked.rounds or 20)


if __name__ == "__main__":
    main()
