"""Stages: each fills in a part of the draft, and its state is passed in and out.

A stage gives a *mask* (which entries count) or *weights* (who counts how much), or both. `chain` runs masks before
weights whatever the order they are named in, since weights may depend on what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedheal.aggregate.draft import Draft
from fedheal.aggregate.validate import NonFinite
from fedheal.core.errors import CustomPartError, frame_error, name_if_custom
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
    name: str = ""  # of a user's own stage, for error messages; by default that of `apply`

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or name_if_custom(self.apply))

    def start(self, layout: Layout) -> State:
        """Return the state before the first round. Raise `CustomPartError` if a user's own stage fails."""
        return call_custom("stage", self.name, self.init, layout)  # type: ignore[no-any-return]

    def run(self, draft: Draft, state: State) -> tuple[Draft, State]:
        """Apply the stage and check what it returns. Raise `CustomPartError` if a user's own stage fails."""
        returned = call_custom("stage", self.name, self.apply, draft, state)
        draft, after = check_returned("stage", returned, Draft, State)
        for key in ("weights", "unnormalised_weights"):
            if not isinstance(value := getattr(draft, key), np.ndarray | None):
                draft = replace(draft, **{key: _to_column(key, value)})
        return draft, after


def _to_column(key: str, value: Any) -> Any:
    """Return weights that a stage gave as a list or a tensor as a numpy column."""
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"a stage gave {key} as a {type(value).__name__}: give a numpy array of floats") from None


def call_custom(what: str, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a part of an aggregator. If it is a user's own, with a name, raise `CustomPartError` for what it raises."""
    try:
        return function(*args)
    except (NonFinite, CustomPartError):  # the first is for the aggregator, which then leaves clients out
        raise
    except Exception as error:
        if not name:
            raise
        raise frame_error(what, name, error) from error


def stateless(apply: Callable[[Draft], Draft], needs: frozenset[str] = frozenset()) -> Stage:
    """Return a stage that gives weights and remembers nothing."""

    def apply_to_draft(draft: Draft, state: State) -> tuple[Draft, State]:
        return apply(draft), expect(state, Nothing)

    return Stage(lambda layout: Nothing(), apply_to_draft, needs, name=name_if_custom(apply))


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
            draft, new = stage.run(draft, before)
            after.append(new)
        return draft, ChainState(tuple(after))

    needs = frozenset[str]().union(*(stage.needs for stage in parts))
    gives = frozenset[str]().union(*(stage.gives for stage in parts))
    return Stage(lambda layout: ChainState(tuple(stage.start(layout) for stage in parts)), apply, needs, gives, parts)


def check_returned(what: str, value: object, *types: type) -> Any:
    """Return what a user's stage or reducer returned. Raise ValueError unless it is a tuple of these types."""
    values = value if isinstance(value, tuple) else (value,)
    if len(values) != len(types) or not all(map(isinstance, values, types)):
        expected = " and a ".join(kind.__name__ for kind in types)
        actual = " and a ".join(type(item).__name__ for item in values)
        raise ValueError(f"a {what} must return a {expected}, got a {actual}")
    return values
