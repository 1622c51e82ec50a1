"""Time a round on a CPU in fedheal, pfl, Flower's simulation and a plain torch loop, on the same three tasks.

    python benchmarks/peers.py                                   # everything: about twenty minutes on 2 idle cores
    python benchmarks/peers.py --tasks few --launches 1          # one task, once
    python benchmarks/peers.py --peers fedheal,pfl,plain

Every peer trains the small network with FedAvg in two processes of one thread. A client trains one epoch in batches of 64. All
test images are evaluated after every round. Images are random bytes. Launches take turns, so other programs disturb all peers.

`s a round` is the median of the second half, when all processes have started. `start` is the time from the command to the end
of the first round. Processor time and memory are sums over the processes of a peer; shared pages count once. All peers run with
settings by which glibc keeps freed memory. fedheal's workers choose these settings themselves, other peers do not.

torchrun starts pfl, which evaluates in both processes. pfl does not shuffle its batches, and each process keeps its own running
means and variances. Flower evaluates in its server. Install the peers with `pip install pfl` and fedheal's extra `flower`: the
benchmark leaves out those that are missing. As root, each launch gets a network namespace with only loopback, where Ray starts.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from arguments import parse_names, parse_positive

HERE = Path(__file__).resolve()
PROCESSES = 2
BATCH, LR, MOMENTUM, DECAY = 64, 0.001, 0.9, 1e-5
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "OMP_NUM_THREADS": "1",
    "RAY_DEDUP_LOGS": "0",
    "FLWR_TELEMETRY_ENABLED": "0",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class Task:
    client_sizes: tuple[int, ...]  # images of a client, in each of four domains
    clients_per_domain: int
    cohort_size: int
    test_size: int  # images in each domain
    rounds: int

    @property
    def clients(self) -> int:
        return self.clients_per_domain * len(self.client_sizes)

    @property
    def description(self) -> str:
        images, test_images = self.clients_per_domain * sum(self.client_sizes), 4 * self.test_size
        return f"{self.clients} clients, {images} images, {self.cohort_size} clients a round, {test_images} test images"


TASKS = {
    "few": Task((600, 72, 732, 100), 5, 20, 1000, 8),
    "more": Task((38,) * 4, 50, 20, 100, 100),
    "many": Task((8,) * 4, 250, 10, 50, 300),
}


# What the peers share


def make_data(task: Task) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    """Return the images and labels of each client, the largest first, and of each domain's test set."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def make_split(size: int) -> tuple[Any, Any]:
        images = torch.randint(0, 256, (size, 3, 32, 32), dtype=torch.uint8, generator=generator)
        return images, torch.randint(0, 10, (size,), generator=generator)

    sizes = sorted(task.client_sizes, reverse=True)
    train = [make_split(size) for size in sizes for _ in range(task.clients_per_domain)]
    return train, [make_split(task.test_size) for _ in sizes]


def make_input(images: Any) -> Any:
    import torch

    from fedheal.data.augment import normalise_images

    return normalise_images(images.contiguous(memory_format=torch.channels_last))


def train_client(module: Any, images: Any, labels: Any) -> None:
    """Train one epoch in shuffled batches."""
    import torch
    from torch.nn import functional

    optimiser = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    module.train()
    for index in torch.split(torch.randperm(len(labels)), BATCH):
        optimiser.zero_grad()
        functional.cross_entropy(module(make_input(images[index])), labels[index]).backward()
        optimiser.step()


def count_correct(module: Any, tests: Sequence[tuple[Any, Any]]) -> int:
    import torch

    module.eval()
    with torch.no_grad():
        return sum(
            int((module(make_input(x)).argmax(1) == y).sum())
            for images, labels in tests
            for x, y in zip(images.split(BATCH), labels.split(BATCH), strict=True)
        )


def report_round() -> None:
    """Tell the parent when a round has ended."""
    print(f"round {time.time()}", flush=True)


def draw_cohort(task: Task, number: int) -> list[int]:
    """Return the clients of a round, the largest first."""
    import torch

    order = torch.randperm(task.clients, generator=torch.Generator().manual_seed(number))
    return sorted(order[: task.cohort_size].tolist())


# The peers


def run_fedheal(task: Task) -> None:
    import fedheal
    from fedheal.data.domains import Domain, Domains, Split

    train, tests = make_data(task)
    import torch

    class RoundReporter(fedheal.Callback):
        def round(self, record: Any) -> None:
            report_round()

    domains = []
    for i in range(len(task.client_sizes)):
        clients = train[i * task.clients_per_domain : (i + 1) * task.clients_per_domain]
        split = Split(torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients]))
        domains.append(Domain(f"d{i}", split, Split(*tests[i])))
    sizes = tuple(sorted(task.client_sizes, reverse=True))
    data = Domains("random", tuple("0123456789"), tuple(domains), (task.clients_per_domain,) * len(domains), sizes)
    experiment = fedheal.Experiment(
        method="fedavg",
        data=data,
        model="small_cnn",
        rounds=task.rounds,
        epochs=1,
        batch_size=BATCH,
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        participation=task.cohort_size / task.clients,
        augment="none",
        workers=PROCESSES,
        device="cpu",
    )
    fedheal.run(experiment, callbacks=[RoundReporter()], progress=False)


