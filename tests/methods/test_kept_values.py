"""What a user's own parts keep between rounds: copies of their own, and nothing that a checkpoint cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedheal
from fedheal import Method, Updates, aggregate
from fedheal.aggregate import Aggregator, Stage, State
from fedheal.core.errors import CustomPartError
from fedheal.core.layout import Layout, Packed
from fedheal.local.term import Term
from tiny_data import quick


class KeepWeights(Term):
    """Keeps the parameters in training themselves, which the next client trains on."""

    def __init__(self, as_copies: bool) -> None:
        self.as_copies, self.slots = as_copies, {}

    def prepare(self, ctx, start):
        if ctx.slot:
            self.slots[ctx.round, ctx.client] = ctx.slot["weights"].clone()
        return start

    def finish(self, ctx, local):
        weights = ctx.params[0]
        return {"weights": weights.detach().clone() if self.as_copies else weights}, {}


def test_a_slot_that_is_the_module_s_own_tensor_stays_as_its_client_left_it() -> None:
    live, copied = KeepWeights(as_copies=False), KeepWeights(as_copies=True)
    for term in (live, copied):
        fedheal.run(quick(method=Method(local=(term,), name="keep")), progress=False)
    assert live.slots.keys() == copied.slots.keys() != set()
    assert all(torch.equal(live.slots[key], copied.slots[key]) for key in copied.slots)
    assert len({weights.flatten()[0].item() for weights in live.slots.values()}) > 1


class KeepReceived(Term):
    """Starts between the model that comes and those that it kept."""

    def prepare(self, ctx, start):
        kept = ctx.slot or {"received": start.params, "local": start.params}
        return replace(start, params=0.5 * start.params + 0.25 * (kept["received"] + kept["local"]))

    def finish(self, ctx, local):
        return {"received": ctx.received.params, "local": local.params}, {"local": local.params}


class ShareModel(Term):
    """Moves to the mean of this round's model and those that it kept."""

    def init(self, layout):
        return {name: torch.zeros(layout.sizes().params) for name in ("model", "before")}

    def absorb(self, before, aggregated, messages, shared, ctx):
        mean = 0.5 * aggregated.params + 0.25 * (shared["model"] + shared["before"])
        return replace(aggregated, params=mean), {"model": mean, "before": before.params}


def keep_models() -> Stage:
    """Return a stage whose weights depend on the models that it kept."""

    def apply(draft, state):
        assert draft.model is not None
        sums = np.array([state.first.abs().sum().item(), state.second.abs().sum().item()])
        weights = draft.num_examples + np.resize(sums, len(draft.rows))
        after = KeptModels(state.rounds + 1, draft.model.params, draft.model.params)
        return replace(draft, weights=weights), after

    return Stage(lambda layout: KeptModels(0, torch.zeros(1), torch.zeros(1)), apply)


@dataclass(frozen=True)
class KeptModels(State, kind="kept-models"):
    rounds: int
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize(
    "make_method",
    [
        lambda: Method(local=(KeepReceived(),), name="received"),
        lambda: Method(local=(ShareModel(),), name="shared"),
        lambda: Method(aggregator=Aggregator(keep_models()), name="models"),
    ],
)
def test_parts_that_keep_a_model_resume_to_the_bit(make_method: Callable[[], Method], tmp_path: Path) -> None:
    class Stop(fedheal.Callback):
        def round(self, record):
            if record.round == 2:
                raise KeyboardInterrupt

    whole = fedheal.run(quick(method=make_method(), rounds=4), tmp_path / "whole", progress=False)
    with pytest.raises(KeyboardInterrupt):
        fedheal.run(quick(method=make_method(), rounds=4), tmp_path / "cut", progress=False, callbacks=[Stop()])
    resumed = fedheal.run(quick(method=make_method(), rounds=4), tmp_path / "cut", progress=False, resume=True)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert models[0] == models[1]
    assert resumed.domains == whole.domains


class KeepNumber(Term):
    def __init__(self, hook: str, value: Any) -> None:
        self.hook, self.value = hook, value

    def init(self, layout):
        return {"x": self.value} if self.hook == "init" else {}

    def broadcast(self, client, shared):
        return {"x": self.value} if self.hook == "broadcast" else {}

    def finish(self, ctx, local):
        return ({"x": self.value} if self.hook == "slot" else {}), ({"x": self.value} if self.hook == "finish" else {})

    def absorb(self, before, aggregated, messages, shared, ctx):
        return aggregated, {"x": self.value} if self.hook == "absorb" else {}


