"""The server step that the simulator and Flower share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fedheal import Layout, Packed, Updates, methods
from fedheal.aggregate.server_optimizer import Server, ServerState
from fedheal.core.errors import CustomPartError
from fedheal.core.state import RunState, State, TermState
from fedheal.methods.server_step import ClientTerms, ServerStep, StepOutcome, apply_server_step, mean_train_loss
from local.quadratic import make_gradient, make_packed, run_client, vector

LAYOUT = Layout.flat(2)


def take_step(
    name: str,
    deltas: list[list[float]],
    server: Server | None = None,
    weights: list[float] | None = None,
    messages: tuple[dict[str, torch.Tensor], ...] = (),
) -> tuple[RunState, StepOutcome]:
    """Take one step from a model of zeros with clients a, b, ...; return the state before it and its outcome."""
    method = methods.get(name)
    step = ServerStep(
        aggregator=method.aggregator,
        optimizer=server or Server(),
        terms=method.local,
        layout=LAYOUT,
        rounds=10,
    )
    clients = [chr(ord("a") + i) for i in range(len(deltas))]
    before = RunState(
        round=4,
        seed=0,
        model=Packed(torch.zeros(2), torch.zeros(0), torch.zeros(0, dtype=torch.int64)),
        aggregator=step.aggregator.init(LAYOUT),
        server=step.optimizer.init(),
        terms=tuple(TermState(term.init(LAYOUT), {}) for term in step.terms),
    )
    updates = Updates(clients, torch.tensor(deltas), weights or [1.0] * len(deltas))
    replies = {client: ClientTerms(messages=messages) for client in clients}
    return before, apply_server_step(step, before, updates, replies, num_clients=len(clients))


def test_a_step_without_terms_is_the_aggregated_model():
    before, outcome = take_step("fedavg", [[1.0, 2.0], [3.0, 6.0]])
    assert outcome.state.model.params.tolist() == [2.0, 4.0]
    assert (outcome.state.round, outcome.accepted, outcome.is_refused) == (before.round + 1, ("a", "b"), False)


def test_the_server_optimizer_moves_part_of_the_way():
    _, outcome = take_step("fedavg", [[1.0, 2.0], [3.0, 6.0]], Server(lr=0.5))
    assert outcome.state.model.params.tolist() == [1.0, 2.0]


class OwnServer(Server):
    """A server optimiser of a user's own, whose step fails."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        vars(self)["error"] = error

    def apply(self, before: Packed, aggregated: Packed, state: State) -> tuple[Packed, ServerState]:
        raise vars(self)["error"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyError("m")], ids=repr)
def test_what_a_server_optimizer_of_ones_own_raises_is_named(error: BaseException) -> None:
    sentence = (
        rf"^your server optimiser `[\w.]*:OwnServer` raised {type(error).__name__}: .* \(test_server_step.py, line"
    )
    with pytest.raises(CustomPartError, match=sentence):
        take_step("fedavg", [[1.0, 2.0]], OwnServer(error))


@pytest.mark.parametrize(
    ("name", "server", "cause"),
    [
        ("feddyn", Server(), "FedDyn|Dynamic"),  # delta - h/alpha = 2e38 + 2e38 is beyond float32
        ("fedavg", Server(lr=10.0), "server_lr = 10.0"),  # 10 x 2e38 likewise
    ],
)
def test_a_step_that_overflows_is_refused_and_leaves_the_model(name: str, server: Server, cause: str) -> None:
    before, outcome = take_step(name, [[2e38, 0.0], [2e38, 0.0]], server, messages=({},))
    assert outcome.is_refused
    assert torch.equal(outcome.state.model.params, torch.zeros(2))
    assert outcome.state.terms is before.terms
    assert outcome.state.round == before.round + 1
    assert any(word in outcome.refusal for word in cause.split("|"))


def test_training_loss_is_that_of_accepted_clients_with_a_finite_one():
    updates = Updates("abcd", torch.zeros(4, 2), [1.0] * 4, metrics={"train_loss": [1.0, 3.0, float("nan"), 100.0]})
    assert mean_train_loss(updates, ["a", "b", "c"]) == 2.0
    assert mean_train_loss(updates, ["c"]) is None
    assert mean_train_loss(Updates("a", torch.zeros(1, 2), [1.0]), ["a"]) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scaffold", {"change": torch.tensor([3e38, 0.0])}),  # two of them sum to more than float32 holds
        ("scaffold", {"change": torch.tensor([torch.nan, 0.0])}),
        ("fedproto", {"prototypes": torch.full((2, 2), 3e38), "count": torch.ones(2)}),
        ("ditto", {"params": torch.tensor([torch.inf, 0.0]), "buffers": torch.zeros(0), "counters": torch.zeros(0)}),
    ],
)
def test_messages_that_make_shared_values_infinite_are_refused(name: str, message: dict[str, torch.Tensor]) -> None:
    before, outcome = take_step(name, [[1.0, 0.0], [1.0, 0.0]], messages=(message,))
    assert outcome.is_refused
    assert type(methods.get(name).local[0]).__name__ in outcome.refusal
    assert outcome.state.terms is before.terms
    assert torch.equal(outcome.state.model.params, torch.zeros(2))
    assert (outcome.accepted, outcome.absorbed) == (("a", "b"), ())
    assert all(torch.isfinite(value).all() for value in outcome.state.terms[0].shared.values())


