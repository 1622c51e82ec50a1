"""One round: who takes part, what is counted, bad updates, and the server's step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fedheal
from fedheal.core.state import RunState
from fedheal.engine import serial
from fedheal.engine.serial import SerialEngine
from fedheal.runs.schema import RoundRecord
from fedheal.simulate.build import build_federation
from fedheal.simulate.federation import Federation
from fedheal.simulate.round import Diverged, drops_out, initial_state, run_round, sample_cohort
from tiny_data import CLIENTS, SAMPLES, load, quick
from tiny_runs import IDS, get_model_bytes, make_federation, run

# Who takes part


def test_the_split_does_not_depend_on_rounds_method_or_participation() -> None:
    def get_client_images(fed: Federation) -> dict[str, bytes]:
        return {client: split.images.numpy().tobytes() for client, split in fed.local_training.examples.items()}

    first = get_client_images(make_federation())
    assert first == get_client_images(
        make_federation(rounds=50, method="fedavg", participation=0.2, lr=1.0, batch_size=3)
    )
    assert first != get_client_images(make_federation(seed=1))
    assert {client: len(split) for client, split in make_federation().local_training.examples.items()} == {
        f"{domain}-{i}": SAMPLES[domain] for domain in CLIENTS for i in range(CLIENTS[domain])
    }


def test_the_order_in_which_clients_train_changes_nothing() -> None:
    def run_first_round(order: int) -> tuple[RunState, RoundRecord]:
        fed = make_federation(model="tiny_data:dropout")
        return run_round(
            fed,
            initial_state(fed),
            SimpleNamespace(
                train=lambda model, shared, tasks: SerialEngine(fed.local_training).train(model, shared, tasks[::order])
            ),
        )

    (forward, first), (backward, second) = run_first_round(1), run_first_round(-1)
    assert (first.replied, second.replied) == (5, 5)
    assert not torch.equal(forward.model.params, initial_state(make_federation(model="tiny_data:dropout")).model.params)
    assert torch.equal(forward.model.params, backward.model.params)
    assert dict(first.weights) == dict(second.weights)


@pytest.mark.parametrize(("participation", "size"), [(1.0, 5), (0.6, 3), (0.4, 2), (0.2, 1), (0.001, 1), (0.99, 5)])
def test_cohorts_have_the_share_that_was_asked_for(participation: float, size: int) -> None:
    fed = make_federation(participation=participation)
    for number in range(1, 30):
        cohort = sample_cohort(fed, 0, number)
        assert len(cohort) == size
        assert cohort == sorted(set(cohort))
        assert set(cohort) <= set(IDS)


def test_cohorts_differ_by_round_and_reach_everyone_evenly() -> None:
    fed = make_federation(participation=0.4)
    cohorts = [sample_cohort(fed, 0, number) for number in range(1, 1001)]
    counts = np.array([sum(client in cohort for cohort in cohorts) for client in IDS])
    assert len({tuple(cohort) for cohort in cohorts}) == 10  # all pairs of five
    assert abs(counts - 400).max() < 65  # binomial: sqrt(1000 * 0.4 * 0.6) = 15.5; four deviations


def test_replies_are_counted_apart_from_the_cohort() -> None:
    result = run(dropout=0.5, rounds=12)
    fed = make_federation(dropout=0.5)
    for record in result.history:
        present = [c for c in IDS if not drops_out(fed, 0, record.round, c)]
        assert (record.cohort, record.replied) == (5, len(present))
        assert sorted(record.weights) == present
        assert sum(record.weights.values()) == pytest.approx(1.0 if present else 0.0)
    assert len({record.replied for record in result.history}) > 2


def test_drop_outs_have_their_own_chance_by_client_and_round() -> None:
    fed = make_federation(dropout=0.3)
    out = np.array([[drops_out(fed, 0, number, client) for client in IDS] for number in range(400)])
    assert abs(out.mean(axis=0) - 0.3).max() < 0.1  # sqrt(0.21 / 400) = 0.023
    assert len({tuple(row) for row in out.tolist()}) > 20


OPTIMISERS = [
    {},
    {"server_lr": 0.5},
    {"server_momentum": 0.9},
    {"server_optimizer": "adam", "server_momentum": 0.9, "server_lr": 0.1},
]


@pytest.mark.parametrize("server", OPTIMISERS, ids=str)
def test_a_round_in_which_everyone_drops_out_leaves_the_model(server: dict[str, Any]) -> None:
    keys = {"dropout": 0.9, "model": "tiny_data:conv_batchnorm", "rounds": 12} | server
    fed = make_federation(**keys)
    empty = [n for n in range(1, 13) if all(drops_out(fed, 0, n, c) for c in IDS)]
    assert empty, "no such round: take another seed"
    assert empty[-1] > 3, "no such round after a full one: take another seed"

    engine = SerialEngine(fed.local_training)
    state = initial_state(fed)
    for number in range(1, 13):
        before = state
        state, record = run_round(fed, state, engine)
        if number in empty:
            assert (record.replied, dict(record.weights), record.train_loss) == (0, {}, None)
            for name in ("params", "buffers", "counters"):
                assert torch.equal(getattr(state.model, name), getattr(before.model, name)), (number, name)
        else:
            assert not torch.equal(state.model.params, before.model.params)


def test_bytes_are_counted_both_ways() -> None:
    result = run(model="tiny_data:conv_batchnorm", participation=0.6, dropout=0.4, rounds=6)
    model = result.model.state_dict()
    params = 3 * 4 * 9 + 4 + 4 + 4 + 4 * 64 * 3 + 3
    assert sum(t.numel() for t in model.values()) == params + 8 + 1
    size = 4 * (params + 8) + 8 * 1  # float32 parameters and running statistics, an int64 counter
    assert result.summary["bytes_sent"] == size * sum(record.cohort for record in result.history)
    assert result.summary["bytes_received"] == size * sum(record.replied for record in result.history)
    assert result.summary["bytes_received"] < result.summary["bytes_sent"]


SERVERS = [{"server_lr": 0.5}, {"server_momentum": 0.9}, {"server_optimizer": "adam"}]


@pytest.mark.parametrize("server", SERVERS, ids=str)
@pytest.mark.parametrize(
    ("method", "why"), [("fedce", "out of the average"), ("ditto:feedback=true", "personal models' average")]
)
def test_a_servers_step_that_a_method_has_no_room_for_is_refused(method: str, why: str, server: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"server_lr = .*{why}.*; use 'sgd', server_lr=1 and server_momentum=0$"):
        make_federation(method=method, validation=0.25, **server)
    make_federation(method=method, validation=0.25, server_lr=1)
    make_federation(method="ditto", **server)


# Bad updates


def make_diverging_fields(kind: str) -> dict[str, Any]:
    return {"lr": 1e30, "model": f"tiny_data:{kind}"}


@pytest.mark.parametrize("kind", ["linear", "conv_batchnorm"])
@pytest.mark.parametrize("method", ["fedavg", "fedheal", "fael-exact"])
def test_a_diverging_client_is_an_error_that_names_it(kind: str, method: str) -> None:
    said = r"client 'dark-0': its .* NaN.* \(and 4 more\); use a smaller lr$"
    with pytest.raises(Diverged, match=f"^training has diverged for every client of the round: {said}"):
        run(method=method, **make_diverging_fields(kind))


def test_one_bad_update_of_several_may_be_left_out() -> None:
    fed = make_federation(method="fedavg")

    def train(model, shared, tasks):
        for task in tasks:
            done = serial.train_client(fed.local_training, model, shared, task)
            if task.client == "noisy-1":
                done = replace(done, reply=done.reply._replace(delta=torch.full_like(done.reply.delta, float("nan"))))
            yield done

    said = r"^client 'noisy-1': its update holds NaN.*; on_bad_update=skip leaves such clients out$"
    with pytest.raises(Diverged, match=said):
        run_round(fed, initial_state(fed), SimpleNamespace(train=train))


def test_a_bad_update_that_is_finite_has_not_diverged() -> None:
    fed = make_federation(method="qffl")

    def train(model, shared, tasks):
        for task in tasks:
            done = serial.train_client(fed.local_training, model, shared, task)
            yield replace(done, reply=done.reply._replace(metrics={**(done.reply.metrics or {}), "loss": -1.0}))

    said = r"^client 'dark-0': its metric 'loss' must not be negative, got -1 \(and 4 more\); on_bad_update=skip leaves"
    with pytest.raises(ValueError, match=said) as refused:
        run_round(fed, initial_state(fed), SimpleNamespace(train=train))
    assert not isinstance(refused.value, Diverged)


def test_a_model_that_the_servers_step_makes_infinite_has_diverged() -> None:
    with pytest.raises(Diverged, match=r"server_lr = .*use a smaller value"):
        run(method="fedavg", server_lr=1e30, lr=1e10)


@pytest.mark.parametrize("kind", ["linear", "conv_batchnorm"])
@pytest.mark.parametrize("method", ["fedavg", "fedheal", "fael-exact"])
def test_diverging_clients_are_skipped_counted_and_leave_the_model(kind: str, method: str, tmp_path: Path) -> None:
    experiment = quick(method=method, on_bad_update="skip", **make_diverging_fields(kind))
    result = fedheal.run(experiment, tmp_path / "run", progress=False)
    for record in result.history:
        assert sorted(record.report["skipped"]) == IDS
        assert set(record.weights.values()) == {0.0}
        assert record.replied == 5
    before = build_federation(experiment, load(), torch.device("cpu")).local_training.module
    assert get_model_bytes(result.model) == get_model_bytes(before)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedheal", "scaffold", "feddyn", "moon", "ditto", "fedbn", "fpl"])
def test_a_skipped_client_counts_as_absent(method: str) -> None:
    """Model and aggregator have the bits of a round in which the client did not reply."""

    def make_engine(fed: Federation, broken: bool):
        def train(model, shared, tasks):
            for task in tasks:
                done = serial.train_client(fed.local_training, model, shared, task)
                if task.client != "noisy-1" or task.round != 2:
                    yield done
                elif broken:
                    bad = done.reply._replace(delta=torch.full_like(done.reply.delta, float("nan")))
                    yield replace(done, reply=bad)

        return SimpleNamespace(train=train)

    ends = []
    for broken in (True, False):
        fed = make_federation(on_bad_update="skip", method=method, model="tiny_data:feature_model")
        state = initial_state(fed)
        for _ in range(3):
            state, record = run_round(fed, state, make_engine(fed, broken))
            assert list(record.report["skipped"]) == (["noisy-1"] if broken and state.round == 2 else [])
        ends.append(state.to_arrays())
    assert ends[0][0].keys() == ends[1][0].keys()
    for name, array in ends[0][0].items():
        assert torch.equal(array, ends[1][0][name]), name
    assert ends[0][1] | {"received": 0} == ends[1][1] | {"received": 0}


# The server's step


@pytest.mark.parametrize("server", [{}, {"server_momentum": 0.9}, {"server_optimizer": "adam"}], ids=str)
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_servers_step_never_makes_the_model_infinite(server: dict[str, Any], policy: str, tmp_path: Path) -> None:
    experiment = quick(rounds=1, server_lr=1e30, on_bad_update=policy, **server)
    try:
        result = fedheal.run(experiment, tmp_path / "run", progress=False)
    except ValueError as error:
        assert "server_lr" in str(error) or "overflow" in str(error)  # noqa: PT017
    else:
        assert all(value.isfinite().all() for value in result.model.state_dict().values())


def test_a_step_of_a_term_that_overflows_ends_the_round_it_happens_in() -> None:
    """FedDyn broadcasts W + delta - h/alpha: with deltas of 2e38 that is 4e38, beyond float32; every update is finite."""
    fed = make_federation(method="feddyn")

    def train(model, shared, tasks):
        for task in tasks:
            done = serial.train_client(fed.local_training, model, shared, task)
            yield replace(done, reply=done.reply._replace(delta=torch.full_like(done.reply.delta, 2e38)))

    with pytest.raises(ValueError, match=r"FedDyn|Dynamic|feddyn"):
        run_round(fed, initial_state(fed), SimpleNamespace(train=train))


def test_a_term_message_that_overflows_ends_the_round_it_happens_in() -> None:
    """The sum of the changes of SCAFFOLD's controls is beyond float32; every update and every message is finite."""
    fed = make_federation(method="scaffold")

    def train(model, shared, tasks):
        for task in tasks:
            done = serial.train_client(fed.local_training, model, shared, task)
            yield replace(done, messages=tuple({"change": torch.full_like(m["change"], 3e38)} for m in done.messages))

    with pytest.raises(ValueError, match=r"'c' of Scaffold, which the server keeps, infinite"):
        run_round(fed, initial_state(fed), SimpleNamespace(train=train))
