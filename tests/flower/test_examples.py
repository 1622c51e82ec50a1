"""The example apps and the guide's configuration, without Flower's engine."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.cli.typing import SuperLinkConnection
from flwr.serverapp.strategy import Result

from fedheal.flower import FairStrategy
from fedheal.simulate.build import build_module
from flower.local_grid import LocalGrid

FOLDER = Path(__file__).parents[2] / "examples" / "flower"
CONFIG = tomllib.loads((FOLDER / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
START = FairStrategy.start


@pytest.fixture
def start_server_app(monkeypatch):
    """A function that runs the server app with these settings and returns its strategy."""
    monkeypatch.syspath_prepend(str(FOLDER))
    from fair_digits import server_app

    started: list[FairStrategy] = []
    monkeypatch.setattr(FairStrategy, "start", lambda self, *args, **keys: started.append(self))

    def serve(**keys: Any) -> FairStrategy:
        server_app.app(None, Context(1, 1, {}, RecordDict(), {**CONFIG, **keys}))
        return started[-1]

    return serve


def test_masks_on_the_sites_take_the_methods_parameters(start_server_app):
    strategy = start_server_app(method="fedheal:tau=0.7,beta=0.1", placement="client")
    assert strategy.name == "fedavg+fedheal:tau=0.7,beta=0.1 (on clients)"
    assert (strategy.settings.tau, strategy.requirements.masked) == (0.7, True)
    assert start_server_app(method="fedheal:tau=0.7", placement="server").name == "fedavg+fedheal:tau=0.7"


@pytest.mark.parametrize("method", ["fedavg", "fedfv", "fphl", "fedprox:mu=0.1+fedheal", "fedheal:soft=true"])
def test_methods_that_cannot_be_placed_on_the_sites_are_refused(start_server_app, method):
    with pytest.raises(ValueError, match=r"placement = 'client' with method = .*: use 'fedheal'"):
        start_server_app(method=method, placement="client")


def test_an_unknown_placement_is_refused(start_server_app):
    with pytest.raises(ValueError, match="placement = 'clients': use one of"):
        start_server_app(method="fedheal", placement="clients")


def test_a_method_that_validates_needs_held_out_examples(start_server_app):
    with pytest.raises(
        ValueError, match=r"method = '.*fedga' needs examples held out at each site: set validation = 0.2"
    ):
        start_server_app(method="fedga")


@pytest.mark.slow
def test_a_method_that_validates_trains_with_examples_held_out(start_server_app):
    from fair_digits import client_app
    from fair_digits.task import describe_experiment

    keys = {"method": "fedga", "validation": 0.2, "steps": 1, "num-server-rounds": 1}
    strategy = start_server_app(**keys)
    grid = LocalGrid(client_app.app, {7 + i: {"partition-id": i, "num-partitions": 2} for i in range(2)})
    for context in grid.contexts.values():
        context.run_config = CONFIG | keys
    initial = build_module(describe_experiment(grid.contexts[7], 2), classes=10).state_dict()
    strategy.folder = None
    START(strategy, grid, ArrayRecord(initial), num_rounds=1)
    (record,) = strategy.history
    assert record.report["skipped"] == {}
    assert set(record.weights) == {"handwritten-0", "print-0"}


@pytest.mark.parametrize("silent", [1, 2])
def test_the_summary_of_many_clients_handles_rounds_without_replies(silent, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER.parent / "many_clients"))
    from many_clients import client_app, server_app

    strategies: list[FairStrategy] = []

    def start(self: FairStrategy, *args: Any, **keys: Any) -> Result:
        strategies.append(self)
        return START(self, *args, **keys)

    monkeypatch.setattr(FairStrategy, "start", start)

    def spoil(node: int, reply: Message) -> list[Message]:
        return [reply] if strategies[-1].rounds.current.number < silent else []

    config = {"num-server-rounds": 2, "fraction": 1.0, "tau": 0.6, "summary": str(tmp_path / "summary.json")}
    grid = LocalGrid(client_app.app, {7 + i: {"partition-id": i} for i in range(2)}, spoil)
    server_app.app(grid, Context(1, 1, {}, RecordDict(), config))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["rounds"], summary["clients seen"]) == (2, 2 * (silent - 1))
    assert summary["kept entries in the last round"] is None
    assert (summary["numbers kept per client"] is None) == (silent == 1)


@pytest.mark.slow
def test_masks_on_many_clients_cost_the_server_four_numbers_each(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER.parent / "many_clients"))
    from many_clients import client_app, server_app

    config = {"num-server-rounds": 8, "fraction": 0.1, "tau": 0.6, "summary": str(tmp_path / "summary.json")}
    grid = LocalGrid(client_app.app, {7 + i: {"partition-id": i} for i in range(150)})
    server_app.app(grid, Context(1, 1, {}, RecordDict(), config))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["clients"], summary["rounds"], summary["asked a round"], summary["no reply"]) == (150, 8, 15, 0)
    assert summary["clients seen"] > 50
    assert summary["numbers kept per client"] == 4
    assert summary["bytes kept"] < summary["bytes of sign counts on a server"] / 100
    assert (
        0.5 < summary["kept entries in the last round"] < 1
    )  # a client that returns drops what disagrees with its history
    assert summary["training loss"][1] < summary["training loss"][0] / 2


def test_the_guides_connection_is_one_that_flower_takes():
    guide = (FOLDER.parents[1] / "docs" / "flower.md").read_text(encoding="utf-8")
    block = re.search(r"^```\n(\[superlink\]\n.*?)^```", guide, re.S | re.M)
    keys = tomllib.loads(block[1])["superlink"]["deployment"]
    connection = SuperLinkConnection("deployment", **{key.replace("-", "_"): value for key, value in keys.items()})
    assert connection.address == "127.0.0.1:8000"
    assert not connection.insecure
