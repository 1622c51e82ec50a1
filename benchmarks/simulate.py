"""Time a round of a cohort, of lanes, of one client after another, and of the plain loop in public code.

    python benchmarks/simulate.py                        # the Digits protocol on a GPU, a small protocol on a CPU
    python benchmarks/simulate.py --protocol office --precision bf16 --engines lanes,serial
    python benchmarks/simulate.py --methods fedavg,fedprox,scaffold,moon,feddyn,fedproc,fedproto

Images are random bytes: time depends only on their number and size. Clients hold as many examples as in the protocol. The test
sets are as large as those behind `results/`, so seconds here compare with those runs. These are all images of MNIST and USPS,
8,000 of the 26,032 of SVHN, and 2,000 of a stand-in for SYN. Office-Caltech lacks its domain Caltech.

The plain loop works like the released code of FedHEAL. It loads and augments one image at a time with PIL and builds batches on
the CPU. It trains without CUDA graphs, in the memory format of the images. Its time includes loading.
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

from arguments import exit_with_error, parse_names, parse_positive
from fedheal.core.pixels import MEAN, STD
from fedheal.core.state import RunState
from fedheal.data.domains import Domain, Domains, Split
from fedheal.engine import Engine, open_engine
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
    side: int  # of an image, in pixels
    domains: dict[str, tuple[int, int]]  # training examples of a client, test examples
    clients_per_domain: int
    fields: dict[str, Any]  # of the experiment


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


def make_split(size: int, side: int, generator: torch.Generator) -> Split:
    """Return random images with random labels."""
    images = torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8, generator=generator)
    return Split(images, torch.randint(0, 10, (size,), generator=generator))


def make_domains(protocol: Protocol) -> Domains:
    """Return the domains of a protocol with random images."""
    generator = torch.Generator().manual_seed(0)
    domains = []
    for name, (client_size, test_size) in protocol.domains.items():
        train = make_split(protocol.clients_per_domain * client_size, protocol.side, generator)
        domains.append(Domain(name, train, make_split(test_size, protocol.side, generator)))
    client_sizes = tuple(client_size for client_size, _ in protocol.domains.values())
    return Domains(
        "random", tuple("0123456789"), tuple(domains), (protocol.clients_per_domain,) * len(domains), client_sizes
    )


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of a round by phase and as a whole, and of the first round, which compiles and captures.

    A whole round is more than its phases: it ends when its record is made.
    """

    label: str
    train: float
    aggregate: float
    evaluate: float
    total: float
    first: float = 0.0


def compute_medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median seconds of each phase, and of whole rounds, over rounds."""
    return {phase: float(np.median([seconds[phase] for seconds in rounds])) for phase in rounds[0]}


def time_round(federation: Federation, state: RunState, engine: Engine) -> tuple[RunState, dict[str, float]]:
    """Return the state after a round, and the seconds of each phase and of the whole round."""
    start = time.perf_counter()
    state, record = run_round(federation, state, engine)  # the record's seconds have waited for the GPU
    return state, {**record.seconds, "total": time.perf_counter() - start}


def time_engine(
    federation: Federation, engine_name: str, precision: str, rounds: int, deterministic: bool, lanes: int | None
) -> RoundTimes:
    """Return the medians over rounds; the first round is not among them."""
    method = "+".join(type(term).__name__ for term in federation.local_training.terms) or "FedAvg"
    local_training = replace(
        federation.local_training, precision=precision, module=copy.deepcopy(federation.local_training.module)
    )
    federation = replace(federation, local_training=local_training)
    with (
        use_precision(precision, deterministic, local_training.device),
        open_engine(local_training, engine_name, lanes=lanes) as engine,
    ):
        state, seconds = initial_state(federation), []
        for _ in range(rounds + 1):
            state, times = time_round(federation, state, engine)
            seconds.append(times)
        label = f"{engine_name} {precision} {method}"
        if isinstance(engine, Lanes):
            reason = engine.fallback_reason
            label += f" ({len(engine.lanes)} lanes)" if not reason else f" (serial: {reason})"
        if isinstance(engine, CohortEngine):
            label += f" (lanes: {engine.fallback_reason})" if engine.fallback_reason else ""
    return RoundTimes(label, **compute_medians(seconds[1:]), first=seconds[0]["total"])


def time_plain_loop(federation: Federation, steps: int) -> RoundTimes:
    """Return the time of a round in the plain loop: that of some steps, times the steps of a round."""
    from PIL import Image, ImageOps

    local_training, device = federation.local_training, federation.local_training.device
    module = copy.deepcopy(local_training.module).to(memory_format=torch.contiguous_format).train()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-5, foreach=False)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    augmentation, generator = local_training.training.augment, np.random.default_rng(0)

    def load_image(split: Split, i: int, augments: bool) -> Tensor:
        image = Image.fromarray(split.images[i].permute(1, 2, 0).numpy())
        if augments and "crop" in augmentation:
            top, left = generator.integers(0, 9, 2).tolist()
            image = ImageOps.expand(image, 4).crop((left, top, left + image.width, top + image.height))
        if augments and "flip" in augmentation and generator.random() < 0.5:
            image = ImageOps.mirror(image)
        return (torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 - mean) / std

    def load_batch(split: Split, rows: range, augments: bool) -> tuple[Tensor, Tensor]:
        images = [load_image(split, i, augments) for i in rows]
        return torch.stack(images).to(device), split.labels[rows.start : rows.stop].to(device)

    batch_size = local_training.training.batch_size
    largest = max(local_training.examples.values(), key=len)
    source = Split(largest.images.cpu(), largest.labels.cpu())

    def time_steps(number: int) -> float:
        _synchronise(device)
        start = time.perf_counter()
        for k in range(number):
            first = k * batch_size % max(len(source) - batch_size, 1)
            x, y = load_batch(source, range(first, min(first + batch_size, len(source))), True)
            optimiser.zero_grad()
            loss = functional.cross_entropy(module(x), y)
            loss.backward()
            optimiser.step()
            loss.item()
        _synchronise(device)
        return (time.perf_counter() - start) / number

    time_steps(3)  # warms up
    train_seconds = time_steps(steps) * count_batches(federation)
    module.eval()
    tests = next(iter(federation.tests.values()))
    tests = Split(tests.images[: 4 * 64].cpu(), tests.labels[: 4 * 64].cpu())
    start = time.perf_counter()
    with torch.no_grad():
        for first in range(0, len(tests), 64):
            x, y = load_batch(tests, range(first, min(first + 64, len(tests))), False)
            (module(x).argmax(dim=1) == y).sum().item()
    seconds_per_image = (time.perf_counter() - start) / len(tests)
    evaluate_seconds = seconds_per_image * sum(len(split) for split in federation.tests.values())
    total = train_seconds + evaluate_seconds
    return RoundTimes("plain loop fp32 FedAvg", train_seconds, 0.0, evaluate_seconds, total)


def count_batches(federation: Federation) -> float:
    """Return how many full batches the training examples of a round make up."""
    training = federation.local_training.training
    examples = sum(len(split) for split in federation.local_training.examples.values())
    return examples * training.epochs / training.batch_size


def count_operations(federation: Federation) -> float:
    """Return the floating-point operations of a round's training: those of a batch, times the batches."""
    local_training, batch_size = federation.local_training, federation.local_training.training.batch_size
    examples = next(split for split in local_training.examples.values() if len(split))
    module = copy.deepcopy(local_training.module)
    x = torch.zeros(batch_size, *examples.images.shape[1:], device=local_training.device)
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    return counter.get_total_flops() * count_batches(federation)


