"""The server's part of a round, shared by the simulator, Flower and NVFLARE.

aggregate -> server optimiser -> each term absorbs its messages -> check that model and terms are finite -> next state.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedheal.aggregate.aggregator import Aggregated, Aggregator, ModelOverflow
from fedheal.aggregate.reduce import is_finite
from fedheal.aggregate.server_optimizer import SERVERS, Server, check_plain_server
from fedheal.aggregate.stage import call_custom
from fedheal.aggregate.validate import NON_FINITE, BadUpdate
from fedheal.core.errors import CustomPartError, name_if_custom, name_part
from fedheal.core.layout import Layout, Packed
from fedheal.core.state import RunState, TermState
from fedheal.core.updates import Updates
from fedheal.local.term import Arrays, ServerContext, Term
from fedheal.methods.registry import Method


@dataclass(frozen=True)
class ClientTerms:
    """What the terms of local training left in one client's reply, in the order of the terms."""

    messages: tuple[Arrays, ...] = ()  # to the server
    slots: tuple[Arrays, ...] = ()  # what the client keeps; empty where clients keep it themselves


@dataclass(frozen=True)
class ServerStep:
    """The fixed parts of a server step."""

    aggregator: Aggregator
    optimizer: Server
    terms: tuple[Term, ...]
    layout: Layout
    rounds: int  # of the run; 0 if that is unknown
    # Whether an error that a user's term raises costs the round, as in a federation, and not the run.
    refuses_errors: bool = False


@dataclass(frozen=True)
class StepOutcome:
    """What a server step gives."""

    state: RunState
    aggregated: Aggregated
    accepted: tuple[str, ...]  # the clients whose updates count
    absorbed: tuple[str, ...]  # the accepted clients that keep what the round's training left with them
    is_restarted: bool = False  # whether sums over the clients' slots began anew: no client may use its slot in them
    refusal: str = ""  # why model or terms cannot be used: `state` then has the old ones, and the old optimiser

    @property
    def is_refused(self) -> bool:
        return bool(self.refusal)


def resolve_server(method: Method, server: Server | None = None) -> Server:
    """Return the server optimiser: the given one, that of the method, or the plain one.

    Raises:
        ValueError: It is no server optimiser, both are given and differ, or a term of the method does not work with it.
    """
    given: object = server  # a caller may not check types
    if not isinstance(given, Server | None):
        raise ValueError(f"server = {given!r}: give a Server, such as Server('adam')")
    if server is not None and method.server is not None and server != method.server:
        raise ValueError(f"server = {server}, but method '{method.name}' brings {method.server}: leave one of them out")
    chosen = server or method.server or Server()
    for term in method.local:
        if term.needs_plain_server:
            _check_plain_server(method, chosen, term.needs_plain_server)
    return chosen


def _check_plain_server(method: Method, server: Server, why: str) -> None:
    """Raise ValueError unless the server is plain, naming the part of the method that brings another one."""
    try:
        check_plain_server(server, why)
    except ValueError:
        brought = [part.name for part in method.parts if part.name in SERVERS]
        if not brought:
            raise
        raise ValueError(f"method '{method.name}': {why}; leave out {brought[0]}") from None


def apply_server_step(
    step: ServerStep,
    state: RunState,
    updates: Updates,
    replies: Mapping[str, ClientTerms],
    num_clients: int,
    lost_slots: Collection[str] = (),
) -> StepOutcome:
    """Take one server step; a cohort without weight moves nothing. The old state must not be used again.

    `lost_slots`: clients whose slots are gone. What they had added to a term's sums is unknown, so these sums begin anew.
    """
    overflow = ""
    try:
        aggregated = step.aggregator.apply(state.model, updates, state.aggregator, donate=True)
    except ModelOverflow as error:
        aggregated, overflow = error.result, str(error)
    except BadUpdate as error:
        raise BadUpdate(_name_custom_terms(step.terms, state.round + 1, error.reasons)) from None
    skipped = aggregated.report["skipped"]
    accepted = tuple(sorted(client for client in updates.clients if client not in skipped))
    unmoved = replace(state, round=state.round + 1, aggregator=aggregated.state)
    # If a term does not take part in the step, clients must not change their part of its state either.
    kept = StepOutcome(unmoved, aggregated, accepted, absorbed=() if step.terms else accepted)
    if overflow or not aggregated.weights.numpy().any():
        return replace(kept, refusal=overflow)
    optimizer, name = step.optimizer, name_if_custom(type(step.optimizer))
    arguments = state.model, aggregated.model, state.server
    stepped, moments = call_custom("server optimiser", name, optimizer.apply, *arguments)
    restarts = any(term.sums_slots for term in step.terms) and not set(lost_slots).isdisjoint(accepted)
    try:
        model, terms = _absorb(step, state, stepped, updates, aggregated, replies, accepted, num_clients, restarts)
    except CustomPartError as error:
        if not step.refuses_errors:
            raise
        return replace(kept, refusal=str(error))
    why = _find_overflow(step, model, stepped, aggregated, terms)
    if why:
        return replace(kept, refusal=why)
    after = replace(unmoved, model=model, server=moments, terms=terms)
    return replace(kept, state=after, absorbed=accepted, is_restarted=restarts)


