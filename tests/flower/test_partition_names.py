"""In Flower's simulation a stock client is its partition, so that a resumed simulation is the uninterrupted one.

The simulation runs in this process: Flower's own nodes, grid and queues, with threads in the place of Ray's actors.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.server.superlink.fleet.vce.backend import Backend
from flwr.server.superlink.fleet.vce.vce_api import _register_nodes
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import InMemoryGrid

from fedheal.flower import FairStrategy, FedHEAL
from fedheal.flower.node_registry import NodeRegistry
from flower.local_grid import LocalGrid
from flower.test_stock_client import EXAMPLES, make_module, make_stock_app

SETTINGS = {"fraction_train": 0.67, "fraction_evaluate": 0.0, "min_available_nodes": 3, "seed": 3}
ROUNDS = 4


class Threads(Backend):
    num_workers = 2

    def build(self, app_fn: Any) -> None:
        self.app: ClientApp = app_fn()

    def is_worker_idle(self) -> bool:
        return True

    def terminate(self) -> None: ...

    def process_message(self, message: Message, context: Context) -> tuple[Message, Context]:
        return self.app(message, context), context


def simulate(monkeypatch: pytest.MonkeyPatch, rounds: int, **settings: Any) -> FairStrategy:
    """Run stock clients in Flower's simulation."""
    backend = SimpleNamespace(RayBackend=Threads)
    monkeypatch.setitem(sys.modules, "flwr.server.superlink.fleet.vce.backend.raybackend", backend)
    simulation = importlib.import_module("flwr.simulation.run_simulation")
    monkeypatch.setattr(simulation, "event", lambda *args, **named: None)  # telemetry
    strategy, server = FedHEAL(**SETTINGS, **settings), ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid, ArrayRecord(make_module().state_dict()), num_rounds=rounds)

    simulation._run_simulation(len(EXAMPLES), simulation.EventType.PING, make_stock_app(), server)
    return strategy


@pytest.mark.slow
def test_a_resumed_simulation_of_stock_clients_is_the_uninterrupted_one(tmp_path: Path, monkeypatch, caplog) -> None:
    whole = FedHEAL(**SETTINGS)
    grid = LocalGrid(make_stock_app(), {7 + i: {"partition-id": i} for i in EXAMPLES})
    names = {7 + i: f"partition-{i}" for i in EXAMPLES}
    monkeypatch.setattr(NodeRegistry, "name_partitions", lambda self, *_: self.partition_names.update(names))
    whole.start(grid, ArrayRecord(make_module().state_dict()), num_rounds=ROUNDS)
    monkeypatch.undo()
    simulate(monkeypatch, 2, folder=tmp_path / "run")
    resumed = simulate(monkeypatch, ROUNDS, folder=tmp_path / "run", resume=True)
    assert [record.weights for record in resumed.history] == [record.weights for record in whole.history]
    assert {len(record.weights) for record in whole.history} == {2}  # some clients of three: the cohorts matter
    assert resumed.state.aggregator == whole.state.aggregator
    assert torch.equal(resumed.state.model.params, whole.state.model.params)
    assert "sends no client name" not in caplog.text


def test_nodes_of_a_simulation_are_named_by_their_partitions() -> None:
    factory = LinkStateFactory(":flwr-in-memory:", NoOpFederationManager(), ObjectStoreFactory())
    nodes = _register_nodes(20, factory)
    grid, registry = InMemoryGrid(factory), NodeRegistry()
    grid.get_node_ids = lambda: set(nodes)
    registry.name_partitions(grid, nodes)
    assert registry.partition_names == {node: f"partition-{i}" for node, i in nodes.items()}
    registry.names[next(iter(nodes))] = "clinic"  # a client's own name wins
    assert [registry.get_name(node) for node in nodes][:2] == ["clinic", "partition-1"]
    assert registry.get_name(1) == "node-1"


def test_nodes_of_a_deployment_keep_their_ids() -> None:
    strategy = FedHEAL(**SETTINGS)
    grid = LocalGrid(make_stock_app(), {7 + i: {"partition-id": i} for i in EXAMPLES})
    strategy.start(grid, ArrayRecord(make_module().state_dict()), num_rounds=1)
    assert set(strategy.history[0].weights) <= {"node-7", "node-8", "node-9"}
