"""Run a federation of 16 sites for ten thousand rounds in one process. Sites come, go, fall silent and send nonsense.

    python benchmarks/soak.py --rounds 10000 --seed 0 --out FOLDER

The server is the real one: the Flower strategy with FedHEAL, its run folder and a checkpoint after every round. The grid is a
stand-in in this process, and the training of a site is a pseudo-random step. A seed draws who joins, leaves, is silent or
spoils its reply. Every round is checked: the sites that counted are those that replied well, their weights sum to one, and the
model is finite. At the end these must hold:

- memory stays flat: the largest value after 500 rounds is at most 5 % above that of round 500;
- the last 1,000 rounds take as long as the first 1,000: the median processor time grows at most by a factor of 1.25;
- the run folder has as many files as after 500 rounds, and the line of a round is as long as before;
- participations and sign counts are, entry by entry, those of an oracle that shares no code with the server.

FOLDER gets `soak.md`, `soak.json` and the run folder.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import random
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arguments import parse_folder, parse_positive, require_flower

require_flower()

HERE = Path(__file__).parent
# Leave out this script's folder: its flower.py would hide the package of the tests.
sys.path[:] = [str(HERE.parent / "tests"), *(p for p in sys.path if Path(p) != HERE)]

from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402

from fedheal.aggregate.masks.consistency import ConsistencyState  # noqa: E402
from fedheal.core.state import State  # noqa: E402
from fedheal.flower import FedHEAL, client  # noqa: E402
from flower.local_grid import LocalGrid  # noqa: E402

SITES, DOMAINS, LEAST = 16, 4, 4  # all sites, domains, and how many sites stay connected
SHAPES = {"0.weight": (64, 16), "0.bias": (64,), "1.running_mean": (64,), "1.num_batches_tracked": ()}
PARAMETERS = ("0.weight", "0.bias")  # those with sign counts, in the model's order
LEAVE, JOIN, FALL_SILENT, SPOIL = 1 / 60, 1 / 8, 1 / 80, 1 / 25  # chances in a round
FAULTS = ("NaN", "infinity", "wrong shape", "no examples", "error", "twice", "another's name")
SETTLED, GROUP = 500, 1000  # rounds: until memory is settled; in the groups whose times are compared
MEMORY, SLOWER, LONGER = 1.05, 1.25, 1.1  # the largest ratios that pass


@dataclass
class Measurements:
    """What is measured after every round, and after every tenth."""

    round_seconds: list[float] = field(default_factory=list)  # of processor time
    memory: dict[int, int] = field(default_factory=dict)  # round -> resident bytes
    line_bytes: list[int] = field(default_factory=list)
    files: dict[int, int] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)


class SignOracle:
    """Counts participations and signs from the bytes that sites receive and send."""

    def __init__(self) -> None:
        self.n: Counter[str] = Counter()
        self.positive: dict[str, np.ndarray[Any, Any]] = {}

    def count(self, site: str, received: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> None:
        delta = np.concatenate([(sent[key].numpy() - received[key].numpy()).ravel() for key in PARAMETERS])
        self.n[site] += 1
        self.positive[site] = self.positive.get(site, 0) + (delta >= 0).astype(np.int64)

    def find_difference(self, state: ConsistencyState) -> str:
        """Return the first difference from the server's state, or ""."""
        if set(state.clients) != set(self.n):
            return f"the clients {sorted(set(state.clients) ^ set(self.n))}"
        for row, site in enumerate(state.clients):
            if state.n[row] != self.n[site]:
                return f"{site} took part {state.n[row]} times by the server, {self.n[site]} times by the oracle"
            if (wrong := int((state.counts[row].numpy() != self.positive[site]).sum())) > 0:
                return f"{wrong} sign counts of {site}"
        return ""


