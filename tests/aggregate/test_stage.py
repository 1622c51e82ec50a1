"""Stages of one's own: what they may set, what they report, and which metrics they read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedheal import Layout, Updates
from fedheal.aggregate import Aggregated, Aggregator, Stage, chain, uniform
from fedheal.aggregate.masks.entries import keep_entries
from fedheal.aggregate.registry import STAGES
from fedheal.aggregate.stage import stateless
from fedheal.core.errors import CustomPartError
from fedheal.core.state import Nothing


def make_stage(gives: Any = None, name: str = "mine", **fields: Any) -> Stage:
    """Return a stage that sets these fields of the draft; without `gives`, it has the default."""
    own = {} if gives is None else {"gives": gives}
    return Stage(lambda layout: Nothing(), lambda draft, state: (replace(draft, **fields), state), name=name, **own)


def run(aggregator: Aggregator) -> Aggregated:
    updates = Updates("ab", torch.tensor([[4.0, 1.0], [2.0, 3.0]]), [1, 3], metrics={"steps": [1, 2]})
    return aggregator.apply(torch.zeros(2), updates, aggregator.init(Layout.flat(2)))


WEIGHTS = {"weights": np.array([1.0, 0.0])}


@pytest.mark.parametrize("field", ["gives", "needs"])
@pytest.mark.parametrize(("names", "example"), [("mask", "mask"), (None, ""), (3, "")])
def test_names_in_a_string_or_no_collection_are_rejected(field: str, names: Any, example: str) -> None:
    with pytest.raises(TypeError, match=rf"^{field} = .*: give a set of names, such as frozenset\(\{{'{example}"):
        Stage(lambda layout: Nothing(), lambda draft, state: (draft, state), **{field: names})


def test_any_collection_of_names_is_kept_as_a_frozenset() -> None:
    stage = Stage(lambda layout: Nothing(), lambda draft, state: (draft, state), needs=["loss"], gives={"mask"})
    assert (stage.needs, stage.gives) == (frozenset({"loss"}), frozenset({"mask"}))


def test_unknown_names_in_gives_are_rejected_with_the_known_ones() -> None:
    sentence = (
        r"^gives has 'wieghts' \(did you mean 'weights'\?\): use some of weights, mask, mixture, running, or none$"
    )
    with pytest.raises(ValueError, match=sentence):
        make_stage(frozenset({"wieghts", "mask"}))
    with pytest.raises(ValueError, match=r"^gives has '3': use some of weights"):
        make_stage({3})


@pytest.mark.parametrize(
    ("gives", "fields", "add"),
    [
        ({"mask"}, WEIGHTS, "'weights' or 'mixture', or leave weights to"),
        ({"mask"}, {"unnormalised_weights": np.ones(2)}, "'weights' or 'mixture', or leave unnormalised_weights to"),
        (frozenset(), WEIGHTS, "'weights' or 'mixture', or leave weights to"),
        ({"mask"}, {"running": (np.zeros(0, np.int64), np.zeros(0, np.int64))}, "'running', or leave running to"),
    ],
)
def test_a_stage_that_sets_what_it_does_not_give_is_rejected(gives: Any, fields: dict[str, Any], add: str) -> None:
    for stage in (make_stage(gives, **fields), chain(make_stage(gives, **fields), STAGES["uniform"]())):
        (name,) = fields
        with pytest.raises(CustomPartError) as error:
            run(Aggregator(stage))
        assert (
            str(error.value)
            == f"your stage `mine` set {name}, but its gives = {sorted(gives)}: add {add} another stage"
        )


def test_the_default_of_gives_binds_a_stage_only_beside_others() -> None:
    def keep_all(draft: Any) -> Any:
        return keep_entries(draft, torch.ones(2, 2, dtype=torch.bool))

    stage = stateless(keep_all)
    for alone in (stage, chain(stage)):
        assert run(Aggregator(alone)).model.tolist() == [2.5, 2.5]
    with pytest.raises(
        CustomPartError, match=r"keep_all` set mask, but its gives = \['weights'\]: add 'mask', or leave"
    ):
        run(Aggregator(chain(stage, STAGES["mix"]())))


@pytest.mark.parametrize("gives", [{"weights"}, {"mixture"}, {"weights", "mask"}])
def test_a_stage_may_set_what_it_gives_and_leave_what_others_gave(gives: set[str]) -> None:
    others = [STAGES["fphl"]()] if "mask" not in gives else []
    assert run(Aggregator(chain(make_stage(gives, **WEIGHTS), *others))).weights.tolist() == [1.0, 0.0]
    reporting = make_stage(frozenset(), report={"seen": 1})
    assert run(Aggregator(chain(reporting, STAGES["uniform"]()))).weights.tolist() == [0.5, 0.5]


def test_a_built_in_stage_keeps_working_under_a_users_name() -> None:
    named = replace(STAGES["fedheal"](), name="mine:part")
    assert torch.equal(run(Aggregator(named)).weights, run(Aggregator(STAGES["fedheal"]())).weights)
    assert run(uniform()).weights.tolist() == [0.5, 0.5]


def test_keys_of_a_report_must_be_text() -> None:
    with pytest.raises(CustomPartError) as error:
        run(Aggregator(make_stage(report={"a": 1, 3: 4})))
    assert str(error.value) == "your stage `mine` gave 3 as a key of its report: use text as keys, such as '3'"
    reducer = Aggregator(chain(), lambda draft, weights: (draft.model, {(1, 2): 0}))
    with pytest.raises(
        CustomPartError, match=r"^your reducer `.*` gave \(1, 2\) as a key of its report: use text as keys"
    ):
        run(reducer)


@pytest.mark.parametrize(
    ("read", "sentence"),
    [
        (
            lambda draft: draft.metric("loss"),
            r"the updates have no metric 'loss', only steps: name it in the stage's `needs`, as in "
            r"needs=frozenset\(\{'loss'\}\)",
        ),
        (
            lambda draft: draft.domains,
            r"the updates have no domains: name 'domain' in the stage's `needs`, as in needs=frozenset\(\{'domain'\}\)",
        ),
    ],
)
def test_a_metric_that_is_not_there_is_named_with_needs(read: Any, sentence: str) -> None:
    def apply(draft: Any) -> Any:
        return replace(draft, weights=read(draft))

    with pytest.raises(CustomPartError, match=rf"^your stage `.*apply` raised ValueError: {sentence}"):
        run(Aggregator(stateless(apply)))
