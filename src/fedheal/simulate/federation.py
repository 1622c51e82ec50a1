"""The fixed parts of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fedheal.aggregate import Aggregator
from fedheal.aggregate.server_optimizer import Server
from fedheal.data.domains import Split
from fedheal.engine.serial import LocalTraining
from fedheal.methods.server_step import ServerStep


@dataclass(frozen=True)
class Federation:
    """A run's fixed parts: its clients, how they train, how the server aggregates, and how the model is evaluated."""

    local_training: LocalTraining
    clients: tuple[str, ...]  # those that train
    aggregator: Aggregator
    server: Server  # the server optimiser
    tests: Mapping[str, Split]  # the test examples of each domain
    client_domains: Mapping[str, str]  # the domain of every client, whether it trains or not
    validation: Mapping[str, Split] = field(default_factory=dict)  # what each client holds out of its training data
    participation: float = 1.0  # the share of clients that a cohort has
    dropout: float = 0.0  # the probability that a client of the cohort does not reply

    @property
    def server_step(self) -> ServerStep:
        return ServerStep(
            aggregator=self.aggregator,
            optimizer=self.server,
            terms=self.local_training.terms,
            layout=self.local_training.layout,
            rounds=self.local_training.rounds,
        )

    @cached_property
    def members(self) -> dict[str, list[str]]:
        """The clients of each domain, sorted."""
        members: dict[str, list[str]] = {domain: [] for domain in self.tests}
        for client, domain in sorted(self.client_domains.items()):
            members.setdefault(domain, []).append(client)
        return members