def measure_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations a second that a large matrix product reaches on a device."""
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


def parse_engines(text: str, has_gpu: bool) -> list[str]:
    """Return the named engines that run here. Raise ValueError if a name is unknown or none runs here."""
    names = text.split(",")
    if unknown := [name for name in names if name not in ENGINES]:
        raise ValueError(f"engines = {text}: there is no '{unknown[0]}'; use some of {','.join(ENGINES)}")
    engines = [name for name in names if has_gpu or name not in ("cohort", "lanes")]
    if not engines:
        raise ValueError(f"engines = {text}: cohort and lanes need a GPU; serial and plain run on a CPU")
    return engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--protocol", choices=sorted(PROTOCOLS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--methods", default="fedavg")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--precision", type=parse_names(PRECISIONS), help="default: bf16,tf32 on a GPU, fp32 on a CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lanes", type=parse_positive)
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args()
    try:
        device = resolve_device(options.device)
        is_gpu = device.type == "cuda"
        protocol_name = options.protocol or ("digits" if is_gpu else "small")
        protocol, methods, engines = (
            PROTOCOLS[protocol_name],
            options.methods.split(","),
            parse_engines(options.engines, is_gpu),
        )
        experiments = {m: Experiment.of({"method": m, "device": str(device), **protocol.fields}) for m in methods}
        if engines == ["plain"] and "fedavg" not in methods:
            raise ValueError(f"methods = {options.methods}: the plain loop knows fedavg alone")
        if options.rounds < 1:
            raise ValueError(f"rounds = {options.rounds}: use 1 or more")
        precisions = options.precision or (["bf16", "tf32"] if is_gpu else ["fp32"])
        for precision in precisions:
            resolve_precision(precision, device)
    except ValueError as error:
        exit_with_error(str(error))
    domains = make_domains(protocol)
    device_name = torch.cuda.get_device_name(device) if is_gpu else f"{torch.get_num_threads()} threads of a CPU"
    print(f"{date.today()} {device_name}, torch {torch.__version__}, Python {platform.python_version()}, ", end="")
    print(f"protocol {protocol_name}\n")
    rows: list[RoundTimes] = []
    operations = 0.0
    for method, experiment in experiments.items():
        federation = build_federation(experiment, domains, device)
        operations = operations or count_operations(federation)
        for engine in (engine for engine in engines if engine != "plain"):
            for precision in precisions:
                row = time_engine(federation, engine, precision, options.rounds, options.deterministic, options.lanes)
                rows.append(row)
            print(f"  {row.label}: {row.total:.3f} s a round", flush=True)
        if "plain" in engines and method == "fedavg":
            rows.append(time_plain_loop(federation, 40 if is_gpu else 10))
    print_table(rows, operations, device)


def print_table(rows: list[RoundTimes], operations: float, device: torch.device) -> None:
    """Print the times, and what the device could reach for so many operations a round."""
    unit, dtype = ("bf16", torch.bfloat16) if device.type == "cuda" else ("fp32", torch.float32)
    rate, slowest = measure_ceiling(device, dtype), max(row.total for row in rows)
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
        numbers = f"{row.train:.4f} | {row.aggregate:.4f} | {row.evaluate:.4f} | {row.total:.4f} | {row.first:.1f}"
        reached = operations / row.train
        speedup = slowest / row.total
        print(f"| {row.label} | {numbers} | {reached / 1e12:.1f} | {reached / rate:.0%} | {speedup:.1f} x |")


if __name__ == "__main__":
    main()
