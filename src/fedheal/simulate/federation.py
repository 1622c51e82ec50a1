"""The fixed parts of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedheal.aggregate import Aggregator
from fedheal.aggregate.server_optimizer import Server
from fedheal.data.domains import Split
from fedheal.engine.serial import LocalTraining
from fedheal.methods.server_step import ServerStep


@dataclass(frozen=True)
class Federation:
    """A run's fixed parts: its clients, how they train, how the server aggregates, and how the model is evaluated.

    Args:
        local_training: What an engine needs to train a client.
        clients: The clients that train.
        aggregator: Turns a cohort's updates into a model.
        server: The server optimiser.
        tests: The test examples of each domain.
        client_domains: The domain of every client, whether it trains or not.
        validation: The examples that each client holds out of its training data.
        participation: The share of clients that a cohort has.
        dropout: The probability that a client of the cohort does not reply.
    """

    local_training: LocalTraining
    clients: tuple[str, ...]
    aggregator: Aggregator
    server: Server
    tests: Mapping[str, Split]
    client_domains: Mapping[str, str]
    validation: Mapping[str, Split] = field(default_factory=dict)
    participation: float = 1.0
    dropout: float = 0.0

    @property
    def server_step(self) -> ServerStep:
        return ServerStep(
            aggregator=self.aggregator,
            optimizer=self.server,
            terms=self.local_training.terms,
            layout=self.local_training.layout,
            rounds=self.local_training.rounds,
        )