class ChurningGrid(LocalGrid):
    """A grid whose nodes come and go before each round, fall silent for a while, and spoil replies."""

    def __init__(self, seed: int, oracle: SignOracle, events: Counter[str]) -> None:
        app = ClientApp()
        app.train()(self.train)
        app.evaluate()(evaluate)
        app.query()(client.introduce)
        super().__init__(app, {})
        self.generator, self.oracle, self.events = random.Random(seed), oracle, events
        self.next_node, self.silent_for = 1000, dict[int, int]()
        self.away = [f"site-{number:02d}" for number in range(SITES)]
        self.faults: dict[int, str] = {}  # of this round, by node
        self.expected: set[str] = set()  # sites whose replies must count in this round
        self.round = 0
        for _ in range(2 * LEAST):
            self.join()

    def join(self) -> None:
        """Connect a site under a new node id, as after a restart without a key."""
        name = self.away.pop(self.generator.randrange(len(self.away)))
        config = {"name": name, "domain": f"domain-{int(name[-2:]) % DOMAINS}"}
        self.contexts[self.next_node] = Context(1, self.next_node, config, RecordDict(), {})
        self.next_node += 1

    def leave(self, node: int) -> None:
        self.away.append(str(self.contexts.pop(node).node_config["name"]))
        self.silent_for.pop(node, None)

    def start_round(self, number: int) -> None:
        """Draw what happens in a round."""
        generator, self.round = self.generator, number
        self.asked.clear()
        self.faults, self.expected = {}, set()
        for node in list(self.contexts):
            if len(self.contexts) - len(self.silent_for) > LEAST and generator.random() < LEAVE:
                self.leave(node)
                self.events["leaves"] += 1
        for _ in range(len(self.away)):
            if generator.random() < JOIN:
                self.join()
                self.events["joins"] += 1
        self.silent_for = {node: left - 1 for node, left in self.silent_for.items() if left > 1}
        for node in self.contexts:
            if len(self.contexts) - len(self.silent_for) > LEAST and generator.random() < FALL_SILENT:
                self.silent_for.setdefault(node, generator.randint(1, 20))
                self.events["falls silent"] += 1
            elif generator.random() < SPOIL:
                self.faults[node] = generator.choice(FAULTS)
        self.dead = set(self.silent_for)

    def train(self, message: Message, context: Context) -> Message:
        received = client.read_model(message)
        name, node, number = str(context.node_config["name"]), context.node_id, self.round
        generator = np.random.default_rng([number, int(name[-2:])])
        sent = {
            key: value + step
            for (key, value), step in zip(received.items(), draw_steps(generator, received), strict=True)
        }
        examples, fault = 50 + 10 * int(name[-2:]), self.faults.get(node)
        if fault is None:
            self.oracle.count(name, received, sent)
            self.expected.add(name)
        domain = str(context.node_config["domain"])
        return client.reply(message, context, sent, examples, {"train_loss": 1.0}, domain=domain)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        self.spoil = self.spoil_training if messages and messages[0].metadata.message_type == "train" else keep_reply
        return super().send_and_receive(messages, timeout=timeout)

    def spoil_training(self, node: int, reply: Message) -> list[Message]:
        fault = self.faults.get(node)
        if fault is None:
            return [reply]
        self.events[fault] += 1
        arrays = reply.content["arrays"]
        if fault in ("NaN", "infinity"):
            arrays["0.bias"] = Array(np.full(64, math.nan if fault == "NaN" else math.inf, np.float32))
        elif fault == "wrong shape":
            arrays["0.bias"] = Array(np.zeros(63, np.float32))
        elif fault == "no examples":
            reply.content["metrics"] = MetricRecord({"num-examples": 0})
        elif fault == "another's name":
            reply.content["fedheal"]["client"] = "intruder" * 100
        elif fault == "error":
            failed = Message(Error(code=1, reason="RuntimeError: out of memory"), reply_to=reply)
            failed.metadata.__dict__["_src_node_id"] = node
            return [failed]
        return [reply, reply] if fault == "twice" else [reply]


def keep_reply(node: int, reply: Message) -> list[Message]:
    return [reply]


