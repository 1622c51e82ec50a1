"""Stages: each fills in a part of the draft, and its state is passed in and out.

A stage gives a *mask* (which entries count) or *weights* (who counts how much), or both. `chain` runs masks before
weights whatever the order they are named in, since weights may depend on what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedheal.aggregate.draft import Draft
from fedheal.core.layout import Layout
from fedheal.core.state import Nothing, State, expect


@dataclass(frozen=True)
class Stage:
    """One part of an aggregator."""

    init: Callable[[Layout], State]  # before the first round
    apply: Callable[[Draft, State], tuple[Draft, State]]  # for one round
    needs: frozenset[str] = frozenset()  # client metrics it must be given; "domain" stands for the clients' domains
    gives: frozenset[str] = frozenset({"weights"})  # "weights", "mask", both, or nothing if the stage only reports
    parts: tuple[Stage, ...] | None = None  # the stages of a chain in the order they run; None if this is no chain


def stateless(apply: Callable[[Draft], Draft], needs: frozenset[str] = frozenset()) -> Stage:
    """Return a stage that gives weights and remembers nothing."""
    return Stage(lambda layout: Nothing(), lambda draft, state: (apply(draft), expect(state, Nothing)), needs)


@dataclass(frozen=True)
class ChainState(State, kind="chain"):
    """The states of a chain's stages, in the order they run."""

    states: tuple[State, ...]


def chain(*stages: Stage) -> Stage:
    """Run stages one after another, masks first, as one flat chain; no stage at all means FedAvg's weights and no mask.

    Raises:
        ValueError: Two stages give weights, or two give a mask.
    """
    flat = [part for stage in stages for part in ((stage,) if stage.parts is None else stage.parts)]
    for what, why in (("weights", "who counts how much"), ("mask", "which entries count")):
        if sum(what in stage.gives for stage in flat) > 1:
            raise ValueError(f"two of these stages give {what}: only one can decide {why}")
    parts = tuple(sorted(flat, key=lambda stage: "weights" in stage.gives))

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        states = expect(state, ChainState).states
        if len(states) != len(parts):
            raise ValueError(
                f"this state has {len(states)} parts, the aggregator {len(parts)}: it was made by another one"
            )
        after = []
        for stage, before in zip(parts, states, strict=True):
            draft, new = check_returned("stage", stage.apply(draft, before), Draft, State)
            after.append(new)
        return draft, ChainState(tuple(after))

    needs = frozenset[str]().union(*(stage.needs for stage in parts))
    gives = frozenset[str]().union(*(stage.gives for stage in parts))
    return Stage(lambda layout: ChainState(tuple(stage.init(layout) for stage in parts)), apply, needs, gives, parts)


def check_returned(what: str, value: object, *types: type) -> Any:
    """Return what a user's stage or reducer returned. Raise ValueError unless it is a tuple of these types."""
    values = value if isinstance(value, tuple) else (value,)
    if len(values) != len(types) or not all(map(isinstance, values, types)):
        expected = " and a ".join(kind.__name__ for kind in types)
        actual = " and a ".join(type(item).__name__ for item in values)
        raise ValueError(f"a {what} must return a {expected}, got a {actual}")
    return values
