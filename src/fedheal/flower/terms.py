"""A method's local terms between the two sides: which a client trained with, and whether the server can use their messages."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass

import torch

from fedheal.core.layout import Layout
from fedheal.core.state import RunState
from fedheal.core.updates import Updates
from fedheal.local.fedce import FedCE
from fedheal.local.scaffold import Scaffold
from fedheal.local.term import Arrays, ServerContext, Term

# What servers and clients of earlier versions call these terms, in messages and in run folders.
WIRE_NAMES = {
    "FedProx": "Proximal",
    "Scaffold": "ControlVariates",
    "Moon": "Contrastive",
    "FedDyn": "Dynamic",
    "FedBN": "LocalNorm",
    "FedGA": "Gaps",
    "FedCE": "LeaveOneOut",
}


def check_terms(terms: Sequence[Term]) -> None:
    """Two terms need on the server what clients of a federation keep to themselves."""
    for term in terms:
        if isinstance(term, Scaffold) and term.fair_controls == "p":
            raise ValueError("fair_controls = 'p' needs every client's control variate on the server: use 'uniform'")
        if isinstance(term, FedCE):
            raise ValueError("fedce tells every client its own weight, which one broadcast cannot: simulate it instead")


def spelled(terms: Sequence[Term]) -> list[str]:
    """Terms in words that are the same on every machine; of what is no dataclass only the kind is known.

    >>> from fedheal import methods
    >>> spelled(methods.get("fedprox:mu=0.1").local)
    ['Proximal(mu=0.1)']
    """
    return [_spelled(term) for term in terms]


def _spelled(term: object) -> str:
    kind = WIRE_NAMES.get(type(term).__qualname__, type(term).__qualname__)
    if not is_dataclass(term) or isinstance(term, type):
        return kind
    held = ((field.name, getattr(term, field.name)) for field in fields(term) if field.repr)
    # A function's repr has its address in memory, which no other process shares.
    return f"{kind}({', '.join(f'{name}={_name(value)}' for name, value in held)})"


def _name(value: object) -> str:
    return str(getattr(value, "__qualname__", repr(value)))


def look(messages: Sequence[Arrays]) -> str:
    """What a client's messages look like: their names, shapes and dtypes, digested."""
    seen = [sorted((name, list(t.shape), str(t.dtype)) for name, t in group.items()) for group in messages]
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]


def trouble(terms: Sequence[Term], layout: Layout, state: RunState, messages: Sequence[Arrays]) -> str | None:
    """Why the terms could not take in a round with these messages alone; tried out, since only a term knows what it needs."""
    still = Updates(["one"], torch.zeros(1, layout.sizes().params, dtype=state.model.params.dtype), [1])
    whole = torch.ones(1, dtype=torch.float64)
    ctx = ServerContext(state.round + 1, 0, 1, still, whole, whole, layout, {})
    for term, message, before in zip(terms, messages, state.terms, strict=True):
        try:
            term.absorb(state.model, state.model, [message], before.shared, ctx)
        except Exception as error:  # a term is not asked to check: what is missing or misshapen raises nearly anything
            return f"{type(error).__name__}: {str(error)[:200]}"
    return None
