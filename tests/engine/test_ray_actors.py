"""How the engine on a Ray cluster gives out work and survives losses. The cluster is made up; tests/faults has a real one."""

from __future__ import annotations

import io
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from torch import nn

from fedheal import methods
from fedheal.engine import ray_trainer
from fedheal.engine.ray_actors import MOST_LOSSES, ActorPool
from fedheal.engine.ray_cluster import connect_to_cluster
from fedheal.engine.ray_trainer import Host, Trainer
from fedheal.engine.serial import SerialEngine, Task
from fedheal.simulate.federation import Federation
from fedheal.simulate.round import initial_state, run_round
from tiny_runs import make_federation


@dataclass
class FakeRay:
    """The part of Ray that the engine uses; calls end in random order, and some of them, by number, with their actor."""

    cpus: Sequence[int] = (1, 1)
    lost: Callable[[str, int], bool] = lambda method, number: False
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    calls: Counter[str] = field(default_factory=Counter)
    stored: dict[Any, Any] = field(default_factory=dict)
    fetched: Counter[Any] = field(default_factory=Counter)
    actors: list[Any] = field(default_factory=list)
    killed: list[Any] = field(default_factory=list)
    exceptions = ray.exceptions
    cloudpickle = ray.cloudpickle

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": float(number)}} for number in self.cpus]

    def put(self, value: Any) -> object:
        reference = object()
        self.stored[reference] = value
        return reference

    def get(self, reference: Any) -> Any:
        value = self.stored[reference]
        self.fetched[reference] += 1
        return value() if callable(value) else value

    def wait(self, references: list[Any], num_returns: int, timeout: float | None) -> tuple[list[Any], list[Any]]:
        return [self.chance.choice(references)], []

    def kill(self, handle: Any) -> None:
        self.killed.append(handle)

    def remote(self, kind: type) -> Any:
        def make() -> Any:
            actor, dead = kind(), []
            self.actors.append(actor)

            def call(method: str, *arguments: Any) -> Any:
                number = self.calls[method]
                self.calls[method] += 1

                def work() -> Any:
                    if dead or self.lost(method, number):
                        dead.append(True)
                        raise ray.exceptions.RayActorError(error_msg="The node ran low on memory.")
                    return getattr(actor, method)(*arguments)

                return self.put(work)

            handle = {name: SimpleNamespace(remote=lambda *a, m=name: call(m, *a)) for name in ("set_up", "work")}
            return SimpleNamespace(**handle)

        return SimpleNamespace(options=lambda **resources: SimpleNamespace(remote=make))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake_ray = FakeRay()
    monkeypatch.setattr(ray, "get", fake_ray.get)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    monkeypatch.setattr(ray_trainer, "keep_freed_memory", lambda: None)
    return fake_ray


def open_pool(cluster: FakeRay, federation: Federation, workers: int = 0) -> ActorPool:
    evaluated = [*federation.tests.values(), *federation.validation.values()]
    return ActorPool(cluster, federation.local_training, workers, torch.get_num_threads(), evaluated)


def run_rounds(federation: Federation, engine: Any, rounds: int = 2) -> tuple[dict[str, torch.Tensor], list[Any]]:
    state, records = initial_state(federation), []
    for _ in range(rounds):
        state, record = run_round(federation, state, engine)
        records.append(record.model_dump(exclude={"seconds"}))
    return dict(state.to_arrays()[0]), records


QUICK_CHECK = ("fedavg", "scaffold", "ditto")  # without memory, with it on both sides, with a model of each client
ALL_METHODS = [*methods.LOCAL, *methods.WHOLE]


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in QUICK_CHECK else pytest.mark.slow) for name in ALL_METHODS]
)
def test_every_method_has_the_bits_of_the_serial_engine_though_actors_are_lost(cluster: FakeRay, method: str) -> None:
    """Clients' slots are sent with their tasks, so that they are not lost with an actor."""
    keys = {"method": method, "model": "tiny_data:slow", "validation": 0.25, "lr": 0.02}
    federation = make_federation(**keys)
    expected = run_rounds(federation, SerialEngine(federation.local_training))
    cluster.lost = lambda name, number: name == "work" and number % 7 == 5
    cluster.cpus = (torch.get_num_threads(),) * 2
    federation = make_federation(**keys)  # with the initial values again
    with open_pool(cluster, federation) as engine:
        arrays, records = run_rounds(federation, engine)
    assert len(cluster.actors) > 2
    assert len(cluster.killed) == len(cluster.actors)
    assert records == expected[1]
    assert arrays.keys() == expected[0].keys()
    assert all(torch.equal(value, expected[0][name]) for name, value in arrays.items())


