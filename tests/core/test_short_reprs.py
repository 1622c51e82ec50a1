"""What a notebook shows of large objects fits on a line: names and sizes, no values, functions or addresses."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fedheal import Layout, Updates, aggregate, methods
from fedheal.aggregate import Aggregator, Stage
from fedheal.core.state import Nothing
from fedheal.data.domains import Domain, Domains, Split

MODULE = nn.BatchNorm1d(16)
LAYOUT = Layout.of(MODULE)
MODEL = LAYOUT.pack(MODULE.state_dict())
PACKED = "Packed(params=float32[32], buffers=float32[32], counters=int64[1], device='cpu')"


def trim(draft, state):
    return draft, state


def test_a_model_and_a_result_show_sizes_and_weights() -> None:
    assert repr(MODEL) == PACKED
    aggregator = aggregate.fedavg()
    updates = Updates.from_modules(MODULE, {"a": (copy.deepcopy(MODULE), 1), "b": (copy.deepcopy(MODULE), 3)})
    out = aggregator.apply(MODEL, updates, aggregator.init(LAYOUT))
    assert repr(out) == f"Aggregated(model={PACKED}, weights=[0.25, 0.75], report={list(out.report)})"
    flat = aggregator.apply(torch.zeros(2), Updates(["a"], torch.ones(1, 2), [1]), aggregator.init(Layout.flat(2)))
    assert repr(flat).startswith("Aggregated(model=Tensor[2], weights=[1.], report=['skipped'")


def test_an_aggregator_shows_its_stages_by_name() -> None:
    own = Stage(lambda layout: Nothing(), trim, needs=frozenset({"loss"}))
    assert repr(Aggregator(aggregate.chain(own))) == (
        f"Aggregator(chain(Stage('{__name__}:trim', gives=['weights'], needs=['loss'])), "
        "reduce=mean, on_bad_update='raise', kernel='auto')"
    )
    for name in methods.names():
        text = repr(methods.get(name).aggregator)
        assert len(text) < 300
        assert "0x" not in text
        assert "<" not in text
    assert "Stage('uniform_weights', gives=['weights'])" in repr(aggregate.uniform())


def test_data_show_their_domains_and_numbers_of_images() -> None:
    split = Split(torch.zeros(6, 3, 16, 16, dtype=torch.uint8), torch.zeros(6, dtype=torch.int64))
    data = Domains("days", ("a", "b"), (Domain("mon", split, split), Domain("tue", split, split)), (1, 1), (0, 0))
    assert repr(data) == "Domains('days', 2 classes, train + test images of mon: 6 + 6, tue: 6 + 6)"
