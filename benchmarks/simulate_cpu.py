"""Time a round on a CPU: with threads, with processes, with compiled steps, and in the plain loop.

    python benchmarks/simulate_cpu.py                                # every way, with a small network
    python benchmarks/simulate_cpu.py --protocols resnet10           # with the paper's network
    python benchmarks/simulate_cpu.py --ways serial,processes --repeats 9

There are 20 clients of four domains, and as many threads or processes as cores. `small` is the protocol of simulate.py.
`resnet10` has few images a client, for a network that needs a hundred times the arithmetic.

Every way has its own process. The ways take turns round by round, so other programs disturb all of them. They disturb threads
most, because threads wait for each other in every layer. The numbers are medians. The first round, in which processes start and
steps are compiled, has its own column.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import date
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from arguments import parse_names, parse_positive
from fedheal.core.layout import Layout
from fedheal.engine import open_engine
from fedheal.simulate.build import build_federation
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.federation import Federation
from fedheal.simulate.round import initial_state
from simulate import PROTOCOLS, Protocol, RoundTimes, compute_medians, make_domains, time_plain_loop, time_round

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
CPU_PROTOCOLS = {
    "small": PROTOCOLS["small"],
    "resnet10": Protocol(
        32,
        {"mnist": (16, 8), "usps": (8, 8), "svhn": (16, 8), "syn": (8, 8)},
        5,
        {"model": "resnet10", "epochs": 1, "batch_size": 16, "lr": 0.001, "augment": "crop"},
    ),
}


class Compiled(nn.Module):
    """A module that compiles its training steps. Every process compiles its own: pickling drops the compiled code."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.compiled_forward: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            logits: Tensor = self.inner(x)
            return logits
        if self.compiled_forward is None:
            # Once for all batch sizes: the last batch of an epoch is smaller.
            self.compiled_forward = torch.compile(self.inner.forward, dynamic=True)
        return self.compiled_forward(x)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"compiled_forward": None}


class Contiguous(nn.Module):
    """A module that computes with channels first, torch's default."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        body = getattr(self.inner, "body", None)  # of the small network, whose `forward` would turn to channels last
        logits: Tensor = (
            self.inner(x.contiguous()) if body is None else self.inner.head(body(x.contiguous()).flatten(1))
        )
        return logits


@dataclass(frozen=True)
class Way:
    """A way to train: no process means the plain loop."""

    label: str
    processes: int = 1
    threads: int = 1
    wrapper: type[Compiled | Contiguous] | None = None


WAYS = {
    "plain": Way("plain loop, 1 thread", 0),
    "plain-threads": Way(f"plain loop, {CORES} threads", 0, CORES),
    "serial": Way("1 thread"),
    "threads": Way(f"{CORES} threads", 1, CORES),
    "processes": Way(f"{CORES} processes x 1 thread", CORES),
    "compiled": Way("compiled, 1 thread", 1, 1, Compiled),
    "compiled-threads": Way(f"compiled, {CORES} threads", 1, CORES, Compiled),
    "compiled-processes": Way(f"compiled, {CORES} processes x 1 thread", CORES, 1, Compiled),
    "contiguous": Way("channels first, 1 thread", 1, 1, Contiguous),
}


def build_way(protocol: Protocol, way: Way) -> Federation:
    """Return the federation of a protocol, with the module wrapped as the way needs it."""
    experiment = Experiment.of({"method": "fedavg", "device": "cpu", **protocol.fields})
    federation = build_federation(experiment, make_domains(protocol), torch.device("cpu"))
    if way.wrapper is None:
        return federation
    module = way.wrapper(federation.local_training.module)
    local_training = replace(federation.local_training, module=module, layout=Layout.of(module))
    return replace(federation, local_training=local_training)


def serve_rounds(parent: Connection, protocol: Protocol, way: Way) -> None:
    """Run a round and send its seconds whenever the parent sends True; end when it sends False."""
    torch.set_num_threads(way.threads)
    federation = build_way(protocol, way)
    if not way.processes:
        while parent.recv():
            times = time_plain_loop(federation, 5)
            parent.send({"train": times.train, "aggregate": 0.0, "evaluate": times.evaluate, "total": times.total})
        return
    tests = list(federation.tests.values())
    with open_engine(federation.local_training, "serial", way.processes, way.threads, evaluated=tests) as engine:
        state = initial_state(federation)
        while parent.recv():
            state, seconds = time_round(federation, state, engine)
            parent.send(seconds)


@contextmanager
def start_process(protocol: Protocol, way: Way) -> Iterator[Callable[[], dict[str, float]]]:
    """Start a process for a way. Yield a function that runs one more round and returns its seconds."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve_rounds, args=(there, protocol, way))
    process.start()
    there.close()

    def run_once() -> dict[str, float]:
        here.send(True)
        try:
            seconds: dict[str, float] = here.recv()
        except EOFError:
            raise SystemExit(f"the process of '{way.label}' failed; its error is above") from None
        return seconds

    try:
        yield run_once
        here.send(False)
    except BaseException:
        process.terminate()
        raise
    finally:
        process.join()


