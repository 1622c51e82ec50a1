"""Stages compose: each fills in a part of the draft, state passed in and out; an aggregator runs them and averages.

A stage either gives a *mask* (which entries count) or *weights* (who counts how much). `chain` runs masks before
weights whatever the order they are named in, since weights may depend on what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedheal.aggregate import kernels, reduce
from fedheal.aggregate.draft import Draft
from fedheal.aggregate.validate import BadUpdate, flaws
from fedheal.core.arrays import Floats, normalised, tensor_of
from fedheal.core.layout import Layout, Packed, Sizes
from fedheal.core.state import Arrays, Json, Nothing, State, expect, kind, nested, unnested
from fedheal.core.updates import Updates

Reducer = Callable[[Draft, Floats], tuple[Packed, dict[str, Any]]]


@dataclass(frozen=True)
class Stage:
    """`init(layout) -> state`; `apply(draft, state) -> draft, state`; `needs` names the client metrics it must be given."""

    init: Callable[[Layout], State]
    apply: Callable[[Draft, State], tuple[Draft, State]]
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset({"weights"})  # "weights", "mask", or both


def stateless(apply: Callable[[Draft], Draft], needs: frozenset[str] = frozenset()) -> Stage:
    """A stage that gives weights and remembers nothing."""
    return Stage(lambda layout: Nothing(), lambda draft, state: (apply(draft), expect(state, Nothing)), needs)


@kind("chain")
@dataclass(frozen=True)
class ChainState(State):
    states: tuple[State, ...]

    def _write(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        arrays, json = nested({str(i): state for i, state in enumerate(self.states)})
        return arrays, {"length": len(self.states), **json}

    @classmethod
    def _read(cls, arrays: Arrays, json: Json) -> ChainState:
        return cls(tuple(unnested(str(i), arrays, json) for i in range(json["length"])))


def chain(*stages: Stage) -> Stage:
    """These stages one after another, masks first; at most one may give weights, and one a mask."""
    for what, why in (("weights", "who counts how much"), ("mask", "which entries count")):
        if sum(what in stage.gives for stage in stages) > 1:
            raise ValueError(f"two of these stages give {what}: only one can decide {why}")
    ordered = sorted(stages, key=lambda stage: "weights" in stage.gives)

    def init(layout: Layout) -> State:
        return ChainState(tuple(stage.init(layout) for stage in ordered))

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        states = expect(state, ChainState).states
        if len(states) != len(ordered):
            raise ValueError(
                f"this state has {len(states)} parts, the aggregator {len(ordered)}: it was made by another one"
            )
        after = []
        for stage, before in zip(ordered, states, strict=True):
            draft, new = _pair("stage", stage.apply(draft, before), Draft, State)
            after.append(new)
        return draft, ChainState(tuple(after))

    needs = frozenset[str]().union(*(stage.needs for stage in stages))
    return Stage(init, apply, needs, frozenset[str]().union(*(stage.gives for stage in stages)))


@kind("aggregator")
@dataclass(frozen=True)
class AggregatorState(State):
    """Everything an aggregator remembers, and what it keeps of the layout."""

    sizes: Sizes
    stage: State

    def _write(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        arrays, json = nested({"stage": self.stage})
        sizes = {
            "tensors": [list(t) for t in self.sizes.tensors],
            "buffers": self.sizes.buffers,
            "counters": self.sizes.counters,
        }
        return arrays, {"sizes": sizes, **json}

    @classmethod
    def _read(cls, arrays: Arrays, json: Json) -> AggregatorState:
        sizes = json["sizes"]
        tensors = tuple((str(name), int(length)) for name, length in sizes["tensors"])
        return cls(Sizes(tensors, sizes["buffers"], sizes["counters"]), unnested("stage", arrays, json))


@dataclass(frozen=True)
class Aggregated:
    """What a round's aggregation gives. `weights [K]` follow `updates.clients`; a skipped client's is 0.

    `unnormalised_weights [K]` are the weights before they are normalised over this cohort: they can be compared between rounds.
    `model` is of the kind that was given. `report` is JSON-ready: `skipped` clients with the reason, and what the stages
    have to tell (distances, kept fractions, ...).
    """

    model: Any
    weights: Tensor
    unnormalised_weights: Tensor
    state: AggregatorState
    report: dict[str, Any]


@dataclass(frozen=True)
class Aggregator:
    """Stages and a reducer as one pure function of arrays.

    `on_bad_update`: with `"raise"` a bad update is an error, with `"skip"` its client counts as absent.
    `kernel`: `"auto"`, `"reference"`, `"cpu"` or `"cuda"`.
    """

    stage: Stage
    reduce: Reducer = reduce.mean
    on_bad_update: str = "raise"
    kernel: str = "auto"

    def __post_init__(self) -> None:
        if self.on_bad_update not in ("raise", "skip"):
            raise ValueError(f"on_bad_update = {self.on_bad_update!r}: use 'raise' or 'skip'")
        kernels.check(self.kernel)

    def init(self, layout: Layout) -> AggregatorState:
        """The state before the first round."""
        return AggregatorState(layout.sizes(), self.stage.init(layout))

    def apply(self, model: Any, updates: Updates, state: AggregatorState, donate: bool = False) -> Aggregated:
        """One round: the new global model from the old one and a cohort's updates.

        `model` is a `Packed`, or just the flat parameters as a tensor or numpy array. Inputs are never changed, except
        that `donate=True` may reuse the old state's buffers: that state must not be used again, whatever comes of the round.
        """
        packed = _packed(model, updates, expect(state, AggregatorState).sizes)
        bad = flaws(updates, state.sizes, self.stage.needs)
        while True:
            if bad and self.on_bad_update == "raise":
                raise BadUpdate({updates.clients[row]: why for row, why in bad.items()})
            good = (row for row in range(len(updates.clients)) if row not in bad)
            rows = np.array(sorted(good, key=lambda row: updates.clients[row]), np.int64)
            skipped = dict(updates.refused) | {updates.clients[row]: why for row, why in bad.items()}
            if len(rows) == 0:
                return _unmoved(model, packed, updates, state, skipped)
            kernel = kernels.choose(self.kernel, updates.deltas)
            try:
                begun = Draft(state.sizes, packed, updates, rows, kernel, donate)
                draft, after = _pair("stage", self.stage.apply(begun, state.stage), Draft, State)
                weights, unnormalised_weights = _weights(draft)
                if not weights.any():
                    return _unmoved(model, packed, updates, replace(state, stage=after), skipped)
                made, told = _pair("reducer", self.reduce(draft, weights), Packed, Mapping)
                _check_made(made, packed, updates, rows)
            except kernels.NonFinite as found:
                bad |= dict.fromkeys(found.rows, "its update holds NaN, infinity or numbers too large to square")
                continue
            report = {"skipped": skipped, **draft.report, **told}
            columns = _spread(updates, rows, weights), _spread(updates, rows, unnormalised_weights)
            return Aggregated(_like(model, made), *columns, replace(state, stage=after), report)


def _pair(what: str, given: object, *kinds: type) -> Any:
    """What a stage or a reducer returned; it may be somebody's own."""
    found = given if isinstance(given, tuple) else (given,)
    if len(found) != len(kinds) or not all(map(isinstance, found, kinds)):
        wanted, is_ = (
            " and a ".join(names) for names in ([k.__name__ for k in kinds], [type(f).__name__ for f in found])
        )
        raise ValueError(f"a {what} returned a {is_}; a {wanted} are needed")
    return found