@pytest.mark.parametrize(("hook", "named"), [("init", "init"), ("broadcast", "broadcast"), ("slot", "finish")])
@pytest.mark.parametrize("value", [1.0, np.zeros(2), [torch.zeros(2)]], ids=["float", "numpy", "list"])
def test_values_that_a_checkpoint_cannot_hold_are_named(hook: str, named: str, value: Any) -> None:
    method = Method(local=(KeepNumber(hook, value),), name="number")
    with pytest.raises(CustomPartError, match=rf"KeepNumber`: {named} must return tensors by name, got an? .* as 'x'"):
        fedheal.run(quick(method=method), progress=False)


@pytest.mark.parametrize("hook", ["finish", "absorb"])
def test_so_are_those_of_messages_and_of_the_server(hook: str) -> None:
    method = Method(local=(KeepNumber(hook, 1.0),), name="number")
    with pytest.raises(CustomPartError, match=f"KeepNumber`: {hook} must return tensors by name, got a float as 'x'"):
        fedheal.run(quick(method=method), progress=False)


def test_hooks_may_be_called_by_name() -> None:
    aggregated = Packed(*(torch.zeros(2) for _ in range(3)))
    given = {"before": aggregated, "aggregated": aggregated, "messages": [], "shared": {}, "ctx": None}
    model, shared = KeepNumber("absorb", torch.ones(2)).absorb(**given)
    assert model is aggregated
    assert torch.equal(shared["x"], torch.ones(2))


class ByName(Term):
    """A user's term whose hooks take their arguments by name only."""

    def absorb(self, before, aggregated, messages, *, shared, ctx):
        return aggregated, shared


def test_hooks_may_take_arguments_by_name_only() -> None:
    model, shared = Packed(*(torch.zeros(2) for _ in range(3))), {"x": torch.ones(1)}
    assert ByName().absorb(model, model, [], shared=shared, ctx=None) == (model, shared)


@dataclass(frozen=True)
class WithoutKind(State):
    rounds: int


@dataclass(frozen=True)
class NumpyScalar(State, kind="numpy-scalar"):
    value: np.float64


@dataclass(frozen=True)
class HoldsList(State, kind="holds-list"):
    values: list[int]


@dataclass(frozen=True)
class HasNumbersAsKeys(State, kind="numbers-as-keys"):
    values: Mapping[int, float]


def make_local_state() -> State:
    @dataclass(frozen=True)
    class Inner:
        rounds: int

    @dataclass(frozen=True)
    class Outer(State, kind="refers-to-a-local-class"):
        inner: Inner

    return Outer(Inner(0))


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (WithoutKind(0), r"its state WithoutKind has no kind: declare class WithoutKind\(State, kind='...'\)"),
        (NumpyScalar(np.float64(1)), "its state cannot be saved and read again: .*'value' must be float64, got 1.0"),
        (HoldsList([1]), "its state cannot be saved and read again: a state holds a list in 'values'"),
        (
            HasNumbersAsKeys({1: 2.0}),
            "cannot be saved and read again: a state holds the key 1 in 'values': only strings",
        ),
        (make_local_state(), "cannot be saved and read again: name 'Inner' is not defined"),
        (3, "must return a State, got an? int"),
    ],
)
def test_a_state_that_cannot_be_resumed_is_rejected_before_the_first_round(state: Any, why: str) -> None:
    stage = Stage(lambda layout: state, lambda draft, before: (replace(draft, weights=draft.num_examples), before))
    with pytest.raises(CustomPartError, match=why):
        fedheal.run(quick(method=Method(aggregator=Aggregator(stage), name="stage")), progress=False)


def test_the_new_model_shares_no_memory_with_the_old_one() -> None:
    module = torch.nn.BatchNorm1d(2)
    layout = Layout.of(module)
    model = layout.pack(module.state_dict())
    aggregator = aggregate.fedavg()
    updates = Updates(["a", "b"], torch.ones(2, 4), [1, 1])
    with pytest.warns(UserWarning, match="the updates carry none"):
        new = aggregator.apply(model, updates, aggregator.init(layout)).model
    before = Packed(model.params.clone(), model.buffers.clone(), model.counters.clone())
    for part in (new.params, new.buffers, new.counters):
        part += 1
    assert all(torch.equal(getattr(model, name), getattr(before, name)) for name in ("params", "buffers", "counters"))