def mean_train_loss(updates: Updates, accepted: Sequence[str]) -> float | None:
    """Return the mean training loss of the accepted clients that sent a finite one, or None."""
    if "train_loss" not in updates.metrics:
        return None
    by_client = dict(zip(updates.clients, updates.metrics["train_loss"].tolist(), strict=True))
    finite = [by_client[client] for client in accepted if math.isfinite(by_client[client])]
    if not finite:
        return None
    losses = torch.tensor(finite, dtype=torch.float64)
    mean = float(losses.mean())
    # The sum of finite losses may be infinite.
    return mean if math.isfinite(mean) else float((losses / len(losses)).sum())


def _name_custom_terms(terms: Sequence[Term], number: int, reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons; where an update is not finite, with the user's own terms, which may be why."""
    names = [name_part("term", name) for name in (name_if_custom(type(term)) for term in terms) if name]
    hint = f"; in round {number} it trained with {' and '.join(names)}: check that its loss and gradients stay finite"
    return {client: why + hint if names and why == NON_FINITE else why for client, why in reasons.items()}


def _absorb(
    step: ServerStep,
    state: RunState,
    model: Packed,
    updates: Updates,
    aggregated: Aggregated,
    replies: Mapping[str, ClientTerms],
    accepted: Sequence[str],
    num_clients: int,
    restarts: bool,
) -> tuple[Packed, tuple[TermState, ...]]:
    """Let each term take its part in the step. A skipped client leaves no trace: its slots stay as they were."""
    if not step.terms:
        return model, state.terms
    rows = _rows(updates, accepted)
    if tuple(accepted) != updates.clients:
        updates = updates.select(rows)
    after: list[TermState] = []
    for i, (term, before) in enumerate(zip(step.terms, state.terms, strict=True)):
        new_slots = {c: replies[c].slots[i] for c in accepted if replies[c].slots and replies[c].slots[i]}
        slots = {**before.slots, **new_slots}
        context = ServerContext(
            round=state.round + 1,
            rounds=step.rounds,
            clients=num_clients,
            updates=updates,
            weights=aggregated.weights[rows],
            unnormalised_weights=aggregated.unnormalised_weights[rows],
            layout=step.layout,
            slots=slots,
        )
        messages, shared, received = [replies[client].messages[i] for client in accepted], before.shared, state.model
        if step.refuses_errors and name_if_custom(type(term)):  # it may change what it is given before it raises
            received = Packed(*(part.clone() for part in vars(received).values()))
            shared = {name: tensor.clone() for name, tensor in shared.items()}
        if restarts and term.sums_slots:  # the round's model counts, but the sums begin as those of an empty cohort
            no_updates = Updates([], updates.no_rows, [])
            messages, shared, context = [], term.init(step.layout), replace(context, updates=no_updates)
        arguments = received, model, messages, shared, context
        model, shared = call_custom("term", name_if_custom(type(term)), term.absorb, *arguments)
        after.append(TermState(shared, slots))
    return model, tuple(after)


def _rows(updates: Updates, clients: Sequence[str]) -> torch.Tensor:
    """Return the rows of these clients in the matrix of updates."""
    row = {client: i for i, client in enumerate(updates.clients)}
    return torch.tensor([row[client] for client in clients], dtype=torch.int64)


def _find_overflow(
    step: ServerStep, model: Packed, stepped: Packed, aggregated: Aggregated, terms: Sequence[TermState]
) -> str:
    """Return why the model or a term's shared values are not finite, or an empty string. The aggregated model is."""
    if model is not aggregated.model and not _is_finite(model):
        if not _is_finite(stepped):
            return f"server_lr = {step.optimizer.lr}: this round's step makes the global model infinite; use a smaller value"
        names = ", ".join(type(term).__name__ for term in step.terms)
        remedy = "use a smaller learning rate or more regularisation"
        return f"the server step of {names} makes the global model infinite; {remedy}"
    for term, after in zip(step.terms, terms, strict=True):
        for name, value in after.shared.items():
            if value.is_floating_point() and not is_finite(value.reshape(-1)):
                owner = f"'{name}' of {type(term).__name__}, which the server keeps"
                return f"the clients' messages make {owner}, infinite; use a smaller learning rate, or leave the client out"
    return ""


def _is_finite(model: Packed) -> bool:
    return is_finite(model.params, model.buffers)