def _check_made(made: Packed, before: Packed, updates: Updates, rows: NDArray[np.int64]) -> None:
    """The global model never becomes non-finite: the clients at fault are named, or else it is an overflow.

    An overflow is never skipped: the stages have counted these updates already, and each of them may be sound.
    """
    for name in ("params", "buffers"):
        if not reduce.finite(getattr(made, name)):
            kernels.reference.check_finite(updates.deltas, rows)
            dtype = getattr(made, name).dtype
            alone = [updates.clients[row] for row in rows if not _fits(before.params, updates.deltas[row])]
            whose = f"; the models of {', '.join(map(repr, alone))} do not fit it by themselves" if alone else ""
            raise ValueError(f"this round would make the global model's {name} overflow {dtype}{whose}")


def _fits(params: Tensor, delta: Tensor) -> bool:
    """Whether a client's own model can be told in the dtype of the global one."""
    return reduce.finite((params.to(torch.float64) + delta.to(params.device, torch.float64)).to(params.dtype))


def _weights(draft: Draft) -> tuple[Floats, Floats]:
    """The weights the stages gave, or this round's examples where none gave any: as shares, and as they stand."""
    weights = draft.num_examples if draft.weights is None else draft.weights
    unnormalised_weights = weights if draft.unnormalised_weights is None else draft.unnormalised_weights
    for given in (weights, unnormalised_weights):
        if given.shape != draft.rows.shape or not np.isfinite(given).all() or (given < 0).any():
            raise ValueError(
                f"a stage gave weights {given}: {len(draft.rows)} finite numbers, none negative, are needed"
            )
    return normalised(weights), unnormalised_weights


