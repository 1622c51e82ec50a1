"""Seconds a round with actors of a Ray cluster, in two processes, and one client after another; and what travels.

    python benchmarks/over_machines.py
    python benchmarks/over_machines.py --tasks thin --rounds 40

It starts a Ray cluster of two nodes on this machine. Ray looks for addresses on the network; to keep it from that, run this in
a namespace that has loopback alone (`ip netns exec NAME python benchmarks/over_machines.py`). All ways are open in one process
and take turns round by round, so that whatever else the machine does hits all of them. Seconds are those of the fastest round,
which other programs disturb least. CPU seconds are means over rounds, of all processes together. In the first round, which is
apart, workers start and examples travel. The last table is an estimate.
"""

from __future__ import annotations

import argparse
import os
import statistics
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from arguments import exit_with_error, parse_positive
from fedheal.engine.ray_actors import ActorPool
from fedheal.engine.ray_cluster import connect_to_cluster, import_ray
from fedheal.engine.serial import SerialEngine
from fedheal.engine.workers import WorkerPool
from fedheal.simulate.build import build_federation
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.federation import Federation
from fedheal.simulate.round import initial_state, run_round
from simulate import PROTOCOLS, Protocol, load_domains
from simulate_cpu import HERE

TASKS = {
    "small": PROTOCOLS["small"],
    "thin": Protocol(
        32,
        dict.fromkeys(("mnist", "usps", "svhn", "syn"), (8, 50)),
        5,
        {"model": "small_cnn", "epochs": 1, "batch_size": 8},
    ),
    "resnet10": HERE["resnet10"],
}
WAYS = {
    "one after another": lambda ray, training, tests: SerialEngine(training),
    "2 processes": lambda ray, training, tests: WorkerPool(training, 2, 1, tests),
    "1 actor": lambda ray, training, tests: ActorPool(ray, training, 1, 1, tests),
    "2 actors on 2 nodes": lambda ray, training, tests: ActorPool(ray, training, 2, 1, tests),
}
STORE = 200 << 20  # bytes of shared memory a node


@dataclass(frozen=True)
class Timed:
    """How long a way takes: the fastest round, its CPU time and the first round, in seconds."""

    way: str
    train: float
    evaluate: float
    total: float
    cpu: float
    first: float


def time_ways(protocol: Protocol, rounds: int) -> tuple[Federation, list[Timed]]:
    """Return the federation, and how long each way takes for a round."""
    import_ray()
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=2, object_store_memory=STORE)
    experiment = Experiment.of({"method": "fedavg", "device": "cpu", **protocol.keys})
    seconds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    with connect_to_cluster(cluster.address) as ray, ExitStack() as stack:
        ways = {}
        for way, make in WAYS.items():
            federation = build_federation(experiment, load_domains(protocol), torch.device("cpu"))
            engine = make(ray, federation.local_training, list(federation.tests.values()))
            opened = engine if isinstance(engine, SerialEngine) else stack.enter_context(engine)
            ways[way] = (federation, initial_state(federation), opened)
        for _ in range(rounds + 1):
            for way, (federation, state, opened) in ways.items():
                before = measure_cpu()
                after, record = run_round(federation, state, opened)
                ways[way] = (federation, after, opened)
                cpu[way].append(measure_cpu() - before)
                seconds[way].append(record.seconds)
    cluster.shutdown()
    models = [state.model.params for _, state, _ in ways.values()]
    if not all(torch.equal(model, models[0]) for model in models):
        raise RuntimeError("the ways do not have the same bits")

    timed = []
    for way, (first, *rest) in seconds.items():
        best = min(rest, key=lambda record: sum(record.values()))
        mean = statistics.fmean(cpu[way][1:])
        timed.append(Timed(way, best["train"], best["evaluate"], sum(best.values()), mean, sum(first.values())))
    return federation, timed


def measure_cpu() -> float:
    """Return the CPU seconds of this process and of all that it started."""
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


def count_bytes(federation: Federation) -> int:
    """Return the bytes of a model."""
    model = initial_state(federation).model
    return sum(vector.nbytes for vector in (model.params, model.buffers, model.counters))


def estimate(federation: Federation, timed: dict[str, Timed], workers: int, gigabits: float) -> float:
    """Return the seconds of a round with so many workers on idle machines, behind one link of this process.

    Training and evaluation are shared out. All CPU time that an actor adds counts as this process's, and is not. Updates come
    back through its link one after another.
    """
    alone, actor = timed["one after another"].cpu, timed["1 actor"].cpu
    clients = len(federation.clients)
    moved = count_bytes(federation) * (clients + 2 * workers)  # updates, and the model to train and to evaluate
    return alone / min(workers, clients) + max(0.0, actor - alone) + moved * 8 / (gigabits * 1e9)


def show(name: str, rounds: int) -> None:
    federation, every = time_ways(TASKS[name], rounds)
    timed = {one.way: one for one in every}
    model = count_bytes(federation)
    images = sum(len(split) for split in federation.local_training.examples.values())
    alone, actor = timed["one after another"], timed["1 actor"]
    per_client = 1e3 * (actor.cpu - alone.cpu) / len(federation.clients)
    print(f"\n{name}: {len(federation.clients)} clients, {images} images, {model / 1e6:.2f} MB a model\n")
    print("| way | train | evaluate | s a round | CPU s a round | first round |\n|---|---|---|---|---|---|")
    for one in every:
        print(
            f"| {one.way} | {one.train:.3f} | {one.evaluate:.3f} | {one.total:.3f} | {one.cpu:.3f} | {one.first:.1f} |"
        )
    print(
        f"\nAn actor adds {per_client:.1f} ms of CPU time a client. {model * len(federation.clients) / 1e6:.0f} MB come back.\n"
    )
    print("| estimate: workers | 1 Gbit/s | 10 Gbit/s |\n|---|---|---|")
    for workers in (2, 4, 8, 16):
        print(
            f"| {workers} | " + " | ".join(f"{estimate(federation, timed, workers, g):.2f} s" for g in (1, 10)) + " |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--rounds", type=parse_positive, default=12)
    asked = parser.parse_args()
    if any(name not in TASKS for name in asked.tasks.split(",")):
        exit_with_error(f"tasks = {asked.tasks}: use {', '.join(TASKS)}")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # as other processes; Ray's default is 15
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name in asked.tasks.split(","):
        show(name, asked.rounds)


if __name__ == "__main__":
    main()
