"""Runs of some rounds, and of an aggregator alone, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch

from fedheal import Updates
from fedheal.aggregate import Aggregator
from fedheal.core.layout import Layout
from fedheal.core.state import RunState
from fedheal.engine.serial import SerialEngine
from fedheal.simulate.build import build_federation
from fedheal.simulate.federation import Federation
from fedheal.simulate.round import initial_state, run_round
from tiny_data import load, quick


def make_federation(**keys: Any) -> Federation:
    return build_federation(quick(**{"model": "tiny_data:conv_batchnorm"} | keys), load(), torch.device("cpu"))


def run_rounds(fed: Federation, rounds: int) -> RunState:
    """Return the state after some rounds of the serial engine."""
    state, engine = initial_state(fed), SerialEngine(fed.local_training)
    for _ in range(rounds):
        state, _ = run_round(fed, state, engine, evaluate=False)
    return state


class AggregatorRounds:
    """Applies an aggregator round after round; each call returns the round's weights."""

    def __init__(self, aggregator: Aggregator, size: int = 1) -> None:
        self.aggregator, self.size = aggregator, size
        self.state = aggregator.init(Layout.flat(size))
        self.model, self.report = torch.zeros(size, dtype=torch.float64), {}

    def __call__(self, clients: str, deltas: Any = None, **metrics: Any) -> list[float]:
        k = len(clients)
        rows = torch.zeros(k, self.size) if deltas is None else torch.tensor(deltas)
        updates = Updates(list(clients), rows.double(), list(range(1, k + 1)), metrics=metrics)
        out = self.aggregator.apply(self.model, updates, self.state)
        self.state, self.model, self.report = out.state, out.model, out.report
        return out.weights.tolist()
