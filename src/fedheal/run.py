"""The loop: a round reads top to bottom, and a run is rounds and what they leave behind.

sample clients -> train each from the global model -> aggregate -> server step -> evaluate -> record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate import Aggregator, State
from fedheal.aggregate.server import Server
from fedheal.data.domains import Split
from fedheal.engine.serial import Bench, correct
from fedheal.engine.workers import Trainer
from fedheal.layout import Packed
from fedheal.metrics import fairness
from fedheal.rng import generator
from fedheal.types import RoundRecord, RunState, Updates


@dataclass(frozen=True)
class Federation:
    """A run's fixed parts, resolved: who there is, how they train, how their updates become a model, how it is judged."""

    bench: Bench
    clients: tuple[str, ...]
    aggregator: Aggregator
    server: Server
    tests: Mapping[str, Split]  # by domain
    homes: Mapping[str, str]  # client -> domain, for all clients, whether they train or not
    validation: Mapping[str, Split] = field(default_factory=dict)  # by client
    participation: float = 1.0
    dropout: float = 0.0


def initial_state(federation: Federation) -> RunState:
    """Before the first round: the model as it was built."""
    bench = federation.bench
    model = bench.layout.pack(bench.module.state_dict())
    return RunState(0, bench.seed, model, federation.aggregator.init(bench.layout), federation.server.init())


def restored_state(arrays: Mapping[str, Tensor], described: Mapping[str, Any], device: torch.device) -> RunState:
    """A state from what `RunState.to_arrays` gave, on a device."""

    def inner(name: str) -> State:
        own = {k.removeprefix(f"{name}."): v.to(device) for k, v in arrays.items() if k.startswith(f"{name}.")}
        restored: State = State.from_arrays(own, described[name])
        return restored

    model = Packed(*(arrays[f"model.{name}"].to(device) for name in ("params", "buffers", "counters")))
    numbers = {name: int(described[name]) for name in ("round", "seed", "sent", "received")}
    return RunState(**numbers, model=model, aggregator=inner("aggregator"), server=inner("server"))


def run_round(
    federation: Federation, state: RunState, train: Trainer, evaluate: bool = True
) -> tuple[RunState, RoundRecord]:
    """One round. The old state's buffers are reused: it must not be used again."""
    number, clock = state.round + 1, _Clock()
    cohort = sample(federation, state.seed, number)
    present = [client for client in cohort if not drops_out(federation, state.seed, number, client)]
    updates = Updates.collect(train(state.model, present, number), layout=federation.bench.layout)
    clock.lap("train")
    out = federation.aggregator.apply(state.model, updates, state.aggregator, donate=True)
    model, server = federation.server.apply(state.model, out.model, state.server)
    clock.lap("aggregate")
    judged = judge(federation, model) if evaluate else {}
    clock.lap("evaluate")
    size = sum(vector.nbytes for vector in (model.params, model.buffers, model.counters))
    after = RunState(
        number,
        state.seed,
        model,
        out.state,
        server,
        state.sent + size * len(cohort),
        state.received + size * len(present),
    )
    losses = updates.metrics.get("train_loss", torch.empty(0, dtype=torch.float64))
    loss = float(losses[losses.isfinite()].mean()) if bool(losses.isfinite().any()) else None
    weights = dict(zip(updates.clients, out.weights.tolist(), strict=True))
    return after, RoundRecord(number, len(cohort), len(present), weights, loss, out.report, clock.seconds, **judged)


def sample(federation: Federation, seed: int, number: int) -> list[str]:
    """This round's cohort: everyone, or a random part of at least one client, in the order of their ids."""
    everyone = sorted(federation.clients)
    size = max(1, round(federation.participation * len(everyone)))
    if size >= len(everyone):
        return everyone
    chosen = torch.randperm(len(everyone), generator=generator(seed, "cohort", number))[:size]
    return [everyone[i] for i in sorted(chosen.tolist())]


def drops_out(federation: Federation, seed: int, number: int, client: str) -> bool:
    """Whether a client that was asked does not reply."""
    return float(torch.rand((), generator=generator(seed, "dropout", number, client))) < federation.dropout


def judge(federation: Federation, model: Packed) -> dict[str, Any]:
    """Accuracy of the global model per domain and per client, and how evenly it serves them.

    A client is judged on its share of its domain's test examples, dealt out in turn.
    """
    bench = federation.bench
    bench.module.load_state_dict(bench.layout.unpack(model))
    right = {name: correct(bench.module, split).numpy() for name, split in federation.tests.items()}
    domains = {name: 100.0 * float(r.mean()) for name, r in right.items()}
    clients: dict[str, float] = {}
    for domain, r in right.items():
        residents = sorted(client for client, home in federation.homes.items() if home == domain)
        for i, client in enumerate(residents):
            share = r[i :: len(residents)]
            if len(share):
                clients[client] = 100.0 * float(np.mean(share))
    return {
        "domains": domains,
        "clients": clients,
        "fairness": fairness(domains),
        "client_fairness": fairness(clients) if clients else None,
        "validation": _validate(federation) if federation.validation else None,
    }


def _validate(federation: Federation) -> dict[str, float]:
    """Accuracy per domain of the module as it is, on what its clients held out."""
    right: dict[str, list[Tensor]] = {}
    for client, split in federation.validation.items():
        right.setdefault(federation.homes[client], []).append(correct(federation.bench.module, split))
    return {domain: 100.0 * float(torch.cat(parts).double().mean()) for domain, parts in right.items()}


def rounds(
    federation: Federation,
    state: RunState,
    train: Trainer,
    last: int,
    every: int = 1,
) -> Iterator[tuple[RunState, RoundRecord]]:
    """Round after round up to `last`; the global model is evaluated every so many rounds and in the last."""
    while state.round < last:
        number = state.round + 1
        state, record = run_round(federation, state, train, number % every == 0 or number == last)
        yield state, record


class Callback:
    """What a logger may override; all neutral."""

    def started(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> None: ...

    def round(self, record: RoundRecord) -> None: ...

    def finished(self, result: Mapping[str, Any]) -> None: ...


class _Clock:
    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now, self.last, self.seconds = now, now(), dict[str, float]()

    def lap(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = self.now()
        self.seconds[name], self.last = now - self.last, now
