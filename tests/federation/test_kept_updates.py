"""What a user's own stage keeps of the updates, whose matrix a federation writes to again in every round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from federation.test_plain_mean import LAYOUT, MODEL, make_reply, read_reply
from fedheal.aggregate import Aggregator, Stage, State, chain
from fedheal.aggregate.server_optimizer import Server
from fedheal.core.state import RunState
from fedheal.federation.cohort import CohortBuilder
from fedheal.federation.replies import ReplyRequirements


@dataclass(frozen=True)
class KeptRows(State, kind="kept-rows"):
    row: Tensor
    column: np.ndarray
    named: Mapping[str, tuple[Tensor, ...]]
    own: Tensor


START = KeptRows(torch.zeros(1), np.zeros(1, np.float32), {}, torch.ones(1))


def test_what_a_stage_keeps_of_the_updates_stays_as_it_left_it() -> None:
    kept: list[State] = []

    def apply(draft, state):
        deltas = draft.updates.deltas
        kept.append(
            KeptRows(deltas[0].clone(), deltas[:, 2].numpy().copy(), {"b": (deltas[-1, 5:].clone(),)}, START.own)
        )
        after = KeptRows(deltas[0], deltas.numpy()[:, 2], {"b": (deltas[-1, 5:],)}, START.own)
        return replace(draft, weights=draft.num_examples), after

    aggregator = Aggregator(chain(Stage(lambda layout: START, apply)))
    builder = CohortBuilder(LAYOUT, ReplyRequirements(max_norm=None), read_reply, budget=None)
    state: Any = aggregator.init(LAYOUT)
    places = set()
    for number in range(3):
        run = RunState(round=number, seed=0, model=MODEL, aggregator=state, server=Server().init())
        replies = [make_reply("a", 2 * number), make_reply("b", 2 * number + 1)]
        updates = builder.build(replies, run, {}).updates
        places.add(updates.deltas.data_ptr())
        if number:
            assert state.stage.states[0] == kept[-1]
            assert state.stage.states[0].own is START.own  # nothing else is copied
        state = aggregator.apply(MODEL, updates, state, donate=True).state
    assert len(places) == 1
