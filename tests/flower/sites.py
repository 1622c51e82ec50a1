"""A small federation for tests: the tiny data set's clients as a Flower app in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from fedheal import Experiment, data
from fedheal.data.domains import Split
from fedheal.flower import FairStrategy, client, messages
from fedheal.simulate.build import build_federation
from flower.local_grid import LocalGrid, Spoil
from tiny_data import quick


class Sites:
    """One experiment's clients behind a ClientApp; `grid()` connects them as nodes 100, 101, ..."""

    def __init__(self, folder: Path | None = None, **keys: Any) -> None:
        self.experiment: Experiment = quick(**{"model": "tiny_data:feature_model", **keys})
        torch.set_num_threads(self.experiment.threads)
        self.federation = build_federation(
            self.experiment, data.load_dataset(self.experiment.data), torch.device("cpu")
        )
        # As it was built: the local_training's own module is trained in.
        built = self.federation.local_training.module.state_dict()
        self.initial = ArrayRecord({k: messages.widen_bfloat16(v.clone()) for k, v in built.items()})
        self.names = sorted(self.federation.clients)
        self.folder = folder
        self.app = ClientApp()
        self.app.train()(self.train)
        self.app.evaluate()(self.evaluate)
        self.app.query()(self.query)

    def train(self, message: Message, context: Context) -> Message:
        name, local_training = self.names[context.node_config["partition-id"]], self.federation.local_training
        return client.train(
            message, context, local_training, name, domain=self.federation.client_domains[name], folder=self.folder
        )

    def query(self, message: Message, context: Context) -> Message:
        return client.introduce(message, context, self.names[context.node_config["partition-id"]])

    def evaluate(self, message: Message, context: Context) -> Message:
        name, local_training = self.names[context.node_config["partition-id"]], self.federation.local_training
        domain = self.federation.client_domains[name]
        residents = [n for n in self.names if self.federation.client_domains[n] == domain]
        tests, share = self.federation.tests[domain], slice(residents.index(name), None, len(residents))
        test = Split(tests.images[share], tests.labels[share])
        return client.evaluate(message, context, local_training, test, name, domain=domain, folder=self.folder)

    def grid(self, spoil: Spoil | None = None, first: int = 100) -> LocalGrid:
        return LocalGrid(self.app, {first + i: {"partition-id": i} for i in range(len(self.names))}, spoil)

    def strategy(self, **settings: Any) -> FairStrategy:
        keys = {
            "model": self.federation.local_training.layout,
            "seed": self.experiment.seed,
            "clients": len(self.names),
        }
        return FairStrategy(self.experiment.resolved_method, **keys | settings)

    def run(self, spoil: Spoil | None = None, **settings: Any) -> FairStrategy:
        strategy = self.strategy(**settings)
        strategy.start(self.grid(spoil), self.initial, num_rounds=self.experiment.rounds)
        return strategy
