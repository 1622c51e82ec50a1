"""Our server optimisers against Flower's own strategies, which were written independently."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAdagrad, FedAvg, FedAvgM, FedYogi

from fedheal import methods
from fedheal.core.layout import Packed


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("fedyogi:eta=0.1", FedYogi(eta=0.1)),
        ("fedadagrad:eta=0.1", FedAdagrad(eta=0.1)),
        ("fedavgm:eta=0.5", FedAvgM(server_learning_rate=0.5, server_momentum=0.9)),
    ],
)
def test_five_rounds_are_those_of_flower(name, strategy, monkeypatch):
    monkeypatch.setattr(FedAvg, "aggregate_train", lambda self, number, aggregated: (aggregated, None))
    chance = np.random.default_rng(0)
    theirs, server = chance.normal(size=7), methods.get(name).server
    ours, state = Packed(torch.tensor(theirs), torch.empty(0), torch.empty(0)), server.init()
    for number in range(1, 6):
        delta = chance.normal(size=7) * 10.0 ** chance.integers(-4, 2, size=7)
        strategy.current_arrays = {"w": theirs} if name[:7] != "fedavgm" else ArrayRecord({"w": Array(theirs)})
        arrays, _ = strategy.aggregate_train(number, ArrayRecord({"w": Array(theirs + delta)}))
        ours, state = server.apply(ours, Packed(ours.params + torch.tensor(delta), ours.buffers, ours.counters), state)
        theirs = arrays["w"].numpy()
        torch.testing.assert_close(ours.params, torch.tensor(theirs), rtol=1e-9, atol=1e-12)