def time_ways(protocol: Protocol, ways: dict[str, Way], repeats: int) -> list[RoundTimes]:
    """Return the median times of each way; the ways take turns."""
    with ExitStack() as stack:
        # An empty cache: nothing compiled earlier is found. Each number of threads needs its own code.
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        first, run_once = {}, {}
        for key, way in ways.items():
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache) / str(way.threads))
            run_once[key] = stack.enter_context(start_process(protocol, way))
            first[key] = run_once[key]()["total"]
            print(f"  {way.label}: {first[key]:.1f} s for the first round", flush=True)
        turns = [{key: run_once[key]() for key in ways} for _ in range(repeats)]
    medians = {key: compute_medians([turn[key] for turn in turns]) for key in ways}
    return [RoundTimes(way.label, **medians[key], first=first[key]) for key, way in ways.items()]


def read_processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "a CPU"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "a CPU")


def limit_examples(protocol: Protocol, limit: int | None) -> Protocol:
    """Return a protocol with at most so many examples of each client and each test set."""
    if limit is None:
        return protocol
    domains = {name: (min(train, limit), min(test, limit)) for name, (train, test) in protocol.domains.items()}
    return replace(protocol, domains=domains)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    known_protocols, known_ways = tuple(CPU_PROTOCOLS), tuple(WAYS)
    parser.add_argument(
        "--protocols", type=parse_names(known_protocols), default="small", help=",".join(known_protocols)
    )
    parser.add_argument("--ways", type=parse_names(known_ways), default=list(known_ways), help=",".join(known_ways))
    parser.add_argument("--repeats", type=parse_positive, default=3)
    parser.add_argument("--examples", type=parse_positive, help="at most so many a client, for a quick try")
    options = parser.parse_args()
    ways: dict[str, Way] = {name: WAYS[name] for name in options.ways}
    device_name = f"{read_processor_name()}, {CORES} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{date.today()} {device_name}, torch {torch.__version__}, Python {platform.python_version()}")
    if not shutil.which(os.environ.get("CXX", "g++")):
        print("There is no C++ compiler: the ways with compiled steps are left out.")
        ways = {key: way for key, way in ways.items() if way.wrapper is not Compiled}
    if not ways:
        parser.error("no way is left to measure")
    for name in options.protocols:
        protocol = limit_examples(CPU_PROTOCOLS[name], options.examples)
        rows = time_ways(protocol, ways, options.repeats)
        plain = [row for row in rows if row.label.startswith("plain")]
        base = min(plain or rows[:1], key=lambda row: row.total)
        clients = protocol.clients_per_domain * len(protocol.domains)
        train, test = np.sum(list(protocol.domains.values()), axis=0)
        train_images = protocol.clients_per_domain * train
        print(f"\n{name}: {clients} clients, {train_images} training images, {test} test images\n")
        model = protocol.fields["model"]
        print(f"| {model} | train | aggregate | evaluate | s a round | faster than {base.label} | first round |")
        print("|---|---|---|---|---|---|---|")
        for row in rows:
            numbers = f"{row.train:.3f} | {row.aggregate:.3f} | {row.evaluate:.3f} | {row.total:.3f}"
            print(f"| {row.label} | {numbers} | {base.total / row.total:.2f} x | {row.first:.1f} |", flush=True)


if __name__ == "__main__":
    main()
