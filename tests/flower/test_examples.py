"""What the ready app makes of its settings, and Flower of the guide's, without an engine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from flwr.cli.typing import SuperLinkConnection

from fedheal.flower import FairStrategy

FOLDER = Path(__file__).parents[2] / "examples" / "flower"


@pytest.fixture
def served(monkeypatch):
    """The strategy that the server app starts with these settings."""
    monkeypatch.syspath_prepend(str(FOLDER))
    from fair_digits import server_app

    started: list[FairStrategy] = []
    monkeypatch.setattr(FairStrategy, "start", lambda self, *args, **keys: started.append(self))
    config = tomllib.loads((FOLDER / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]

    def serve(**keys: str) -> FairStrategy:
        server_app.app(None, Context(1, 1, {}, RecordDict(), {**config, **keys}))
        return started[-1]

    return serve


def test_masks_on_the_sites_take_the_methods_parameters(served):
    strategy = served(method="fedheal:tau=0.7,beta=0.1", placement="client")
    assert strategy.name == "fedavg+fedheal:tau=0.7,beta=0.1 (on clients)"
    assert (strategy.tau, strategy.admission.masked) == (0.7, True)
    assert served(method="fedheal:tau=0.7", placement="server").name == "fedavg+fedheal:tau=0.7"


@pytest.mark.parametrize("method", ["fedavg", "fedfv", "fphl", "fedprox:mu=0.1+fedheal", "fedheal:soft=true"])
def test_methods_that_cannot_be_placed_on_the_sites_are_refused(served, method):
    with pytest.raises(ValueError, match=r"placement = 'client' with method = .*: use 'fedheal'"):
        served(method=method, placement="client")


def test_an_unknown_placement_is_refused(served):
    with pytest.raises(ValueError, match="placement = 'clients': use one of"):
        served(method="fedheal", placement="clients")


def test_the_guides_connection_is_one_that_flower_takes():
    guide = (FOLDER.parents[1] / "docs" / "flower.md").read_text(encoding="utf-8")
    block = re.search(r"^```\n(\[superlink\..*?)^```", guide, re.S | re.M)
    (name, keys), *_ = tomllib.loads(block[1])["superlink"].items()
    found = SuperLinkConnection(name, **{key.replace("-", "_"): value for key, value in keys.items()})
    assert found.address == "127.0.0.1:8000"
    assert not found.insecure
