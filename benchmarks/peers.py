"""Seconds a round on a CPU: fedheal, pfl, Flower's simulation and a plain torch loop, on the same three tasks.

    python benchmarks/peers.py                                   # everything, less than ten minutes on 2 idle cores
    python benchmarks/peers.py --tasks few --launches 1          # one task, once
    python benchmarks/peers.py --peers fedheal,pfl,plain

Every peer trains the small network with FedAvg in two processes of one thread: batches of 64, one epoch, and an evaluation of
all test images after every round. Images are random bytes. Launches take turns, so that whatever else the machine does hits
all peers. A round is the median of the second half, when all processes have started; `start` is the time from the command to
the end of the first round; processor time and memory are sums over a peer's processes, shared pages counted once. glibc keeps
freed memory in all of them, which fedheal's workers ask for themselves and others do not.

pfl is started by torchrun and evaluates in both processes. Its batches are not shuffled, and running means and variances stay
with each process. Flower evaluates in its server. Needs `pip install pfl` and fedheal's `flower` extra; a peer that is not
installed is left out. As root, each launch has a network namespace with nothing but loopback, where Ray starts.
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

from arguments import parse_positive

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
class Workload:
    sizes: tuple[int, ...]  # images of a client, in each of four domains
    clients: int  # in each domain
    cohort: int  # clients in a round
    test: int  # images in each domain
    rounds: int

    @property
    def about(self) -> str:
        total, clients = self.clients * sum(self.sizes), self.clients * len(self.sizes)
        return f"{clients} clients, {total} images, {self.cohort} clients a round, {4 * self.test} test images"


TASKS = {
    "few": Workload((600, 72, 732, 100), 5, 20, 1000, 8),
    "more": Workload((38,) * 4, 50, 20, 100, 100),
    "many": Workload((8,) * 4, 250, 10, 50, 300),
}


# What the peers share


def load(task: Workload) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    """Images and labels of each client, the largest first, and of each domain's test set."""
    import torch

    chance = torch.Generator().manual_seed(0)

    def split(size: int) -> tuple[Any, Any]:
        images = torch.randint(0, 256, (size, 3, 32, 32), dtype=torch.uint8, generator=chance)
        return images, torch.randint(0, 10, (size,), generator=chance)

    train = [split(size) for size in sorted(task.sizes, reverse=True) for _ in range(task.clients)]
    return train, [split(task.test) for _ in task.sizes]


def make_input(images: Any) -> Any:
    import torch

    from fedheal.data.augment import normalise_images

    return normalise_images(images.contiguous(memory_format=torch.channels_last))


def train_client(module: Any, images: Any, labels: Any) -> None:
    """One epoch in shuffled batches."""
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


def tell_round() -> None:
    print(f"round {time.time()}", flush=True)


def sample(task: Workload, number: int) -> list[int]:
    """The clients of a round, the largest first."""
    import torch

    order = torch.randperm(task.clients * len(task.sizes), generator=torch.Generator().manual_seed(number))
    return sorted(order[: task.cohort].tolist())


# The peers


def run_fedheal(task: Workload) -> None:
    import fedheal
    from fedheal.data.domains import Domain, Domains, Split

    train, tests = load(task)
    import torch

    class Told(fedheal.Callback):
        def round(self, record: Any) -> None:
            tell_round()

    domains = []
    for i in range(len(task.sizes)):
        mine = train[i * task.clients : (i + 1) * task.clients]
        joined = Split(torch.cat([x for x, _ in mine]), torch.cat([y for _, y in mine]))
        domains.append(Domain(f"d{i}", joined, Split(*tests[i])))
    sizes = tuple(sorted(task.sizes, reverse=True))
    data = Domains("random", tuple("0123456789"), tuple(domains), (task.clients,) * len(domains), sizes)
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
        participation=task.cohort / (task.clients * len(sizes)),
        augment="none",
        workers=PROCESSES,
        device="cpu",
    )
    fedheal.run(experiment, callbacks=[Told()], progress=False)


def run_plain(task: Workload) -> None:
    import torch

    file = Path("/tmp") / f"peers-{uuid.uuid4().hex}"
    torch.multiprocessing.spawn(_plain_process, (task, str(file)), nprocs=PROCESSES)
    file.unlink(missing_ok=True)