def _packed(model: Any, updates: Updates, sizes: Sizes) -> Packed:
    """The model as vectors, checked against the state's sizes."""
    if isinstance(model, Packed):
        packed = model
    else:
        params = tensor_of(model, "model") if isinstance(model, np.ndarray) else model
        if not isinstance(params, Tensor):
            raise TypeError(
                f"model is a {type(model).__name__}: give a Packed, or the flat parameters as tensor or array"
            )
        if updates.buffers is not None or updates.counters is not None:
            raise ValueError("the updates carry buffers or counters but the model is a flat vector: give a Packed")
        none = torch.empty(0, dtype=params.dtype), torch.empty(0, dtype=torch.int64)
        packed = Packed(params.detach(), *none)
        sizes = replace(sizes, buffers=0, counters=0)
    expected = {"params": sizes.params, "buffers": sizes.buffers, "counters": sizes.counters}
    for name, length in expected.items():
        vector = getattr(packed, name)
        if vector.shape != (length,):
            raise ValueError(
                f"the model's {name} have shape {tuple(vector.shape)}; this aggregator's state has {length} of them"
            )
    if not packed.params.is_floating_point():
        raise ValueError(f"the model's parameters are {packed.params.dtype}, not floating point")
    for name in ("params", "buffers"):
        if not reduce.finite(getattr(packed, name)):
            raise ValueError(f"the global model's {name} hold NaN or infinity already: start from a sound one")
    if updates.clients and packed.params.device != updates.deltas.device:  # the updates of nobody are nowhere
        raise ValueError(f"the model is on {packed.params.device}, the updates are on {updates.deltas.device}")
    return packed


def _unmoved(
    model: Any, packed: Packed, updates: Updates, state: AggregatorState, skipped: dict[str, str]
) -> Aggregated:
    """Nobody's update counts: the model as it was, in memory of its own."""
    same = Packed(packed.params.clone(), packed.buffers.clone(), packed.counters.clone())
    nothing = torch.zeros(len(updates.clients), dtype=torch.float64)
    return Aggregated(_like(model, same), nothing, nothing.clone(), state, {"skipped": skipped})


def _like(given: Any, packed: Packed) -> Any:
    """`packed` as the kind that was given."""
    if isinstance(given, Packed):
        return packed
    return packed.params.numpy() if isinstance(given, np.ndarray) else packed.params


def _spread(updates: Updates, rows: NDArray[np.int64], weights: Floats) -> Tensor:
    spread = torch.zeros(len(updates.clients), dtype=torch.float64)
    spread[torch.from_numpy(rows)] = torch.from_numpy(weights)
    return spread