def run_plain(task: Task) -> None:
    import torch

    file = Path("/tmp") / f"peers-{uuid.uuid4().hex}"
    torch.multiprocessing.spawn(_plain_process, (task, str(file)), nprocs=PROCESSES)
    file.unlink(missing_ok=True)


def _plain_process(rank: int, task: Task, file: str) -> None:
    import torch
    from torch import distributed

    from fedheal.models import build

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=PROCESSES)
    train, tests = make_data(task)
    torch.manual_seed(0)
    module = build("small_cnn", classes=10)
    own_tests = [tests[i] for i in range(rank, len(tests), PROCESSES)]
    tensors = list(module.state_dict().values())
    for number in range(task.rounds):
        global_model = [tensor.clone() for tensor in tensors]
        cohort = draw_cohort(task, number)
        total = sum(len(train[client][1]) for client in cohort)
        update = torch.zeros(sum(tensor.numel() for tensor in tensors))
        for client in cohort[rank::PROCESSES]:
            for tensor, value in zip(tensors, global_model, strict=True):
                tensor.copy_(value)
            train_client(module, *train[client])
            steps = [(tensor - value).float() for tensor, value in zip(tensors, global_model, strict=True)]
            update += torch.cat([step.reshape(-1) for step in steps]) * (len(train[client][1]) / total)
        distributed.all_reduce(update)
        steps = update.split([tensor.numel() for tensor in tensors])
        for tensor, value, step in zip(tensors, global_model, steps, strict=True):
            tensor.copy_(value + step.reshape(value.shape))
        distributed.all_reduce(torch.tensor(count_correct(module, own_tests)))
        if rank == 0:
            report_round()
    distributed.destroy_process_group()


def run_pfl(task: Task) -> None:
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel
    from torch.nn import functional

    from fedheal.models.small_cnn import SmallCNN

    class Network(SmallCNN):
        def loss(self, x: Any, y: Any) -> Any:
            return functional.cross_entropy(self.train()(make_input(x)), y)

        @torch.no_grad()
        def metrics(self, x: Any, y: Any) -> dict[str, Any]:
            return {"accuracy": Weighted(int((self.eval()(make_input(x)).argmax(1) == y).sum()), len(y))}

    class RoundReporter(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            if os.environ["RANK"] == "0":
                report_round()
            return False, Metrics()

    def draw_clients() -> Iterator[int]:
        for number in range(1 << 30):
            yield from draw_cohort(task, number)

    train, tests = make_data(task)
    torch.manual_seed(0)
    network, clients = Network(10), draw_clients()
    central = torch.optim.SGD(network.parameters(), lr=1.0)
    model = PyTorchModel(network, lambda p, lr: torch.optim.SGD(p, lr, MOMENTUM, weight_decay=DECAY), central)
    users = FederatedDataset(lambda user: Dataset(raw_data=train[user], user_id=str(user)), lambda: next(clients))
    test_set = Dataset(raw_data=[torch.cat(part) for part in zip(*tests, strict=True)])
    evaluation = NNEvalHyperParams(local_batch_size=BATCH)
    FederatedAveraging().run(
        NNAlgorithmParams(
            task.rounds, evaluation_frequency=1 << 30, train_cohort_size=task.cohort_size, val_cohort_size=0
        ),
        SimulatedBackend(users, users, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        evaluation,
        [CentralEvaluationCallback(test_set, evaluation), RoundReporter()],
    )


def run_flower(task: Task) -> None:
    import torch
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from fedheal.models import build

    clients, server = ClientApp(), ServerApp()
    process_state: dict[str, Any] = {}  # a process runs many clients

    @clients.train()
    def train(message: Message, context: Context) -> Message:
        if not process_state:
            torch.set_num_threads(1)
            process_state["train"], process_state["module"] = make_data(task)[0], build("small_cnn", classes=10)
        module = process_state["module"]
        images, labels = process_state["train"][int(context.node_config["partition-id"])]
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train_client(module, images, labels)
        metrics = MetricRecord({"num-examples": len(labels)})
        return Message(RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics}), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(1)
        tests = make_data(task)[1]
        module = build("small_cnn", classes=10)

        def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
            module.load_state_dict(arrays.to_torch_state_dict())
            correct = count_correct(module, tests)
            if number:
                report_round()
            return MetricRecord({"correct": correct})

        strategy = FedAvg(
            fraction_train=task.cohort_size / task.clients,
            fraction_evaluate=0.0,
            min_train_nodes=1,
            min_evaluate_nodes=0,
            min_available_nodes=task.clients,
        )
        strategy.start(grid, ArrayRecord(module.state_dict()), num_rounds=task.rounds, evaluate_fn=evaluate)

    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": PROCESSES}}
    run_simulation(server, clients, task.clients, backend_config=resources)


@dataclass(frozen=True)
class Peer:
    name: str
    run: Callable[[Task], None]
    package: str = ""  # must be installed
    launcher: tuple[str, ...] = ()


TORCHRUN = ("-m", "torch.distributed.run", f"--nproc-per-node={PROCESSES}", "--master-addr=127.0.0.1")
PEERS = {
    "fedheal": Peer("fedheal", run_fedheal),
    "pfl": Peer("pfl-research", run_pfl, "pfl", (*TORCHRUN, "--master-port=29511")),
    "flower": Peer("Flower's simulation", run_flower, "flwr"),
    "plain": Peer("plain torch loop", run_plain),
}


# Measuring


@dataclass(frozen=True)
class Launch:
    """What one launch of a peer takes, in seconds and bytes."""

    start: float  # to the end of the first round
    round: float  # the median of the second half
    processor: float  # of all processes in a round
    memory: float


def measure_processes(token: str) -> tuple[int, float]:
    """Return the bytes and the processor seconds of all processes that have this token in their environment."""
    memory, seconds = 0, 0.0
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, StopIteration):
            if token.encode() in (path / "environ").read_bytes():
                lines = (path / "smaps_rollup").read_text().splitlines()
                memory += 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
                user, system = (path / "stat").read_text().rpartition(")")[2].split()[11:13]
                seconds += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return memory, seconds


