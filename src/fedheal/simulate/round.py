"""One round, from top to bottom.

sample a cohort -> train each client from the global model -> server step -> evaluate -> record.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from fedheal.aggregate.validate import BadUpdate, is_divergence
from fedheal.core.clock import Clock
from fedheal.core.errors import CustomPartError
from fedheal.core.rng import generator
from fedheal.core.state import RunState, TermState
from fedheal.core.updates import Collector
from fedheal.engine import Engine
from fedheal.engine.serial import Task
from fedheal.methods.server_step import ClientTerms, apply_server_step, mean_train_loss
from fedheal.runs.schema import RoundRecord
from fedheal.simulate.evaluation import evaluate_domains
from fedheal.simulate.federation import Federation


class Diverged(ValueError):
    """Training has diverged: a client's update or the new model is not finite."""


def initial_state(federation: Federation) -> RunState:
    """Return the state before the first round: the model as it was built, and empty histories."""
    local_training, layout = federation.local_training, federation.local_training.layout
    model = layout.pack(local_training.module.state_dict())
    shared = [
        {name: tensor.to(model.params.device) for name, tensor in term.init(layout).items()}
        for term in local_training.terms
    ]
    return RunState(
        round=0,
        seed=local_training.seed,
        model=model,
        aggregator=federation.aggregator.init(layout),
        server=federation.server.init(),
        terms=tuple(TermState(values, {}) for values in shared),
    )


def run_round(
    federation: Federation,
    state: RunState,
    engine: Engine,
    evaluate: bool = True,
    before_server_step: Callable[[], None] = lambda: None,
) -> tuple[RunState, RoundRecord]:
    """Run one round; return the state after it and its record. Raise `Diverged` if an update or the model is not finite.

    The buffers of `state` are reused: it must not be used again once `before_server_step` is called, after training.
    """
    number, clock = state.round + 1, Clock()
    cohort = sample_cohort(federation, state.seed, number)
    present = [client for client in cohort if not drops_out(federation, state.seed, number, client)]
    tasks = [Task(client, number, tuple(term.slots.get(client, {}) for term in state.terms)) for client in present]
    collector = Collector(layout=federation.local_training.layout, keep=True)
    # A user's own term may change what a client sends.
    add = collector.add if federation.local_training.terms else collector.add_unchecked
    client_terms: dict[str, ClientTerms] = {}
    for result in engine.train(state.model, tuple(term.shared for term in state.terms), tasks):
        client = str(result.reply.client)
        domain = federation.client_domains.get(client, client)  # a client without a domain is a domain of its own
        add(result.reply._replace(domain=domain))
        client_terms[client] = ClientTerms(messages=result.messages, slots=result.slots)
    before_server_step()
    updates = collector.finish()
    clock.end_phase("train")
    sent, received = measure_traffic(federation, state, cohort, client_terms)
    try:
        outcome = apply_server_step(federation.server_step, state, updates, client_terms, len(federation.clients))
    except BadUpdate as error:
        raise _explain_bad_updates(error.reasons, len(present)) from None
    if outcome.is_refused:
        raise Diverged(outcome.refusal)
    after = replace(outcome.state, sent=state.sent + sent, received=state.received + received)
    clock.end_phase("aggregate")
    evaluation = evaluate_domains(federation, after.model, after.terms, engine) if evaluate else {}
    clock.end_phase("evaluate")
    record = RoundRecord(
        round=number,
        cohort=len(cohort),
        replied=len(present),
        weights=dict(zip(updates.clients, outcome.aggregated.weights.tolist(), strict=True)),
        train_loss=mean_train_loss(updates, outcome.accepted),
        report=outcome.aggregated.report,
        seconds=clock.seconds,
        **evaluation,
    )
    return after, record


def _explain_bad_updates(reasons: Mapping[str, str], replied: int) -> ValueError:
    """Return an error that says which clients of a round have bad updates, and what to do."""
    client, why = next(iter(reasons.items()))
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    problem = f"client '{client}': {why}{more}"
    has_diverged = all(map(is_divergence, reasons.values()))
    if has_diverged and len(reasons) == replied:  # to leave out all of them would be of no use
        return Diverged(f"training has diverged for every client of the round: {problem}; use a smaller lr")
    return (Diverged if has_diverged else ValueError)(f"{problem}; on_bad_update=skip leaves such clients out")


def run_rounds(
    federation: Federation,
    state: RunState,
    engine: Engine,
    last: int,
    eval_every: int = 1,
    before_server_step: Callable[[], None] = lambda: None,
) -> Iterator[tuple[RunState, RoundRecord]]:
    """Run rounds up to `last`; evaluate every `eval_every` rounds and in the last one."""
    while state.round < last:
        number = state.round + 1
        evaluate = number % eval_every == 0 or number == last
        try:
            state, record = run_round(federation, state, engine, evaluate, before_server_step)
        except CustomPartError as error:
            raise CustomPartError(f"round {number}: {error}") from error.__cause__
        yield state, record


def sample_cohort(federation: Federation, seed: int, number: int) -> list[str]:
    """Return the cohort of a round, sorted: all clients, or a random share with at least one client."""
    clients = sorted(federation.clients)
    size = max(1, round(federation.participation * len(clients)))
    if size >= len(clients):
        return clients
    chosen = torch.randperm(len(clients), generator=generator(seed, "cohort", number))[:size]
    return [clients[i] for i in sorted(chosen.tolist())]


def drops_out(federation: Federation, seed: int, number: int, client: str) -> bool:
    """Return whether a client of the cohort does not reply in this round."""
    if not federation.dropout:
        return False
    return float(torch.rand((), generator=generator(seed, "dropout", number, client))) < federation.dropout


def measure_traffic(
    federation: Federation, state: RunState, cohort: Sequence[str], replies: Mapping[str, ClientTerms]
) -> tuple[int, int]:
    """Return the bytes to a cohort and back: the model, less what clients keep, the terms' values, and 8 bytes a metric."""
    local_training, model = federation.local_training, state.model
    model_bytes = sum(vector.nbytes for vector in (model.params, model.buffers, model.counters))
    down, up_each = model_bytes * len(cohort), model_bytes
    for term, term_state in zip(local_training.terms, state.terms, strict=True):
        local_bytes = term.local_bytes(local_training.module, local_training.layout)
        down -= local_bytes * sum(client in term_state.slots for client in cohort)
        for client in cohort:
            down += sum(tensor.nbytes for tensor in term.broadcast(client, term_state.shared).values())
        up_each -= local_bytes
    up_each += 8 * len(federation.aggregator.stage.needs - {"domain"})
    messages = [message for reply in replies.values() for message in reply.messages]
    up = up_each * len(replies) + sum(tensor.nbytes for message in messages for tensor in message.values())
    return down, up
