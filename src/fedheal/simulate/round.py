"""The loop: a round reads top to bottom, and a run is rounds and what they leave behind.

sample clients -> train each from the global model -> aggregate -> server step -> evaluate -> record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate import Aggregated, Aggregator, State
from fedheal.aggregate.reduce import is_finite
from fedheal.aggregate.server_optimizer import Server
from fedheal.core.layout import Packed
from fedheal.core.metrics import fairness
from fedheal.core.rng import generator
from fedheal.core.state import RunState, TermState
from fedheal.core.updates import Reply, Updates
from fedheal.data.domains import Split
from fedheal.engine import Engine
from fedheal.engine.serial import ClientResult, LocalTraining, Task, find_correct
from fedheal.local.term import ServerContext
from fedheal.runs.schema import RoundRecord


@dataclass(frozen=True)
class Federation:
    """A run's fixed parts, resolved: who there is, how they train, how their updates become a model, how it is judged."""

    local_training: LocalTraining
    clients: tuple[str, ...]
    aggregator: Aggregator
    server: Server
    tests: Mapping[str, Split]  # by domain
    client_domains: Mapping[str, str]  # client -> domain, for all clients, whether they train or not
    validation: Mapping[str, Split] = field(default_factory=dict)  # by client
    participation: float = 1.0
    dropout: float = 0.0


def initial_state(federation: Federation) -> RunState:
    """Before the first round: the model as it was built."""
    local_training = federation.local_training
    model = local_training.layout.pack(local_training.module.state_dict())
    device = model.params.device
    terms = tuple(TermState(_on(term.init(local_training.layout), device), {}) for term in local_training.terms)
    return RunState(
        round=0,
        seed=local_training.seed,
        model=model,
        aggregator=federation.aggregator.init(local_training.layout),
        server=federation.server.init(),
        terms=terms,
    )


def run_round(
    federation: Federation, state: RunState, engine: Engine, evaluate: bool = True
) -> tuple[RunState, RoundRecord]:
    """One round. The old state's buffers are reused: it must not be used again."""
    number, clock = state.round + 1, _Clock()
    cohort = sample(federation, state.seed, number)
    present = [client for client in cohort if not drops_out(federation, state.seed, number, client)]
    replies: dict[str, ClientResult] = {}
    updates = Updates.collect(
        _kept(federation, _trained(state, engine, present), replies),
        layout=federation.local_training.layout,
        keep=True,
    )
    clock.lap("train")
    out = federation.aggregator.apply(state.model, updates, state.aggregator, donate=True)
    stepped, server = _stepped(federation, state, out)
    accepted = sorted(client for client in updates.clients if client not in out.report["skipped"])
    model, terms = _absorb(federation, state, stepped, updates, out, replies, accepted)
    clock.lap("aggregate")
    judged = judge(federation, model, terms) if evaluate else {}
    clock.lap("evaluate")
    sent, received = _traffic(federation, state, cohort, replies)
    after = RunState(
        round=number,
        seed=state.seed,
        model=model,
        aggregator=out.state,
        server=server,
        terms=terms,
        sent=state.sent + sent,
        received=state.received + received,
    )
    losses = updates.metrics.get("train_loss", torch.empty(0, dtype=torch.float64))
    loss = float(losses[losses.isfinite()].mean()) if bool(losses.isfinite().any()) else None
    weights = dict(zip(updates.clients, out.weights.tolist(), strict=True))
    return after, RoundRecord(number, len(cohort), len(present), weights, loss, out.report, clock.seconds, **judged)


def _stepped(federation: Federation, state: RunState, out: Aggregated) -> tuple[Packed, State]:
    """The server's own step; a cohort without weight leaves the model as it was, momentum or not."""
    if not bool(out.weights.any()):
        return out.model, state.server
    model, server = federation.server.apply(state.model, out.model, state.server)
    if not is_finite(model.params):
        raise ValueError(
            f"server_lr = {federation.server.lr}: this round's step makes the global model infinite; use less"
        )
    return model, server


def _trained(state: RunState, engine: Engine, present: Sequence[str]) -> Iterator[ClientResult]:
    tasks = [Task(c, state.round + 1, tuple(term.slots.get(c, {}) for term in state.terms)) for c in present]
    return engine.train(state.model, tuple(term.shared for term in state.terms), tasks)


def _kept(federation: Federation, trained: Iterator[ClientResult], replies: dict[str, ClientResult]) -> Iterator[Reply]:
    """Pass the replies on, and keep all but the update itself. A client of no domain is one by itself."""
    for one in trained:
        client = str(one.reply.client)
        replies[client] = replace(one, reply=one.reply._replace(delta=torch.empty(0)))
        yield one.reply._replace(domain=federation.client_domains.get(client, client))


