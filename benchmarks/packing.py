"""Train several runs at a time on one GPU: seconds a round with 1, 2 and 4 processes, of a small model and of a large one.

    python benchmarks/packing.py                       # about a minute
    python benchmarks/packing.py --models small_cnn --at-a-time 1,2,4,8 --rounds 50 --precision tf32
    python benchmarks/packing.py --whole               # also time `run_all`, including process start and compilation

Images are random bytes, as many and as large as in the Digits protocol. All processes first start and warm up: they compile
kernels and capture graphs. Then some of them train while the others wait. *A run's round* is the time in which every training
run completes a round, divided by the number of runs. If it falls, running together pays. The benchmark also prints how many
runs `fedheal.campaign.placement` would choose, and the memory of a process.
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
from simulate import PROTOCOLS, make_domains

GIB = 2**30


@dataclass(frozen=True)
class Case:
    protocol: str
    epochs: int  # fewer than the protocol's, to be done sooner
    rounds: int


CASES = {"small_cnn": Case("small", 1, 20), "resnet10": Case("digits", 2, 3)}


@dataclass(frozen=True)
class WarmUp:
    """What a worker reports when it is ready: the seconds of its first round, and the bytes that torch has reserved."""

    first_round: float
    reserved_bytes: int


def make_experiment(model: str, device: str, precision: str) -> Experiment:
    case = CASES[model]
    fields = PROTOCOLS[case.protocol].fields | {"epochs": case.epochs, "precision": precision}
    return Experiment.of({"data": "digits", "method": "fedheal", "device": device, "rounds": 10**6} | fields)


def serve_rounds(model: str, device_name: str, precision: str, parent: Connection) -> None:
    """Train as many rounds as the parent asks for, again and again, until it asks for none."""
    torch.set_num_threads(1)
    device = resolve_device(device_name)
    experiment = make_experiment(model, device_name, precision)
    federation = build_federation(experiment, make_domains(PROTOCOLS[CASES[model].protocol]), device)
    local_training = federation.local_training
    with use_precision(local_training.precision, False, device), open_engine(local_training) as engine:
        start = time.perf_counter()
        state, _ = run_round(federation, initial_state(federation), engine)
        first_round = time.perf_counter() - start
        state, _ = run_round(federation, state, engine)
        parent.send(WarmUp(first_round, torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0))
        while rounds := parent.recv():
            for _ in range(rounds):
                state, _ = run_round(federation, state, engine)
            parent.send(rounds)


def time_workers(model: str, device: str, precision: str, numbers: list[int], rounds: int) -> None:
    """Start the largest number of workers. For each number, let that many train, and print their times."""
    context, processes, pipes = get_context("spawn"), [], []
    free = read_free_bytes(device)
    for _ in range(max(numbers)):
        here, there = context.Pipe()
        process = context.Process(target=serve_rounds, args=(model, device, precision, there), daemon=True)
        process.start()
        there.close()  # so that a worker which fails ends the pipe
        processes.append(process)
        pipes.append(here)
    try:
        warm_ups: list[WarmUp] = [pipe.recv() for pipe in pipes]
        first_round = max(warm_up.first_round for warm_up in warm_ups)
        print(f"{model}: first round {first_round:.1f} s in {len(warm_ups)} processes")
        if free:
            process_bytes = (free - read_free_bytes(device)) / len(warm_ups)
            reserved_bytes = max(warm_up.reserved_bytes for warm_up in warm_ups)
            at_a_time = count_small_runs(free) if is_small_run(make_experiment(model, device, precision)) else 1
            print(
                f"A process takes {process_bytes / GIB:.2f} GiB, {reserved_bytes / GIB:.2f} of them by torch; ", end=""
            )
            print(f"the rule: {at_a_time} at a time.")
        print("\n| at a time | a run's round, s | rounds a second, all together | faster than the first line |")
        print("|---|---|---|---|")
        first_line = 0.0
        for number in numbers:
            start = time.perf_counter()
            for pipe in pipes[:number]:
                pipe.send(rounds)
            for pipe in pipes[:number]:
                pipe.recv()
            seconds = (time.perf_counter() - start) / (number * rounds)
            first_line = first_line or seconds
            print(f"| {number} | {seconds:.4f} | {1 / seconds:.1f} | {first_line / seconds:.2f} x |", flush=True)
        print()
        for pipe in pipes:
            pipe.send(0)
    except EOFError:
        sys.exit(f"packing.py: a process that ran {model} failed; its error is above")
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.terminate()


def read_free_bytes(device: str) -> int:
    """Return the free memory of a GPU; 0 for a CPU."""
    return torch.cuda.mem_get_info(resolve_device(device))[0] if device.startswith("cuda") else 0


def time_run_all(device: str, numbers: list[int], rounds: int) -> None:
    """Time four short runs from start to end, as a user waits for them, and print a table."""
    print(f"run_all, four runs of {rounds} rounds on the embedded digits, all included:\n")
    print("| at a time | seconds |\n|---|---|")
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            fields = {"data": "embedded", "device": device, "rounds": rounds}
            jobs = plan(["fedavg", "fedheal"], [0, 1], fields, Path(folder))
            start = time.perf_counter()
            for _ in run_all(jobs, number):
                pass
            print(f"| {number} | {time.perf_counter() - start:.1f} |", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--at-a-time", default="1,2,4")
    parser.add_argument("--rounds", type=parse_positive, help="of every run, once warm")
    parser.add_argument("--device", default="cuda", help="cpu: the same with processes on the CPU")
    parser.add_argument("--precision", choices=PRECISIONS, help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    models, words = options.models.split(","), options.at_a_time.split(",")
    if unknown := sorted(set(models) - set(CASES)):
        exit_with_error(f"models = {unknown[0]}: use some of {', '.join(CASES)}")
    if not all(word.isdigit() and int(word) for word in words):
        exit_with_error(f"at-a-time = {options.at_a_time}: use numbers such as 1,2,4")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        exit_with_error("there is no GPU here; --device cpu does the same with processes on the CPU")
    numbers = [int(word) for word in words]
    is_gpu = options.device.startswith("cuda")
    precision = options.precision or ("bf16" if is_gpu else "fp32")
    device_name = torch.cuda.get_device_name(options.device) if is_gpu else "a CPU"
    print(f"{date.today()} {device_name}, {os.cpu_count()} cores, torch {torch.__version__}, ", end="")
    print(f"Python {platform.python_version()}, {precision}\n", flush=True)
    for model in models:
        time_workers(model, options.device, precision, numbers, options.rounds or CASES[model].rounds)
    if options.whole:
        time_run_all(options.device, numbers, options.rounds or 20)


if __name__ == "__main__":
    main()
