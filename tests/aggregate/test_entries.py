"""A mask from booleans: the mean of what each client keeps, whatever kernel, weights and variant go with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedheal import Layout, Packed, Updates
from fedheal.aggregate import Aggregator, BadUpdate, Stage, chain
from fedheal.aggregate.masks.entries import keep_entries
from fedheal.aggregate.presets import get_reducer
from fedheal.aggregate.registry import STAGES
from fedheal.core.errors import CustomPartError
from fedheal.core.state import Nothing

MODULE = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.BatchNorm1d(16))
LAYOUT = Layout.of(MODULE)
SIZES = LAYOUT.sizes()
CHANCE = torch.Generator().manual_seed(0)
DELTAS = torch.randn(3, SIZES.params, generator=CHANCE)
DELTAS[0, 0] = 0.0
KEPT = torch.rand(3, SIZES.params, generator=CHANCE) < 0.6
KEPT[:, 1] = False
BUFFERS = torch.rand(3, SIZES.buffers, generator=CHANCE)
UPDATES = Updates("cab", DELTAS, [1, 2, 3], BUFFERS, torch.ones(3, 1, dtype=torch.int64))


def make_mask_stage(kept: torch.Tensor) -> Stage:
    """Return a stage that masks with `kept`, whose rows are in the order of `UPDATES`."""
    return Stage(
        lambda layout: Nothing(),
        lambda draft, state: (keep_entries(draft, kept[torch.from_numpy(draft.rows)]), state),
        gives=frozenset({"mask"}),
    )


def make_model() -> Packed:
    return LAYOUT.pack(MODULE.state_dict())


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("variant", ["paper", "released"])
def test_the_mean_is_over_what_each_client_keeps(kernel: str, variant: str) -> None:
    """W + sum u k D / sum u k with u = N / sum N, and W where nobody keeps; buffers are kept by all."""
    aggregator = Aggregator(make_mask_stage(KEPT), get_reducer(variant), kernel=kernel)
    out = aggregator.apply(make_model(), UPDATES, aggregator.init(LAYOUT))
    u = torch.tensor([1.0, 2.0, 3.0])[:, None] / 6
    total = (u * KEPT).sum(0)
    step = torch.where(total > 0, (u * KEPT * DELTAS).sum(0) / total.clamp(min=1e-9), 0.0)
    torch.testing.assert_close(out.model.params, make_model().params + step)
    torch.testing.assert_close(out.model.buffers, (u * BUFFERS).sum(0))
    assert out.report["kept"] == pytest.approx(dict(zip("cab", KEPT.double().mean(1).tolist(), strict=True)))
    assert out.report["unkept"] == pytest.approx(float((total == 0).double().mean()))


def test_fael_measures_what_is_kept() -> None:
    stage = chain(make_mask_stage(KEPT), STAGES["fael"]())
    aggregator = Aggregator(stage)
    out = aggregator.apply(make_model(), UPDATES, aggregator.init(LAYOUT))
    distances = ((KEPT * DELTAS).double() ** 2).sum(1)
    assert out.report["distance"] == pytest.approx(dict(zip("cab", distances.tolist(), strict=True)))


def test_bad_updates_and_bad_masks_are_refused() -> None:
    bad_deltas = DELTAS.clone()
    bad_deltas[1, 4] = np.nan
    aggregator = Aggregator(make_mask_stage(KEPT))
    with pytest.raises(BadUpdate, match="client 'a': its update holds NaN"):
        aggregator.apply(make_model(), replace_deltas(bad_deltas), aggregator.init(LAYOUT))
    skipping = replace(aggregator, on_bad_update="skip")
    out = skipping.apply(make_model(), replace_deltas(bad_deltas), skipping.init(LAYOUT))
    assert list(out.report["skipped"]) == ["a"]
    assert bool(out.model.params.isfinite().all())
    for kept in (KEPT[:, :-1], KEPT.float()):
        wrong = Aggregator(make_mask_stage(kept))
        with pytest.raises(CustomPartError, match=r"kept is torch\.\w+ of shape .*: give booleans of shape \(3, \d+\)"):
            wrong.apply(make_model(), UPDATES, wrong.init(LAYOUT))


def replace_deltas(deltas: torch.Tensor) -> Updates:
    return Updates(UPDATES.clients, deltas, UPDATES.num_examples, UPDATES.buffers, UPDATES.counters)
