"""The law of total variance for running statistics: by hand, against pooled data, and where it does not apply."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedheal import Layout, Updates, methods

MODULE = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.BatchNorm1d(1))
LAYOUT = Layout.of(MODULE)  # buffers: mean, variance, mean, variance


def aggregate_buffers(name, buffers, examples, module=MODULE, layout=LAYOUT):
    aggregator, packed = methods.get(name).aggregator, layout.pack(module.state_dict())
    k = len(buffers)
    counters = packed.counters.expand(k, -1)
    updates = Updates([*"abcdef"[:k]], torch.zeros(k, len(packed.params)), examples, torch.tensor(buffers), counters)
    return aggregator.apply(packed, updates, aggregator.init(layout)).model.buffers


def test_by_hand():
    """Means 0 and 4 with weights 1/4 and 3/4 have the mean 3 and the variance 9/4 + 3/4 = 3; variances 2 and 6 the mean 5."""
    buffers = [[0.0, 2.0, 1.0, 7.0], [4.0, 6.0, 1.0, 7.0]]
    assert aggregate_buffers("fedavg", buffers, [1, 3]).tolist() == [3, 5, 1, 7]
    assert aggregate_buffers("total-variance", buffers, [1, 3]).tolist() == [3, 8, 1, 7]
    assert aggregate_buffers("uniform+total-variance", buffers, [1, 3]).tolist() == [2, 8, 1, 7]  # 4 and 4


def test_it_is_the_variance_of_all_data():
    rng = np.random.default_rng(0)
    data = [rng.normal(mean, scale, size) for mean, scale, size in ((0, 1, 30), (5, 2, 50), (-3, 0.5, 20))]
    buffers = [[x.mean(), x.var(), 0.0, 1.0] for x in data]
    got = aggregate_buffers("total-variance", np.array(buffers, np.float32).tolist(), [len(x) for x in data])
    pooled = np.concatenate(data)
    np.testing.assert_allclose(got[:2], [pooled.mean(), pooled.var()], rtol=1e-6)


def test_equal_means_give_the_plain_average():
    buffers = [[3.0, 2.0, 1.0, 7.0], [3.0, 6.0, 1.0, 5.0]]
    assert torch.equal(
        aggregate_buffers("total-variance", buffers, [1, 3]), aggregate_buffers("fedavg", buffers, [1, 3])
    )


def test_a_layer_with_two_names_and_buffers_of_other_kinds_count_once_or_not_at_all():
    norm = nn.BatchNorm1d(1)
    module = nn.ModuleDict({"a": nn.Linear(1, 1), "first": norm, "again": norm})
    module.register_buffer("other", torch.zeros(1))
    layout = Layout.of(module)
    places = {e.name: e.start for e in layout.entries if e.kind == "buffer"}
    rows = torch.zeros(2, 3)
    rows[:, places["first.running_mean"]] = torch.tensor([-1.0, 1.0])
    rows[:, places["other"]] = torch.tensor([-1.0, 1.0])
    got = aggregate_buffers("total-variance", rows.tolist(), [1, 1], module, layout)
    assert got[places["first.running_var"]] == 1  # not 2
    assert got[places["other"]] == 0


def test_models_without_running_statistics_are_averaged_as_ever():
    module = nn.Linear(1, 1)
    layout, aggregator = Layout.of(module), methods.get("total-variance").aggregator
    updates = Updates(["a", "b"], torch.tensor([[1.0, 0.0], [3.0, 0.0]]), [1, 1])
    packed = layout.pack({"weight": torch.zeros(1, 1), "bias": torch.zeros(1)})
    assert aggregator.apply(packed, updates, aggregator.init(layout)).model.params.tolist() == [2, 0]


def test_the_released_variant_is_refused():
    with pytest.raises(ValueError, match="variant=released moves running statistics like parameters"):
        methods.get("fedheal:variant=released+total-variance")
