"""Seconds a round: a cohort, lanes, one client after another, and the plain loop that public code uses.

    python benchmarks/simulate.py                        # what the machine has: the Digits protocol on a GPU, a small one else
    python benchmarks/simulate.py --protocol office --precision bf16 --engines lanes,serial
    python benchmarks/simulate.py --methods fedavg,fedprox,scaffold,moon,feddyn,fedproc,fedproto

Images are random bytes in the protocol's sizes, which with their numbers is all that time depends on. Clients hold what the
protocol gives them. The test sets are those of the data that `results/` was made with, so that seconds here are those of such
runs: all of MNIST and USPS, 8,000 images of SVHN (whole: 26,032) and a stand-in's 2,000 for SYN; Office-Caltech without its
domain Caltech.

The plain loop loads and varies one image at a time with PIL, builds batches on the CPU and trains without graphs in the memory
format of the images, as the released code of FedHEAL does; its time includes loading.
"""

from __future__ import annotations

import argparse
import copy
import platform
import time
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from arguments import exit_with_error, parse_names
from fedheal.core.pixels import MEAN, STD
from fedheal.data.domains import Domain, Domains, Split
from fedheal.engine import open_engine
from fedheal.engine.cohort import CohortEngine
from fedheal.engine.lanes import Lanes
from fedheal.engine.precision import PRECISIONS, resolve_precision, use_precision
from fedheal.simulate.build import build_federation
from fedheal.simulate.devices import resolve_device
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.federation import Federation
from fedheal.simulate.round import initial_state, run_round

ENGINES = ("cohort", "lanes", "serial", "plain")


@dataclass(frozen=True)
class Protocol:
    side: int
    domains: dict[str, tuple[int, int]]  # examples a client, test examples
    clients: int
    keys: dict[str, Any]


PROTOCOLS = {
    "digits": Protocol(
        32,
        {"mnist": (600, 10000), "usps": (72, 2007), "svhn": (732, 8000), "syn": (100, 2000)},
        5,
        {"model": "resnet10", "epochs": 10, "batch_size": 64, "lr": 0.001, "augment": "crop"},
    ),
    "office": Protocol(
        192,
        {"amazon": (76, 190), "dslr": (12, 30), "webcam": (23, 58)},
        5,
        {"model": "resnet10", "epochs": 10, "batch_size": 16, "lr": 0.001, "augment": "flip"},
    ),
    "small": Protocol(
        32,
        {"mnist": (600, 1000), "usps": (72, 1000), "svhn": (732, 1000), "syn": (100, 1000)},
        5,
        {"model": "small_cnn", "epochs": 1, "batch_size": 64, "lr": 0.001, "augment": "crop"},
    ),
    "many": Protocol(
        32,
        {"mnist": (50, 1000), "usps": (50, 1000), "svhn": (50, 1000), "syn": (50, 1000)},
        250,
        {"model": "small_cnn", "epochs": 1, "batch_size": 16, "lr": 0.01, "augment": "none", "participation": 0.1},
    ),
}


def images(number: int, side: int, chance: torch.Generator) -> Split:
    made = torch.randint(0, 256, (number, 3, side, side), dtype=torch.uint8, generator=chance)
    return Split(made, torch.randint(0, 10, (number,), generator=chance))


def load_domains(protocol: Protocol) -> Domains:
    chance = torch.Generator().manual_seed(0)
    made = [
        Domain(name, images(protocol.clients * train, protocol.side, chance), images(test, protocol.side, chance))
        for name, (train, test) in protocol.domains.items()
    ]
    sizes = [train for train, _ in protocol.domains.values()]
    return Domains("random", tuple("0123456789"), tuple(made), (protocol.clients,) * len(made), tuple(sizes))


@dataclass(frozen=True)
class Timed:
    what: str
    train: float
    aggregate: float
    evaluate: float
    first: float = 0.0

    @property
    def total(self) -> float:
        return self.train + self.aggregate + self.evaluate