def _plain_process(rank: int, task: Workload, file: str) -> None:
    import torch
    from torch import distributed

    from fedheal.models import build

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=PROCESSES)
    train, tests = load(task)
    torch.manual_seed(0)
    module = build("small_cnn", classes=10)
    mine = [tests[i] for i in range(rank, len(tests), PROCESSES)]
    tensors = list(module.state_dict().values())
    for number in range(task.rounds):
        start = [tensor.clone() for tensor in tensors]
        cohort = sample(task, number)
        total = sum(len(train[client][1]) for client in cohort)
        summed = torch.zeros(sum(tensor.numel() for tensor in tensors))
        for client in cohort[rank::PROCESSES]:
            for tensor, value in zip(tensors, start, strict=True):
                tensor.copy_(value)
            train_client(module, *train[client])
            flat = torch.cat([(t - s).float().reshape(-1) for t, s in zip(tensors, start, strict=True)])
            summed += flat * (len(train[client][1]) / total)
        distributed.all_reduce(summed)
        for tensor, value, part in zip(
            tensors, start, summed.split([tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(value + part.reshape(value.shape))
        distributed.all_reduce(torch.tensor(count_correct(module, mine)))
        if rank == 0:
            tell_round()
    distributed.destroy_process_group()


def run_pfl(task: Workload) -> None:
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

    class Told(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            if os.environ["RANK"] == "0":
                tell_round()
            return False, Metrics()

    def draw() -> Iterator[int]:
        for number in range(1 << 30):
            yield from sample(task, number)

    train, tests = load(task)
    torch.manual_seed(0)
    network, drawn = Network(10), draw()
    central = torch.optim.SGD(network.parameters(), lr=1.0)
    model = PyTorchModel(network, lambda p, lr: torch.optim.SGD(p, lr, MOMENTUM, weight_decay=DECAY), central)
    users = FederatedDataset(lambda user: Dataset(raw_data=train[user], user_id=str(user)), lambda: next(drawn))
    whole = Dataset(raw_data=[torch.cat(part) for part in zip(*tests, strict=True)])
    evaluation = NNEvalHyperParams(local_batch_size=BATCH)
    FederatedAveraging().run(
        NNAlgorithmParams(task.rounds, evaluation_frequency=1 << 30, train_cohort_size=task.cohort, val_cohort_size=0),
        SimulatedBackend(users, users, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        evaluation,
        [CentralEvaluationCallback(whole, evaluation), Told()],
    )


def run_flower(task: Workload) -> None:
    import torch
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from fedheal.models import build

    clients, server = ClientApp(), ServerApp()
    kept: dict[str, Any] = {}  # a process runs many clients

    @clients.train()
    def train(message: Message, context: Context) -> Message:
        if not kept:
            torch.set_num_threads(1)
            kept["train"], kept["module"] = load(task)[0], build("small_cnn", classes=10)
        module, (images, labels) = kept["module"], kept["train"][int(context.node_config["partition-id"])]
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train_client(module, images, labels)
        metrics = MetricRecord({"num-examples": len(labels)})
        return Message(RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics}), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(1)
        tests = load(task)[1]
        module = build("small_cnn", classes=10)

        def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
            module.load_state_dict(arrays.to_torch_state_dict())
            correct = count_correct(module, tests)
            if number:
                tell_round()
            return MetricRecord({"correct": correct})

        nodes = task.clients * len(task.sizes)
        strategy = FedAvg(
            fraction_train=task.cohort / nodes,
            fraction_evaluate=0.0,
            min_train_nodes=1,
            min_evaluate_nodes=0,
            min_available_nodes=nodes,
        )
        strategy.start(grid, ArrayRecord(module.state_dict()), num_rounds=task.rounds, evaluate_fn=evaluate)

    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": PROCESSES}}
    run_simulation(server, clients, task.clients * len(task.sizes), backend_config=resources)


@dataclass(frozen=True)
class Peer:
    name: str
    run: Callable[[Workload], None]
    package: str = ""  # that has to be installed
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
    start: float  # seconds to the end of the first round
    round: float  # the median of the second half
    processor: float  # seconds of all processes in a round
    memory: float  # bytes


def measure_processes(token: str) -> tuple[int, float]:
    """Bytes and seconds of processor time of all processes that were started with this token in their environment."""
    memory, seconds = 0, 0.0
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, StopIteration):
            if token.encode() in (path / "environ").read_bytes():
                lines = (path / "smaps_rollup").read_text().splitlines()
                memory += 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
                user, system = (path / "stat").read_text().rpartition(")")[2].split()[11:13]
                seconds += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return memory, seconds


def launch(key: str, name: str, inside: Sequence[str]) -> Launch:
    token = f"PEERS_LAUNCH={uuid.uuid4().hex}"
    environment = os.environ | ENVIRONMENT | dict([token.split("=")])
    words = [*inside, sys.executable, *PEERS[key].launcher, str(HERE), "--process", key, "--tasks", name]
    begin, rounds = time.time(), TASKS[name].rounds
    sampled = []
    with Path(os.devnull).open("w") as silent:
        log: Any = None if os.environ.get("PEERS_VERBOSE") else silent
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process:
            assert process.stdout is not None
            times = []
            for line in process.stdout:
                if "round " in line:
                    times.append(float(line.split("round ")[1].split()[0]))
                    if len(times) in (rounds // 2, rounds - 1):
                        sampled.append(measure_processes(token))
    if process.returncode or len(times) != rounds:
        raise SystemExit(f"{key} ended early on '{name}': run it with PEERS_VERBOSE=1 to see why")
    (_, before), (memory, after) = sampled
    seconds = statistics.median(b - a for a, b in pairwise(times[rounds // 2 - 1 :]))
    return Launch(times[0] - begin, seconds, (after - before) / (rounds - 1 - rounds // 2), memory)


@contextmanager
def open_namespace() -> Iterator[Sequence[str]]:
    sys.path.insert(0, str(HERE.parents[1] / "tests"))
    from loopback import loopback

    with loopback() if os.geteuid() == 0 else nullcontext([]) as inside:
        yield inside


def print_table(name: str, launches: dict[str, list[Launch]]) -> None:
    def middle(key: str, what: str) -> float:
        return statistics.median(getattr(one, what) for one in launches[key])

    base = "fedheal" if "fedheal" in launches else next(iter(launches))
    print(f"\n{TASKS[name].about}\n")
    print("| | s a round | fedheal takes | CPU s a round | start, s | memory, MB |\n|---|---|---|---|---|---|")
    for key in launches:
        ratio = f"{middle(base, 'round') / middle(key, 'round'):.2f} x"
        times = f"{middle(key, 'round'):.4f} | {ratio} | {middle(key, 'processor'):.4f} | {middle(key, 'start'):.1f}"
        numbers = f"{times} | {middle(key, 'memory') / 1e6:.0f}"
        print(f"| {PEERS[key].name} | {numbers} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--launches", type=parse_positive, default=3)
    parser.add_argument("--process", choices=PEERS, help=argparse.SUPPRESS)  # in a process of its own
    asked = parser.parse_args()
    for what, known in (("tasks", TASKS), ("peers", PEERS)):
        if unknown := [word for word in getattr(asked, what).split(",") if word not in known]:
            parser.error(f"{what}: there is no {unknown[0]!r}; use some of {','.join(known)}")
    if asked.process:
        import torch

        torch.set_num_threads(1)
        PEERS[asked.process].run(TASKS[asked.tasks])
        return
    keys = asked.peers.split(",")
    missing = [key for key in keys if importlib.util.find_spec(PEERS[key].package or "torch") is None]
    keys = [key for key in keys if key not in missing]
    if not keys:
        parser.error(f"peers: {', '.join(missing)} cannot be imported; install what is missing, or choose others")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    libraries = ["torch", *(PEERS[key].package for key in keys if PEERS[key].package)]
    about = ", ".join(f"{name} {version(name)}" for name in libraries)
    print(f"{date.today()} {cores} cores, load {os.getloadavg()[0]:.1f}, {about}, Python {platform.python_version()}")
    for key in missing:
        print(f"{PEERS[key].name} is left out: '{PEERS[key].package}' is not installed.")
    for name in asked.tasks.split(","):
        launches: dict[str, list[Launch]] = {key: [] for key in keys}
        for _ in range(asked.launches):
            for key in keys:
                with open_namespace() as inside:
                    launches[key].append(launch(key, name, inside))
        print_table(name, launches)


if __name__ == "__main__":
    main()