def test_examples_travel_once_to_an_actor_and_the_model_once_a_round(cluster: FakeRay) -> None:
    federation = make_federation()
    rounds = 4
    with open_pool(cluster, federation) as engine:
        run_rounds(federation, engine, rounds)
        placed = [cluster.fetched[reference] for reference in engine.data.values()]
        common = [
            count
            for reference, count in cluster.fetched.items()
            if type(cluster.stored[reference]).__name__ == "Parcel"
        ]
    clients, splits = len(federation.clients), len(federation.tests)
    assert len(placed) == clients + splits
    assert max(placed) <= 2  # there are two actors
    assert sum(common) - sum(placed) <= 2 * 2 * rounds  # to train and to evaluate, to each actor


def test_clients_stay_with_the_actor_that_has_their_examples(cluster: FakeRay) -> None:
    federation = make_federation(steps=1)
    model, tasks = initial_state(federation).model, [Task(client, 1) for client in federation.clients]
    with open_pool(cluster, federation) as engine:
        for _ in range(5):
            assert [r.reply.client for r in engine.train(model, (), tasks)] == [task.client for task in tasks]
        homes = {client: actor for client, actor in engine.homes.items() if isinstance(client, str)}
        assert homes.keys() == set(federation.clients)
        assert len(set(map(id, homes.values()))) == 2


@pytest.mark.parametrize("error", [OSError("Broken pipe"), ray.exceptions.RaySystemError("lost")])
def test_a_worker_that_cannot_fetch_is_lost(cluster: FakeRay, monkeypatch, caplog, error: Exception) -> None:
    """A worker may live for a while after the machine's own process of the cluster was killed."""
    federation = make_federation()
    expected, _ = run_rounds(federation, SerialEngine(federation.local_training))
    cluster.cpus = (torch.get_num_threads(),) * 2
    fetches = 0

    def fetch(reference: Any) -> Any:
        nonlocal fetches
        fetches += 1
        if fetches == 5:
            raise error
        return cluster.get(reference)

    monkeypatch.setattr(ray, "get", fetch)
    federation = make_federation()
    with open_pool(cluster, federation) as engine:
        arrays, _ = run_rounds(federation, engine)
    assert len(cluster.actors) == 3
    assert "a worker on 10.0.0.7 was lost while training client '" in caplog.text
    assert all(torch.equal(value, expected[name]) for name, value in arrays.items())


def test_a_client_that_ends_every_worker_ends_the_run_with_its_name(cluster: FakeRay) -> None:
    federation = make_federation()
    cluster.lost = lambda name, number: name == "work"
    model = initial_state(federation).model
    message = (
        rf"{MOST_LOSSES} workers of the Ray cluster were lost while training client 'dark-0', perhaps for lack of memory.*"
        r"\(The node ran low on memory\.\).*--resume"
    )
    with open_pool(cluster, federation) as engine, pytest.raises(ChildProcessError, match=message):
        list(engine.train(model, (), [Task("dark-0", 1)]))
    assert len(cluster.killed) == len(cluster.actors)


def test_workers_that_cannot_start_end_the_run(cluster: FakeRay) -> None:
    federation = make_federation()
    cluster.lost = lambda name, number: name == "set_up"
    with open_pool(cluster, federation) as engine, pytest.raises(ChildProcessError, match="were lost while starting"):
        run_rounds(federation, engine)


def test_the_run_goes_on_with_the_workers_that_are_left(cluster: FakeRay, caplog) -> None:
    federation = make_federation()
    cluster.lost = lambda name, number: (name, number) == ("work", 1) or (name == "set_up" and number >= 2)
    with open_pool(cluster, federation) as engine:
        run_rounds(federation, engine, 3)
        assert (engine.number, len(engine.actors)) == (1, 1)
    assert "a worker on 10.0.0.7 was lost while training client 'plain-" in caplog.text
    assert "a worker cannot be replaced (The node ran low on memory.): going on with 1" in caplog.text