def launch_peer(key: str, task: str, prefix: Sequence[str]) -> Launch:
    """Run a peer on a task, in the namespace that the prefix of the command enters."""
    token = f"PEERS_LAUNCH={uuid.uuid4().hex}"
    environment = os.environ | ENVIRONMENT | dict([token.split("=")])
    command = [*prefix, sys.executable, *PEERS[key].launcher, str(HERE), "--process", key, "--tasks", task]
    begin, rounds = time.time(), TASKS[task].rounds
    measurements = []
    with Path(os.devnull).open("w") as silent:
        log: Any = None if os.environ.get("PEERS_VERBOSE") else silent
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process:
            assert process.stdout is not None
            times = []
            for line in process.stdout:
                if "round " in line:
                    times.append(float(line.split("round ")[1].split()[0]))
                    if len(times) in (rounds // 2, rounds - 1):
                        measurements.append(measure_processes(token))
    if process.returncode or len(times) != rounds:
        raise SystemExit(f"{key} ended early on '{task}': run it with PEERS_VERBOSE=1 to see why")
    (_, before), (memory, after) = measurements
    seconds = statistics.median(b - a for a, b in pairwise(times[rounds // 2 - 1 :]))
    return Launch(times[0] - begin, seconds, (after - before) / (rounds - 1 - rounds // 2), memory)


@contextmanager
def open_namespace() -> Iterator[Sequence[str]]:
    """Yield the prefix of a command that runs in a namespace with only loopback; an empty one if this is not root."""
    sys.path.insert(0, str(HERE.parents[1] / "tests"))
    from loopback import loopback

    with loopback() if os.geteuid() == 0 else nullcontext([]) as prefix:
        yield prefix


def print_table(task: str, launches: dict[str, list[Launch]]) -> None:
    def compute_median(key: str, field: str) -> float:
        return statistics.median(getattr(launch, field) for launch in launches[key])

    base = "fedheal" if "fedheal" in launches else next(iter(launches))
    print(f"\n{TASKS[task].description}\n")
    print("| | s a round | fedheal takes | CPU s a round | start, s | memory, MB |\n|---|---|---|---|---|---|")
    for key in launches:
        seconds, processor, start, memory = (
            compute_median(key, field) for field in ("round", "processor", "start", "memory")
        )
        ratio = compute_median(base, "round") / seconds
        numbers = f"{seconds:.4f} | {ratio:.2f} x | {processor:.4f} | {start:.1f} | {memory / 1e6:.0f}"
        print(f"| {PEERS[key].name} | {numbers} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", type=parse_names(tuple(TASKS)), default=list(TASKS))
    parser.add_argument("--peers", type=parse_names(tuple(PEERS)), default=list(PEERS))
    parser.add_argument("--launches", type=parse_positive, default=3)
    parser.add_argument("--process", choices=PEERS, help=argparse.SUPPRESS)  # run this peer here, on one task
    options = parser.parse_args()
    if options.process:
        import torch

        torch.set_num_threads(1)
        PEERS[options.process].run(TASKS[options.tasks[0]])
        return
    missing = [key for key in options.peers if importlib.util.find_spec(PEERS[key].package or "torch") is None]
    keys = [key for key in options.peers if key not in missing]
    if not keys:
        parser.error(f"peers: {', '.join(missing)} cannot be imported; install what is missing, or choose others")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = ["torch", *(PEERS[key].package for key in keys if PEERS[key].package)]
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    print(
        f"{date.today()} {cores} cores, load {os.getloadavg()[0]:.1f}, {versions}, Python {platform.python_version()}"
    )
    for key in missing:
        print(f"{PEERS[key].name} is left out: '{PEERS[key].package}' is not installed.")
    for task in options.tasks:
        launches: dict[str, list[Launch]] = {key: [] for key in keys}
        for _ in range(options.launches):
            for key in keys:
                with open_namespace() as prefix:
                    launches[key].append(launch_peer(key, task, prefix))
        print_table(task, launches)


if __name__ == "__main__":
    main()