def timed(fed: Federation, name: str, precision: str, rounds: int, deterministic: bool, number: int | None) -> Timed:
    """Medians over rounds; the first, which compiles and captures, is apart."""
    method = "+".join(type(term).__name__ for term in fed.local_training.terms) or "FedAvg"
    local_training = replace(fed.local_training, precision=precision, module=copy.deepcopy(fed.local_training.module))
    fed = replace(fed, local_training=local_training)
    with (
        use_precision(precision, deterministic, local_training.device),
        open_engine(local_training, name, lanes=number) as engine,
    ):
        state, seconds = initial_state(fed), []
        for _ in range(rounds + 1):
            state, record = run_round(fed, state, engine)
            seconds.append(record.seconds)
        said = f"{name} {precision} {method}"
        if isinstance(engine, Lanes):
            reason = engine.fallback_reason
            said += f" ({len(engine.lanes)} lanes)" if not reason else f" (serial: {reason})"
        if isinstance(engine, CohortEngine):
            said += f" (lanes: {engine.fallback_reason})" if engine.fallback_reason else ""
    middle = {phase: float(np.median([s[phase] for s in seconds[1:]])) for phase in seconds[0]}
    return Timed(said, **middle, first=sum(seconds[0].values()))


def plain_loop(fed: Federation, steps: int) -> Timed:
    """As public code does it. Some steps are timed, and the round's time follows from their number."""
    from PIL import Image, ImageOps

    local_training, device = fed.local_training, fed.local_training.device
    module = copy.deepcopy(local_training.module).to(memory_format=torch.contiguous_format).train()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-5, foreach=False)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    how, chance = local_training.training.augment, np.random.default_rng(0)

    def loaded(split: Split, i: int, vary: bool) -> Tensor:
        image = Image.fromarray(split.images[i].permute(1, 2, 0).numpy())
        if vary and "crop" in how:
            top, left = chance.integers(0, 9, 2).tolist()
            image = ImageOps.expand(image, 4).crop((left, top, left + image.width, top + image.height))
        if vary and "flip" in how and chance.random() < 0.5:
            image = ImageOps.mirror(image)
        return (torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 - mean) / std

    def batch(split: Split, which: range, vary: bool) -> tuple[Tensor, Tensor]:
        made = [loaded(split, i, vary) for i in which]
        return torch.stack(made).to(device), split.labels[which.start : which.stop].to(device)

    size = local_training.training.batch_size
    largest = max(local_training.examples.values(), key=len)
    source = Split(largest.images.cpu(), largest.labels.cpu())

    def some(number: int) -> float:
        _synchronise(device)
        start = time.perf_counter()
        for k in range(number):
            first = k * size % max(len(source) - size, 1)
            x, y = batch(source, range(first, min(first + size, len(source))), True)
            optimiser.zero_grad()
            loss = functional.cross_entropy(module(x), y)
            loss.backward()
            optimiser.step()
            loss.item()
        _synchronise(device)
        return (time.perf_counter() - start) / number

    some(3)
    each = some(steps)
    taken = sum(len(split) for split in local_training.examples.values()) * local_training.training.epochs / size
    module.eval()
    tests = next(iter(fed.tests.values()))
    tests = Split(tests.images[: 4 * 64].cpu(), tests.labels[: 4 * 64].cpu())
    start = time.perf_counter()
    with torch.no_grad():
        for first in range(0, len(tests), 64):
            x, y = batch(tests, range(first, min(first + 64, len(tests))), False)
            (module(x).argmax(dim=1) == y).sum().item()
    judge = (time.perf_counter() - start) / len(tests) * sum(len(split) for split in fed.tests.values())
    return Timed("plain loop fp32 FedAvg", each * taken, 0.0, judge)


def work(fed: Federation) -> float:
    """Floating-point operations of a round's training: those of one batch, times the batches."""
    local_training, size = fed.local_training, fed.local_training.training.batch_size
    examples = next(split for split in local_training.examples.values() if len(split))
    module = copy.deepcopy(local_training.module)
    x = torch.zeros(size, *examples.images.shape[1:], device=local_training.device)
    with FlopCounterMode(display=False) as counted:
        module(x).sum().backward()
    total = sum(len(split) for split in local_training.examples.values())
    return counted.get_total_flops() * total * local_training.training.epochs / size


def ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """What a large matrix product reaches here, in operations a second."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
    best = np.inf
    for _ in range(12):
        _synchronise(device)
        start = time.perf_counter()
        for _ in range(4):
            a @ b
        _synchronise(device)
        best = min(best, (time.perf_counter() - start) / 4)
    return 2 * n**3 / float(best)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def engines_of(text: str, gpu: bool) -> list[str]:
    """Which of the engines that were asked for run here; a `ValueError` says that none does."""
    asked = text.split(",")
    if unknown := [engine for engine in asked if engine not in ENGINES]:
        raise ValueError(f"engines = {text}: there is no '{unknown[0]}'; use some of {','.join(ENGINES)}")
    found = [engine for engine in asked if gpu or engine not in ("cohort", "lanes")]
    if not found:
        raise ValueError(f"engines = {text}: cohort and lanes need a GPU; serial and plain run on a CPU")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--protocol", choices=sorted(PROTOCOLS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--methods", default="fedavg")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--precision", type=parse_names(PRECISIONS), help="default: bf16,tf32 on a GPU, fp32 on a CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lanes", type=int)
    parser.add_argument("--deterministic", action="store_true")
    asked = parser.parse_args()
    try:
        device = resolve_device(asked.device)
        gpu = device.type == "cuda"
        name = asked.protocol or ("digits" if gpu else "small")
        protocol, methods, engines = PROTOCOLS[name], asked.methods.split(","), engines_of(asked.engines, gpu)
        experiments = {m: Experiment.of({"method": m, "device": str(device), **protocol.keys}) for m in methods}
        if engines == ["plain"] and "fedavg" not in methods:
            raise ValueError(f"methods = {asked.methods}: the plain loop knows fedavg alone")
        if asked.rounds < 1:
            raise ValueError(f"rounds = {asked.rounds}: use 1 or more")
        precisions = asked.precision or (["bf16", "tf32"] if gpu else ["fp32"])
        for precision in precisions:
            resolve_precision(precision, device)
    except ValueError as error:
        exit_with_error(str(error))
    data = load_domains(protocol)
    where = torch.cuda.get_device_name(device) if gpu else f"{torch.get_num_threads()} threads of a CPU"
    print(f"{date.today()} {where}, torch {torch.__version__}, Python {platform.python_version()}, protocol {name}\n")
    rows: list[Timed] = []
    operations = 0.0
    for method, experiment in experiments.items():
        fed = build_federation(experiment, data, device)
        operations = operations or work(fed)
        for engine in (engine for engine in engines if engine != "plain"):
            rows += [timed(fed, engine, p, asked.rounds, asked.deterministic, asked.lanes) for p in precisions]
            print(f"  {rows[-1].what}: {rows[-1].total:.3f} s a round", flush=True)
        if "plain" in engines and method == "fedavg":
            rows.append(plain_loop(fed, 40 if gpu else 10))
    rates = {"bf16": ceiling(device, torch.bfloat16)} if gpu else {"fp32": ceiling(device, torch.float32)}
    (unit, rate), slowest = next(iter(rates.items())), max(row.total for row in rows)
    print(
        f"\n{operations / 1e12:.1f} TFLOP a round; a large {unit} matrix product reaches {rate / 1e12:.0f} TFLOP/s: ",
        end="",
    )
    print(f"at least {operations / rate:.3f} s a round\n")
    print(
        "| what | train | aggregate | evaluate | s a round | first round | TFLOP/s | of the floor | faster than the slowest |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        numbers = f"{row.train:.3f} | {row.aggregate:.4f} | {row.evaluate:.3f} | {row.total:.3f} | {row.first:.1f}"
        reached = operations / row.train
        print(f"| {row.what} | {numbers} | {reached / 1e12:.1f} | {reached / rate:.0%} | {slowest / row.total:.1f} x |")


if __name__ == "__main__":
    main()
