"""Time a round of a Ray cluster's actors, of two processes, and of one client after another; and count the bytes that travel.

    python benchmarks/over_machines.py
    python benchmarks/over_machines.py --tasks thin --rounds 40

The benchmark starts a Ray cluster of two nodes on this machine. Ray looks for addresses on the network. To prevent that, use a
namespace that has only loopback (`ip netns exec NAME python benchmarks/over_machines.py`).

All ways run in one process and take turns round by round, so other programs disturb all of them. Seconds are those of the
fastest round, which other programs disturb least. CPU seconds are means over rounds, of all processes together. In the first
round workers start and examples travel: it has its own column. The last table is an estimate.
"""

from __future__ import annotations

import argparse
import os
import statistics
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from arguments import exit_with_error, parse_positive, require_ray
from fedheal.engine.ray_actors import ActorPool
from fedheal.engine.ray_cluster import connect_to_cluster
from fedheal.engine.serial import SerialEngine
from fedheal.engine.workers import WorkerPool
from fedheal.simulate.build import build_federation
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.federation import Federation
from fedheal.simulate.round import initial_state, run_round
from simulate import PROTOCOLS, Protocol, make_domains
from simulate_cpu import CPU_PROTOCOLS

TASKS = {
    "small": PROTOCOLS["small"],
    "thin": Protocol(
        32,
        dict.fromkeys(("mnist", "usps", "svhn", "syn"), (8, 50)),
        5,
        {"model": "small_cnn", "epochs": 1, "batch_size": 8},
    ),
    "resnet10": CPU_PROTOCOLS["resnet10"],
}
WAYS = {
    "one after another": lambda ray, training, tests: SerialEngine(training),
    "2 processes": lambda ray, training, tests: WorkerPool(training, 2, 1, tests),
    "1 actor": lambda ray, training, tests: ActorPool(ray, training, 1, 1, tests),
    "2 actors on 2 nodes": lambda ray, training, tests: ActorPool(ray, training, 2, 1, tests),
}
STORE_BYTES = 200 << 20  # shared memory of a node


@dataclass(frozen=True)
class WayTimes:
    """Seconds of a way: its fastest round, the mean CPU time of a round, and the first round."""

    way: str
    train: float
    evaluate: float
    total: float
    cpu: float
    first: float


def time_ways(protocol: Protocol, rounds: int) -> tuple[Federation, list[WayTimes]]:
    """Return the federation, and the times of each way."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    experiment = Experiment.of({"method": "fedavg", "device": "cpu", **protocol.fields})
    seconds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    with connect_to_cluster(cluster.address) as ray, ExitStack() as stack:
        ways = {}
        for way, open_engine in WAYS.items():
            federation = build_federation(experiment, make_domains(protocol), torch.device("cpu"))
            engine = open_engine(ray, federation.local_training, list(federation.tests.values()))
            if not isinstance(engine, SerialEngine):
                engine = stack.enter_context(engine)
            ways[way] = (federation, initial_state(federation), engine)
        for _ in range(rounds + 1):
            for way, (federation, state, engine) in ways.items():
                cpu_before = measure_cpu()
                next_state, record = run_round(federation, state, engine)
                ways[way] = (federation, next_state, engine)
                cpu[way].append(measure_cpu() - cpu_before)
                seconds[way].append(record.seconds)
    cluster.shutdown()
    models = [state.model.params for _, state, _ in ways.values()]
    if not all(torch.equal(model, models[0]) for model in models):
        raise RuntimeError("the models of the ways differ")

    times = []
    for way, (first, *later) in seconds.items():
        best = min(later, key=lambda record: sum(record.values()))
        mean_cpu = statistics.fmean(cpu[way][1:])
        times.append(WayTimes(way, best["train"], best["evaluate"], sum(best.values()), mean_cpu, sum(first.values())))
    return federation, times


def measure_cpu() -> float:
    """Return the CPU seconds of this process and of all its descendants."""
    parents, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            used[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    total = 0
    for process in used:
        ancestor = process
        while ancestor not in (0, os.getpid()):
            ancestor = parents.get(ancestor, 0)
        total += used[process] if ancestor else 0
    return total / os.sysconf("SC_CLK_TCK")


def count_model_bytes(federation: Federation) -> int:
    """Return the bytes of a model."""
    model = initial_state(federation).model
    return sum(vector.nbytes for vector in (model.params, model.buffers, model.counters))


def estimate_round(federation: Federation, times: dict[str, WayTimes], workers: int, gigabits: float) -> float:
    """Return the estimated seconds of a round with so many workers on idle machines, which share one link.

    Workers share training and evaluation. The CPU time that an actor adds counts in full, though the actor bears a part of it.
    Updates come back through the link one after another.
    """
    serial, actor = times["one after another"].cpu, times["1 actor"].cpu
    clients = len(federation.clients)
    # The updates, and for every worker the model to train and to evaluate.
    moved_bytes = count_model_bytes(federation) * (clients + 2 * workers)
    return serial / min(workers, clients) + max(0.0, actor - serial) + moved_bytes * 8 / (gigabits * 1e9)


def print_tables(task: str, rounds: int) -> None:
    """Time the ways on a task; print their times and the estimate."""
    federation, rows = time_ways(TASKS[task], rounds)
    times = {row.way: row for row in rows}
    clients, model_bytes = len(federation.clients), count_model_bytes(federation)
    images = sum(len(split) for split in federation.local_training.examples.values())
    added_ms = 1e3 * (times["1 actor"].cpu - times["one after another"].cpu) / clients
    print(f"\n{task}: {clients} clients, {images} images, {model_bytes / 1e6:.2f} MB a model\n")
    print("| way | train | evaluate | s a round | CPU s a round | first round |\n|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.way} | {row.train:.3f} | {row.evaluate:.3f} | {row.total:.3f} | {row.cpu:.3f} | {row.first:.1f} |"
        )
    print(f"\nAn actor adds {added_ms:.1f} ms of CPU time a client. {model_bytes * clients / 1e6:.0f} MB come back.\n")
    print("| estimate: workers | 1 Gbit/s | 10 Gbit/s |\n|---|---|---|")
    for workers in (2, 4, 8, 16):
        cells = [f"{estimate_round(federation, times, workers, gigabits):.2f} s" for gigabits in (1, 10)]
        print(f"| {workers} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--rounds", type=parse_positive, default=12)
    options = parser.parse_args()
    if any(name not in TASKS for name in options.tasks.split(",")):
        exit_with_error(f"tasks = {options.tasks}: use {', '.join(TASKS)}")
    require_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the priority of other processes; Ray's default is 15
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name in options.tasks.split(","):
        print_tables(name, options.rounds)


if __name__ == "__main__":
    main()