def _absorb(
    federation: Federation,
    state: RunState,
    model: Packed,
    updates: Updates,
    out: Aggregated,
    replies: Mapping[str, ClientResult],
    accepted: Sequence[str],
) -> tuple[Packed, tuple[TermState, ...]]:
    """Each term takes its part of the server's step. A client that was skipped leaves no trace: its slots stay as they were."""
    if not accepted or not bool(out.weights.any()):
        return model, state.terms
    rows = torch.tensor([updates.clients.index(client) for client in accepted])
    whole = tuple(accepted) == updates.clients
    taken = updates if whole else Updates(accepted, updates.deltas[rows], updates.num_examples[rows])
    number = state.round + 1
    layout, everyone = federation.local_training.layout, len(federation.clients)
    columns = out.weights[rows], out.unnormalised_weights[rows]
    made = []
    for i, (term, before) in enumerate(zip(federation.local_training.terms, state.terms, strict=True)):
        messages = [replies[client].messages[i] for client in accepted]
        slots = dict(before.slots) | {c: replies[c].slots[i] for c in accepted if replies[c].slots[i]}
        ctx = ServerContext(number, federation.local_training.rounds, everyone, taken, *columns, layout, slots)
        model, shared = term.absorb(state.model, model, messages, before.shared, ctx)
        made.append(TermState(shared, slots))
    return model, tuple(made)


def _traffic(
    federation: Federation, state: RunState, cohort: Sequence[str], replies: Mapping[str, ClientResult]
) -> tuple[int, int]:
    """Bytes to a cohort and back: the model, less what stays with a client that has its own; what the terms send along; and
    8 for each number that the aggregation needs beside the examples."""
    local_training, model = federation.local_training, state.model
    size = sum(vector.nbytes for vector in (model.params, model.buffers, model.counters))
    terms = [
        (term, kept, term.local_bytes(local_training.module, local_training.layout))
        for term, kept in zip(local_training.terms, state.terms, strict=True)
    ]
    down = size * len(cohort)
    for term, kept, stays in terms:
        down += sum(tensor.nbytes for client in cohort for tensor in term.broadcast(client, kept.shared).values())
        down -= sum(stays for client in cohort if client in kept.slots)
    one = size - sum(stays for _, _, stays in terms) + 8 * len(federation.aggregator.stage.needs - {"domain"})
    up = sum(one + sum(t.nbytes for m in reply.messages for t in m.values()) for reply in replies.values())
    return down, up


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


def judge(federation: Federation, model: Packed, terms: Sequence[TermState] = ()) -> dict[str, Any]:
    """Accuracy of the global model per domain and per client, and how evenly it serves them.

    A client is judged on its share of its domain's test examples, dealt out in turn.
    """
    module = federation.local_training.module
    domains: dict[str, float] = {}
    clients: dict[str, float] = {}
    validation: dict[str, float] = {}
    for domain, split in federation.tests.items():
        residents = sorted(client for client, home in federation.client_domains.items() if home == domain)
        module.load_state_dict(
            federation.local_training.layout.unpack(judged_model(federation, model, terms, residents))
        )
        right = find_correct(module, split, federation.local_training.precision).cpu().numpy()
        domains[domain] = 100.0 * float(right.mean())
        for i, client in enumerate(residents):
            share = right[i :: len(residents)]
            if len(share):
                clients[client] = 100.0 * float(np.mean(share))
        held = [
            find_correct(module, federation.validation[c], federation.local_training.precision).cpu()
            for c in residents
            if c in federation.validation
        ]
        if held:
            validation[domain] = 100.0 * float(torch.cat(held).double().mean())
    return {
        "domains": domains,
        "clients": clients,
        "fairness": fairness(domains),
        "client_fairness": fairness(clients) if clients else None,
        "validation": validation or None,
    }


def judged_model(
    federation: Federation, model: Packed, terms: Sequence[TermState], residents: Sequence[str] = ()
) -> Packed:
    """The model that is judged for a domain with these clients: the global one, unless a term says otherwise."""
    for term, kept in zip(federation.local_training.terms, terms, strict=False):
        model = term.evaluated(model, kept.shared, {c: kept.slots[c] for c in residents if c in kept.slots})
    return model


def rounds(
    federation: Federation,
    state: RunState,
    engine: Engine,
    last: int,
    every: int = 1,
) -> Iterator[tuple[RunState, RoundRecord]]:
    """Round after round up to `last`; the global model is evaluated every so many rounds and in the last."""
    while state.round < last:
        number = state.round + 1
        state, record = run_round(federation, state, engine, number % every == 0 or number == last)
        yield state, record


class Callback:
    """What a logger may override; all neutral. A run enters and leaves it as a context."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def started(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> None: ...

    def round(self, record: RoundRecord) -> None: ...

    def finished(self, result: Mapping[str, Any]) -> None: ...


def _on(arrays: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in arrays.items()}


class _Clock:
    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now, self.last, self.seconds = now, now(), dict[str, float]()

    def lap(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = self.now()
        self.seconds[name], self.last = now - self.last, now
