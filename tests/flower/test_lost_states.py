"""A site that loses what its method keeps there: the server notices, records it by name, and still finds the optimum."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedheal import methods
from fedheal.flower import FairStrategy, FedHEAL, client
from flower.local_grid import LocalGrid
from flower.test_stock_client import EXAMPLES, make_helper_app, make_module
from local.quadratic import make_engine, make_gradient, make_quadratic_federation, vector

CENTRES = {"a": -4.0, "b": 0.0, "c": 2.0, "d": 10.0}  # the optimum is their mean, 2
OWN, MEAN = {"scaffold": "c", "feddyn": "g"}, {"scaffold": "c", "feddyn": "h"}


class Quadratics:
    """Four sites with losses `1/2 (w - centre)^2`, trained by the client helper; `lose(node)` makes a site forget."""

    def __init__(self, method: str, folder: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
        (self.term,) = methods.get(method).local
        self.method, self.folder = method, folder
        fed = make_quadratic_federation(self.term, dict.fromkeys(CENTRES, 0.25), 1)
        engine = make_engine(fed, {name: make_gradient(vector(centre)) for name, centre in CENTRES.items()})
        monkeypatch.setattr(client.serial, "train_client", lambda _, *args: next(engine.train(*args[:2], args[2:])))
        app = ClientApp()
        self.slots: dict[str, float] = {}

        @app.train()
        def train(message: Message, context: Context) -> Message:
            name = str(context.node_config["name"])
            reply = client.train(message, context, fed.local_training, name, folder=folder)
            number = message.content["config"]["server-round"]
            store = client.open_store(context, name, folder, message.content["config"]["fedheal.federation"])
            self.slots[name] = float(store.load(number).arrays[f"slots.0.{OWN[method.split(':')[0]]}"])
            return reply

        self.grid = LocalGrid(app, {i: {"name": name} for i, name in enumerate(CENTRES, 1)})

    def run(self, rounds: int, changes: dict[int, tuple[int, str]]) -> FairStrategy:
        """Run some rounds; `changes` gives, by round, a node and how it loses its state before that round."""
        strategy = FairStrategy(self.method, fraction_evaluate=0.0, clients=4)
        before = strategy.configure_train

        def configure(number: int, *args):
            if number in changes:
                self.lose(*changes[number])
            return before(number, *args)

        strategy.configure_train = configure
        strategy.start(self.grid, ArrayRecord({"w": torch.zeros(1, dtype=torch.float64)}), num_rounds=rounds)
        return strategy

    def lose(self, node: int, how: str) -> None:
        context = self.grid.contexts[node]
        files = (
            [] if self.folder is None else sorted(self.folder.glob(f"client-{context.node_config['name']}/**/*.saf*"))
        )
        if how == "older":  # the newest state file is gone
            files[-1].unlink()
        elif how == "files":
            for path in files:
                path.unlink()
        else:  # "context": as of a node that was restarted; "node": as of a new node on the same name
            new = node + 100 if how == "node" else node
            del self.grid.contexts[node]
            self.grid.contexts[new] = Context(1, new, context.node_config, RecordDict(), {})


FEDDYN = "feddyn:alpha=0.5,clip=0"


@pytest.mark.parametrize(
    ("method", "how"),
    [
        pytest.param("scaffold", "context", marks=pytest.mark.slow),  # many rounds
        (FEDDYN, "context"),
        ("scaffold", "node"),
        pytest.param(FEDDYN, "older", marks=pytest.mark.slow),  # it writes files
        pytest.param("scaffold", "files", marks=pytest.mark.slow),
    ],
)
def test_sites_that_lose_their_controls_do_not_move_the_optimum(method, how, tmp_path, monkeypatch, caplog):
    sites = Quadratics(method, tmp_path if how in ("older", "files") else None, monkeypatch)
    strategy = sites.run(24, {3: (4, how), 10: (1, how)})
    assert strategy.state.model.params.item() == pytest.approx(2.0, abs=5e-3)
    mean = float(strategy.state.terms[0].shared[MEAN[method.split(":")[0]]])
    assert mean == pytest.approx(sum(sites.slots.values()) / 4, abs=1e-9)
    lost = {record.round: record.report["lost_states"] for record in strategy.history if "lost_states" in record.report}
    rest = [f"continued with that of round {n}" if how == "older" else "continued without one" for n in (1, 8)]
    assert lost == {
        3: {"d": f"it has no state of round 2, its last accepted one, and {rest[0]}"},
        10: {"a": f"it has no state of round 9, its last accepted one, and {rest[1]}"},
    }
    assert "round 3: 'd': it has no state of round 2" in caplog.text


def test_right_after_a_loss_the_servers_control_is_the_mean_of_what_the_sites_use(monkeypatch):
    """After a loss all sites use a control of zero, also absent ones: the old control of site b is not used any more."""
    sites = Quadratics("scaffold", None, monkeypatch)
    strategy = sites.run(3, {3: (4, "context")})
    assert strategy.federation.restarted == 3
    assert strategy.state.terms[0].shared["c"].tolist() == [0.0]
    assert strategy.state.model.params.item() != 0.0  # the round's model counts
    context = sites.grid.contexts[2]
    instructions = client.RoundInstructions(4, federation=strategy.federation.federation, restarted=3)
    session = client._ClientSession.open(context, "b", None, instructions.with_accepted_rounds({"b": 2}))
    assert session.loaded.round == 2
    assert session.read_slots([sites.term]) == ({},)


def test_a_lost_history_of_signs_is_recorded_and_changes_nothing_else():
    strategy = FedHEAL(tau=0.6, placement="client", fraction_evaluate=0.0)
    grid = LocalGrid(make_helper_app(), {7 + i: {"partition-id": i} for i in EXAMPLES})

    def forget(node: int, reply: Message) -> list[Message]:
        if strategy.rounds.current.number == 2 and node == 8:
            grid.contexts[8].state = RecordDict()
        return [reply]

    grid.spoil = forget
    strategy.start(grid, ArrayRecord(make_module().state_dict()), num_rounds=3)
    assert [list(record.report.get("lost_states", {})) for record in strategy.history] == [[], [], ["partition-1"]]
    assert strategy.federation.restarted == 0
    assert all(record.report["skipped"] == {} for record in strategy.history)