def draw_steps(generator: np.random.Generator, model: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return a step for each tensor. It pulls values towards zero, so that they stay small for ten thousand rounds."""
    steps = []
    for value in model.values():
        if value.is_floating_point():
            noise = torch.from_numpy(generator.standard_normal(tuple(value.shape), np.float32))
            steps.append(0.01 * noise - 0.05 * value)
        else:
            steps.append(torch.ones((), dtype=value.dtype))
    return steps


def evaluate(message: Message, context: Context) -> Message:
    accuracy = 0.5 + 0.01 * (int(str(context.node_config["name"])[-2:]) % DOMAINS)
    domain = str(context.node_config["domain"])
    return client.reply_evaluation(message, context, 10, {"accuracy": accuracy}, domain=domain)


class Soak:
    """The run, and the checks after every round."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.measurements, self.oracle, self.failures = Measurements(), SignOracle(), list[str]()
        self.grid = ChurningGrid(seed, self.oracle, self.measurements.events)
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier trial
        self.strategy = FedHEAL(
            tau=0.5,
            folder=folder,
            seed=seed,
            fraction_train=0.7,
            evaluate_every=10,
            wait_seconds=5.0,
            max_empty_rounds=None,
        )
        self.lines_end, self.began = 0, 0.0

    def execute(self, rounds: int) -> None:
        initial = ArrayRecord({key: Array(make_initial(key, shape)) for key, shape in SHAPES.items()})
        gc.collect()
        gc.freeze()  # so that later collections skip the objects of the imports
        self.began = time.process_time()
        self.grid.start_round(1)
        self.strategy.start(self.grid, initial, num_rounds=rounds, evaluate_fn=self.check_round)

    def check_round(self, number: int, arrays: ArrayRecord) -> None:
        """Check the round that has ended, and draw the next one. Flower calls this with the new model."""
        if number == 0:
            return
        measurements, record = self.measurements, self.strategy.history[-1]
        measurements.round_seconds.append(time.process_time() - self.began)
        counted = record.weights.keys() - record.report["skipped"].keys()
        if counted != self.grid.expected:
            self.failures.append(f"round {number}: {sorted(counted ^ self.grid.expected)} should not differ")
        if counted and abs(math.fsum(record.weights.values()) - 1) > 1e-12:
            self.failures.append(f"round {number}: the weights sum to {math.fsum(record.weights.values())!r}")
        if not all(np.isfinite(array.numpy()).all() for array in arrays.values()):
            self.failures.append(f"round {number}: the model is not finite")
        end = (self.folder / "rounds.jsonl").stat().st_size
        measurements.line_bytes.append(end - self.lines_end)
        self.lines_end = end
        if number % 10 == 0:
            gc.collect()
            measurements.memory[number] = read_memory()
            measurements.files[number] = sum(1 for path in self.folder.rglob("*"))
        self.grid.start_round(number + 1)
        self.began = time.process_time()

    def check_end(self, rounds: int) -> dict[str, bool]:
        """Return what must hold at the end, and whether it does."""
        measurements, settled = self.measurements, min(SETTLED, rounds // 2)
        group = min(GROUP, rounds // 4)
        # The first rounds compile kernels and meet sites for the first time.
        first, last = (
            statistics.median(measurements.round_seconds[part])
            for part in (slice(group // 10, group), slice(-group, None))
        )
        later = [size for number, size in measurements.memory.items() if number >= settled]
        file_counts = [count for number, count in measurements.files.items() if number >= settled]
        lines = [
            statistics.mean(measurements.line_bytes[part])
            for part in (slice(settled, settled + group), slice(-group, None))
        ]
        difference = self.oracle.find_difference(find_state(self.strategy.state))
        rounds_in_file = [json.loads(line)["round"] for line in (self.folder / "rounds.jsonl").open()]
        growth, slower = max(later) / later[0], last / first
        return {
            f"every round passed its checks ({'; '.join(self.failures[:3]) or 'no failure'})": not self.failures,
            f"memory: {later[0] / 1e6:.0f} MB after {settled} rounds, at most {max(later) / 1e6:.0f} MB later, "
            f"ratio {growth:.3f}": growth <= MEMORY,
            f"processor time of a round, median: {1e3 * first:.2f} ms in the first {group}, {1e3 * last:.2f} ms in the "
            f"last, ratio {slower:.2f}": slower <= SLOWER,
            f"files in the run folder: {min(file_counts)} to {max(file_counts)}": max(file_counts) <= 12,
            f"bytes of a round's line, mean: {lines[0]:.0f} and {lines[1]:.0f}": lines[1] <= LONGER * lines[0],
            "rounds.jsonl has every round once": rounds_in_file == list(range(1, rounds + 1)),
            f"participations and sign counts equal the oracle's ({difference or 'no difference'})": not difference,
        }


def make_initial(key: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.int64 if key.endswith("tracked") else np.float32)


def find_state(state: Any) -> ConsistencyState:
    """Return the sign counts within a state."""
    parts = [state]
    while parts:
        part = parts.pop()
        if isinstance(part, ConsistencyState):
            return part
        parts += part if isinstance(part, tuple) else vars(part).values() if isinstance(part, State) else ()
    raise LookupError("this state has no sign counts")


def read_memory() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def run_soak(rounds: int, seed: int, out: Path) -> dict[str, bool]:
    """Run the soak, write its page and numbers, and return the checks."""
    logging.getLogger("flwr").setLevel(logging.ERROR)  # of 10,000 rounds with faults
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    soak, began = Soak(seed, out / "run"), time.monotonic()
    soak.execute(rounds)
    checks, seconds = soak.check_end(rounds), time.monotonic() - began
    events = ", ".join(f"{kind} {count:,}" for kind, count in sorted(soak.measurements.events.items()))
    lines = [f"{rounds:,} rounds, seed {seed}, {seconds:.0f} s, {len(soak.oracle.n)} sites. Events: {events}.", ""]
    lines += [f"- {'yes' if passed else 'NO'}: {check}" for check, passed in checks.items()]
    (out / "soak.md").write_text("\n".join(lines) + "\n")
    summary = {"rounds": rounds, "seed": seed, "seconds": seconds, "checks": checks, "failures": soak.failures}
    (out / "soak.json").write_text(json.dumps(summary | vars(soak.measurements)) + "\n")
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=parse_positive, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=parse_folder, required=True)
    options = parser.parse_args()
    checks = run_soak(options.rounds, options.seed, options.out)
    print((options.out / "soak.md").read_text(), end="")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