CENTRES = {"a": -4.0, "b": 0.0, "c": 2.0, "d": 10.0}  # their mean is 2


def run_quadratics(name: str, count_clients: Callable[[int], tuple[int, int]], rounds: int = 150) -> RunState:
    """Run clients `1/2 (w - centre)^2`; `count_clients(round)` gives how many take part, and how many there are."""
    method, layout = methods.get(name), Layout.flat(1)
    step = ServerStep(method.aggregator, Server(), method.local, layout, rounds)
    (term,) = method.local
    terms = (TermState(term.init(layout), {}),)
    state = RunState(
        round=0,
        seed=0,
        model=make_packed(0.0),
        aggregator=step.aggregator.init(layout),
        server=Server().init(),
        terms=terms,
    )
    for number in range(1, rounds + 1):
        present, everyone = count_clients(number)
        deltas, replies = [], {}
        for who in list(CENTRES)[:present]:
            shared, slot = state.terms[0].shared, state.terms[0].slots.get(who, {})
            local, new_slot, message = run_client(
                term, state.model, make_gradient(vector(CENTRES[who])), client=who, steps=5, slot=slot, shared=shared
            )
            deltas.append(local.params - state.model.params)
            replies[who] = ClientTerms((message,), (new_slot,))
        updates = Updates(list(replies), torch.stack(deltas), [1.0] * present)
        outcome = apply_server_step(step, state, updates, replies, everyone)
        assert not outcome.is_refused
        assert outcome.absorbed == tuple(replies)
        state = outcome.state
    return state


GROWING = ["scaffold", "scaffold:option=1", "feddyn:alpha=0.5,clip=0"]
CONTROLS = {"scaffold": ("c", "c"), "feddyn": ("h", "g")}


@pytest.mark.slow
@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("joins", [1, 3, 10])
def test_controls_follow_a_federation_that_grows(name: str, joins: int) -> None:
    """Two clients join two others after some rounds: the optimum is that of all four, and the controls stay means."""
    state = run_quadratics(name, lambda number: (2, 2) if number <= joins else (4, 4))
    mean, own = CONTROLS[name.split(":")[0]]
    (term,) = state.terms
    assert state.model.params.item() == pytest.approx(2.0, abs=1e-6)
    assert float(term.shared[mean]) == pytest.approx(
        sum(float(slot[own]) for slot in term.slots.values()) / 4, abs=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", GROWING)
def test_controls_follow_a_federation_that_shrinks(name: str) -> None:
    """Two clients that never take part leave after round 3, and two remain."""
    state = run_quadratics(name, lambda number: (2, 4 if number <= 3 else 2))
    assert state.model.params.item() == pytest.approx(-2.0, abs=1e-6)


@pytest.mark.parametrize("name", GROWING)
def test_with_a_fixed_number_of_clients_controls_are_not_even_rounded(name: str) -> None:
    """A state of version 0.1 does not hold that number."""
    state = run_quadratics(name, lambda number: (2, 3), rounds=4)
    (term,), (shared, _) = methods.get(name).local, (state.terms[0].shared, state.terms[0].slots)
    old = {key: value for key, value in shared.items() if key != "clients"}
    deltas, change = vector(0.3)[None], {"change": vector(0.1)}
    actual = []
    for values in (shared, old):
        before = RunState(
            round=4, seed=0, model=make_packed(1.0), aggregator=methods.get(name).aggregator.init(Layout.flat(1)),
            server=Server().init(), terms=(TermState(values, {}),),
        )  # fmt: skip
        step = ServerStep(methods.get(name).aggregator, Server(), (term,), Layout.flat(1), 10)
        outcome = apply_server_step(step, before, Updates("a", deltas, [1.0]), {"a": ClientTerms((change,))}, 3)
        actual.append(outcome.state.terms[0].shared)
    assert all(torch.equal(actual[0][key], actual[1][key]) for key in actual[0])
    assert int(actual[1]["clients"]) == 3
