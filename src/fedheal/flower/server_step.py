"""One round's step of the server: aggregate, the server's own step, and each term's part of it, as in a simulation."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedheal.aggregate import Aggregated, Aggregator
from fedheal.aggregate.reduce import is_finite, mean
from fedheal.aggregate.server_optimizer import Server
from fedheal.core.layout import Layout, Packed
from fedheal.core.state import RunState, TermState
from fedheal.core.updates import Updates
from fedheal.flower.intake import Cohort
from fedheal.flower.masking import divided
from fedheal.local.term import ServerContext, Term
from fedheal.methods import Method


def check_placed(method: Method) -> None:
    """Where clients mask their updates the mean is that of what they kept, and the method can only say the weights."""
    aggregator = method.aggregator
    if "mask" in aggregator.stage.gives or aggregator.reduce is not mean:
        raise ValueError(
            f"placement = 'client' with '{method.name}', which has a mask or a mean of its own: use "
            "fedheal.flower.FedHEAL(placement='client'), or a method that gives weights alone"
        )


def stepped(
    aggregator: Aggregator,
    server: Server,
    terms: tuple[Term, ...],
    layout: Layout,
    state: RunState,
    cohort: Cohort,
    rounds: int,
    clients: int,
) -> tuple[RunState, Aggregated]:
    """The state after this cohort. `clients`: how many there are in the federation."""
    kept = {client: one.kept for client, one in cohort.read.items() if one.kept is not None}
    if kept:
        aggregator = replace(aggregator, reduce=divided(kept))
    out = aggregator.apply(state.model, cohort.updates, state.aggregator, donate=True)
    if not bool(out.weights.any()):
        return replace(state, aggregator=out.state), out
    model, moments = server.apply(state.model, out.model, state.server)
    model, shared = _absorbed(terms, layout, state, model, cohort, out, rounds, clients)
    if model is not out.model and not (is_finite(model.params) and is_finite(model.buffers)):
        told = {"unmoved": "the server's step would make the model infinite"}
        return replace(state, aggregator=out.state), replace(out, report=out.report | told)
    return replace(state, model=model, aggregator=out.state, server=moments, terms=shared), out


def _absorbed(
    terms: tuple[Term, ...],
    layout: Layout,
    state: RunState,
    model: Packed,
    cohort: Cohort,
    out: Aggregated,
    rounds: int,
    clients: int,
) -> tuple[Packed, tuple[TermState, ...]]:
    if not terms:
        return model, state.terms
    updates = cohort.updates
    accepted = [client for client in updates.clients if client not in out.report["skipped"]]
    rows = torch.tensor([updates.clients.index(client) for client in accepted])
    taken = Updates(accepted, updates.deltas[rows], updates.num_examples[rows])
    made: list[TermState] = []
    for i, (term, before) in enumerate(zip(terms, state.terms, strict=True)):
        messages = [cohort.read[client].messages[i] for client in accepted]
        # What clients keep stays with them: the server has no slots.
        columns = out.weights[rows], out.unnormalised_weights[rows]
        ctx = ServerContext(state.round + 1, rounds, clients, taken, *columns, layout, {})
        model, shared = term.absorb(state.model, model, messages, before.shared, ctx)
        made.append(TermState(shared, {}))
    return model, tuple(made)
