"""Seconds a round on a CPU: threads within a process, processes side by side, compiled steps, and the plain loop.

    python benchmarks/simulate_cpu.py                                # every way, with a small network
    python benchmarks/simulate_cpu.py --protocols resnet10           # with the paper's
    python benchmarks/simulate_cpu.py --ways serial,processes --repeats 9

20 clients of four domains, as many threads or processes as there are cores: `small` is simulate.py's, `resnet10` a few images
each for a network that needs a hundred times the arithmetic. Every way has a process of its own, and they take turns round by
round, so that whatever else the machine does hits all of them; the numbers are medians. It hits threads hardest, which wait for
each other in every layer. The first round, in which processes start and steps are compiled, is apart.
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
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from arguments import parse_positive
from fedheal.core.layout import Layout
from fedheal.engine import open_engine
from fedheal.simulate.build import build_federation
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.federation import Federation
from fedheal.simulate.round import initial_state, run_round
from simulate import PROTOCOLS, Protocol, Timed, load_domains, plain_loop

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
HERE = {
    "small": PROTOCOLS["small"],
    "resnet10": Protocol(
        32,
        {"mnist": (16, 8), "usps": (8, 8), "svhn": (16, 8), "syn": (8, 8)},
        5,
        {"model": "resnet10", "epochs": 1, "batch_size": 16, "lr": 0.001, "augment": "crop"},
    ),
}


class Compiled(nn.Module):
    """A module whose steps are compiled where they are first taken: what is compiled stays in its process."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.run: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            judged: Tensor = self.inner(x)
            return judged
        if self.run is None:
            self.run = torch.compile(self.inner.forward, dynamic=True)  # once for all sizes: last batches are smaller
        return self.run(x)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"run": None}


class Contiguous(nn.Module):
    """A module whose inner arrays have their channels first, torch's default."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        body = getattr(self.inner, "body", None)  # the small network would turn to channels last by itself
        made: Tensor = self.inner(x.contiguous()) if body is None else self.inner.head(body(x.contiguous()).flatten(1))
        return made


@dataclass(frozen=True)
class Way:
    said: str
    processes: int = 1
    threads: int = 1
    wrapped: type[Compiled | Contiguous] | None = None


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


def federation(protocol: Protocol, way: Way) -> Federation:
    fed = build_federation(
        Experiment.of({"method": "fedavg", "device": "cpu", **protocol.keys}),
        load_domains(protocol),
        torch.device("cpu"),
    )
    if way.wrapped is None:
        return fed
    module = way.wrapped(fed.local_training.module)
    return replace(fed, local_training=replace(fed.local_training, module=module, layout=Layout.of(module)))


def serve(asked: Connection, protocol: Protocol, way: Way) -> None:
    """One round's seconds for each thing that is asked, until that is nothing."""
    torch.set_num_threads(way.threads)
    fed = federation(protocol, way)
    if not way.processes:
        while asked.recv():
            made = plain_loop(fed, 5)
            asked.send({"train": made.train, "aggregate": 0.0, "evaluate": made.evaluate})
        return
    tests = list(fed.tests.values())
    with open_engine(fed.local_training, "serial", way.processes, way.threads, evaluated=tests) as engine:
        state = initial_state(fed)
        while asked.recv():
            state, record = run_round(fed, state, engine)
            asked.send(record.seconds)


@contextmanager
def started(protocol: Protocol, way: Way) -> Iterator[Callable[[], dict[str, float]]]:
    """A function that gives the seconds of one more round trained that way."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, protocol, way))
    process.start()
    there.close()

    def another() -> dict[str, float]:
        here.send(True)
        try:
            seconds: dict[str, float] = here.recv()
        except EOFError:
            raise SystemExit(f"'{way.said}' ended early: what it said is above") from None
        return seconds

    try:
        yield another
        here.send(False)
    except BaseException:
        process.terminate()
        raise
    finally:
        process.join()


def measured(protocol: Protocol, ways: dict[str, Way], repeats: int) -> list[Timed]:
    with ExitStack() as stack:
        # What is compiled is compiled here and now, not found from an earlier run; it is other code for more threads.
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        first, another = {}, {}
        for key, way in ways.items():
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache) / str(way.threads))
            another[key] = stack.enter_context(started(protocol, way))
            first[key] = sum(another[key]().values())
            print(f"  {way.said}: {first[key]:.1f} s for the first round", flush=True)
        turns = [{key: another[key]() for key in ways} for _ in range(repeats)]
    middle = {
        key: {phase: float(np.median([turn[key][phase] for turn in turns])) for phase in turns[0][key]} for key in ways
    }
    return [Timed(way.said, **middle[key], first=first[key]) for key, way in ways.items()]


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "a CPU"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "a CPU")


def scaled(protocol: Protocol, most: int | None) -> Protocol:
    """At most so many examples a client and a test."""
    if most is None:
        return protocol
    fewer = {name: (min(train, most), min(test, most)) for name, (train, test) in protocol.domains.items()}
    return replace(protocol, domains=fewer)


def some(of: dict[str, Any], named: str) -> dict[str, Any]:
    missing = [name for name in named.split(",") if name not in of]
    if missing:
        raise argparse.ArgumentTypeError(f"there is no {missing[0]!r}; use some of {','.join(of)}")
    return {name: of[name] for name in named.split(",")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--protocols", type=partial(some, HERE), default="small", help=",".join(HERE))
    parser.add_argument("--ways", type=partial(some, WAYS), default=WAYS, help=",".join(WAYS))
    parser.add_argument("--repeats", type=parse_positive, default=3)
    parser.add_argument("--examples", type=parse_positive, help="at most so many a client, for a quick try")
    asked = parser.parse_args()
    ways: dict[str, Way] = asked.ways
    where = f"{processor()}, {CORES} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{date.today()} {where}, torch {torch.__version__}, Python {platform.python_version()}")
    if not shutil.which(os.environ.get("CXX", "g++")):
        print("No C++ compiler is here, which compiled steps need: they are left out.")
        ways = {key: way for key, way in ways.items() if way.wrapped is not Compiled}
    if not ways:
        parser.error("no way is left to measure")
    for name, protocol in asked.protocols.items():
        protocol = scaled(protocol, asked.examples)
        rows = measured(protocol, ways, asked.repeats)
        plain = [row for row in rows if row.what.startswith("plain")]
        base = min(plain or rows[:1], key=lambda row: row.total)  # the rival at its best
        clients = protocol.clients * len(protocol.domains)
        train, test = np.sum(list(protocol.domains.values()), axis=0)
        print(f"\n{name}: {clients} clients, {protocol.clients * train} images to train with, {test} to judge by\n")
        print(
            f"| {protocol.keys['model']} | train | aggregate | evaluate | s a round | faster than {base.what} | first round |"
        )
        print("|---|---|---|---|---|---|---|")
        for row in rows:
            numbers = f"{row.train:.3f} | {row.aggregate:.3f} | {row.evaluate:.3f} | {row.total:.3f}"
            print(f"| {row.what} | {numbers} | {base.total / row.total:.2f} x | {row.first:.1f} |", flush=True)


if __name__ == "__main__":
    main()