def test_a_full_store_says_how_to_enlarge_it(cluster: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(value: Any) -> None:
        raise ray.exceptions.ObjectStoreFullError("full")

    monkeypatch.setattr(cluster, "put", put)
    with pytest.raises(OSError, match=r"no room for the run's data .*--object-store-memory"):
        open_pool(cluster, make_federation())


def test_a_module_that_a_machine_lacks_is_a_sentence(cluster: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool(cluster, federation := make_federation(model="tiny_data:slow")) as engine:
        monkeypatch.delattr("tiny_data.Slow")
        message = r"^machine 10\.0\.0\.7 of the Ray cluster cannot load .*Slow.*: install their modules there$"
        with pytest.raises(ValueError, match=message) as raised:
            run_rounds(federation, engine)
    assert not hasattr(raised.value, "__notes__")


def test_a_cluster_that_is_busy_ends_the_run(cluster: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = make_federation()
    monkeypatch.setattr(cluster, "wait", lambda references, **_: ([], references))
    with (
        open_pool(cluster, federation) as engine,
        pytest.raises(ChildProcessError, match=r"no worker .* started in 300 s"),
    ):
        run_rounds(federation, engine)


def test_an_error_of_a_worker_is_the_error_here(cluster: FakeRay) -> None:
    federation = make_federation()
    model = initial_state(federation).model
    with open_pool(cluster, federation) as engine:
        with pytest.raises(ValueError, match="do not fit this layout") as raised:
            list(engine.train(replace(model, params=torch.zeros(7)), (), [Task("dark-0", 1)]))
        assert "In a worker process:" in raised.value.__notes__[0]
        with pytest.raises(KeyError, match="nobody"):
            list(engine.train(model, (), [Task("nobody", 1)]))
        assert len(list(engine.train(model, (), [Task("dark-0", 1)]))) == 1  # and the engine works on


def test_machines_need_the_same_versions(cluster: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = make_federation()
    with open_pool(cluster, federation) as engine:
        monkeypatch.setattr(ray_trainer, "__version__", "9.9")
        with pytest.raises(
            ValueError, match=r"machine 10\.0\.0\.7 of the Ray cluster has fedheal 9\.9 .*install the same"
        ):
            run_rounds(federation, engine)


def test_another_kind_of_cpu_is_a_warning(cluster: FakeRay, monkeypatch, caplog) -> None:
    there = Host("10.0.0.8", 1, "AVX512")
    monkeypatch.setattr(Trainer, "set_up", lambda self, setup, old=Trainer.set_up: old(self, setup) and there)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    federation = make_federation()
    with open_pool(cluster, federation) as engine:
        run_rounds(federation, engine, 1)
    assert "the CPU of 10.0.0.8 uses AVX512, this one AVX2: results may differ in the last bits" in caplog.text


@pytest.mark.parametrize(("cpus", "workers", "room"), [((1, 1), 3, 2), ((0, 0), 0, 0)])
def test_more_workers_than_the_cluster_has_room_for_are_refused(cluster: FakeRay, cpus, workers, room) -> None:
    cluster.cpus = cpus
    with pytest.raises(ValueError, match=rf"workers = {workers}: the Ray cluster has room for {room} of 1 CPU each"):
        ActorPool(cluster, make_federation().local_training, workers, 1)


def test_a_model_that_cannot_be_sent_is_a_sentence(cluster: FakeRay) -> None:
    local_training = make_federation().local_training
    local_training.module.lock = threading.Lock()
    with pytest.raises(ChildProcessError, match=r"cannot be sent to another process .*lock"):
        ActorPool(cluster, local_training, 1, 1)


def test_a_class_that_no_other_process_can_import_travels_with_the_setup(cluster: FakeRay) -> None:
    """Such a class is defined in a notebook or in the main script."""
    mine = type("Mine", (nn.Module,), {"__module__": "__main__"})
    training = replace(make_federation().local_training, module=mine())
    saved = ray_trainer.describe_setup(cluster, training, 1)[2]
    assert type(torch.load(io.BytesIO(saved), weights_only=False).module).__name__ == "Mine"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 1.0"),
            "Ray: 1.0.*install the same versions",
        ),
        (ConnectionError("nothing there"), "no Ray cluster answers at 'auto': nothing there"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_a_sentence(monkeypatch, error: Exception, message: str) -> None:
    def init(**_: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ValueError, match=message), connect_to_cluster("auto"):
        pass


def test_ray_prints_nothing_not_even_at_the_end(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Ray prints repeated messages when it shuts down."""
    from ray._private import worker

    def print_logs() -> None:
        worker.print_worker_logs({"pid": "raylet", "lines": ["Raylet is terminated."]}, sys.stdout)

    monkeypatch.setattr(ray, "init", lambda **keys: None)
    monkeypatch.setattr(ray, "shutdown", print_logs)
    with connect_to_cluster("auto"):
        print_logs()
    assert capsys.readouterr().out == ""
    print_logs()
    assert "Raylet is terminated." in capsys.readouterr().out
