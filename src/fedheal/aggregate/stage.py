"""Stages: each fills in a part of the draft, and its state is passed in and out.

A stage gives a *mask* (which entries count) or *weights* (who counts how much), or both. A *mixture* changes the
weights of another stage, and *running* statistics may have an average of their own. `chain` runs masks before weights
and weights before mixtures, whatever the order they are named in: each depends on the one before.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from fedheal.aggregate.draft import CountMask, Draft, SoftMask
from fedheal.aggregate.validate import BadRows
from fedheal.core.arrays import Floats
from fedheal.core.checks import check_type
from fedheal.core.errors import (
    CustomPartError,
    add_article,
    check_returned,
    frame_error,
    name_if_custom,
    name_part,
    suggest,
)
from fedheal.core.layout import Layout
from fedheal.core.state import Nothing, State, expect
from fedheal.core.updates import Updates

# What stages give, and what each decides; only one stage can.
GIVEN = {
    "weights": "who counts how much",
    "mask": "which entries count",
    "mixture": "how weights are mixed",
    "running": "how running statistics are averaged",
}
DEFAULT_GIVES = frozenset({"weights"})
# Fields of a draft that only one stage can set, and what a stage that sets them must give: one of these.
GIVEN_BY_FIELD = {
    "weights": ("weights", "mixture"),
    "unnormalised_weights": ("weights", "mixture"),
    "mask": ("mask",),
    "running": ("running",),
}


@dataclass(frozen=True)
class Stage:
    """One part of an aggregator.

    Attributes:
        init: Returns the state before the first round, given the layout.
        apply: Fills in the draft of one round; returns it with the new state.
        needs: The client metrics it must be given; "domain" stands for the clients' domains.
        gives: Some of `GIVEN`, or nothing if the stage only reports.
        parts: The stages of a chain in the order they run; None if this is no chain.
        name: The name of a user's own stage, for error messages; by default that of `apply`.
    """

    init: Callable[[Layout], State]
    apply: Callable[[Draft, State], tuple[Draft, State]]
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = DEFAULT_GIVES
    parts: tuple[Stage, ...] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        needs, gives = _to_names("needs", self.needs, "loss"), _to_names("gives", self.gives, "mask")
        for name in sorted(map(str, gives - GIVEN.keys())):
            raise ValueError(f"gives has '{name}'{suggest(name, list(GIVEN))}: use some of {', '.join(GIVEN)}, or none")
        own = {"needs": needs, "gives": gives, "name": self.name or name_if_custom(self.apply)}
        for field, value in own.items():
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        """Return the name and what the stage gives and needs, without functions; a chain has its stages."""
        if self.parts is not None:
            return f"chain({', '.join(map(repr, self.parts))})"
        name = self.name or self.apply.__qualname__.partition(".")[0]
        needs = f", needs={sorted(self.needs)}" if self.needs else ""
        return f"Stage({name!r}, gives={sorted(self.gives)}{needs})"

    def start(self, layout: Layout) -> State:
        """Return the state before the first round. Raise `CustomPartError` if a user's own stage fails."""
        state = call_custom("stage", self.name, self.init, layout)
        if self.name:
            _check_saveable(name_part("stage", self.name), state)
        return state  # type: ignore[no-any-return]

    def run(self, draft: Draft, state: State, is_alone: bool = True) -> tuple[Draft, State]:
        """Apply the stage and check what it returns. Raise `CustomPartError` if a user's own stage fails.

        The default of `gives` is no promise of a stage that is alone, since it can overrule no other.
        """
        returned = call_custom("stage", self.name, self.apply, draft, state)
        part = name_part("stage", self.name)
        made, after = check_returned(part, returned, Draft, State)
        if not self.parts:  # a chain's stages are checked one by one
            is_bound = self.name and not (is_alone and self.gives == DEFAULT_GIVES)
            made = _check_draft(part, draft, made, self.gives if is_bound else frozenset(GIVEN))
        if self.name:
            after = call_custom("stage", self.name, _copy_rows, after, draft.updates)
        return made, after


def _to_names(field: str, names: Collection[str], example: str) -> frozenset[str]:
    """Return a set of names. Raise TypeError if it is no collection, or a string, whose letters would be the names."""
    if isinstance(names, str) or not isinstance(names, Collection):
        example = names if isinstance(names, str) else example
        raise TypeError(f"{field} = {names!r}: give a set of names, such as frozenset({{{example!r}}})")
    return frozenset(names)


def _check_saveable(part: str, state: Any) -> None:
    """Raise `CustomPartError` unless a checkpoint can hold a user's state: a run that cannot resume should not begin."""
    check_returned(part, state, State)
    if not state.kind:
        name = type(state).__name__
        raise CustomPartError(f"{part}: its state {name} has no kind: declare class {name}(State, kind='...')")
    try:
        _rebuild(*state.to_arrays())
    except (TypeError, ValueError, NameError) as error:  # the last for a class that is local to a function
        raise CustomPartError(f"{part}: its state cannot be saved and read again: {error}") from None


def _copy_rows(state: State, updates: Updates) -> State:
    """Return the state with copies of what it keeps of the matrix of updates: the next round may write there again."""
    if "deltas" not in vars(updates):  # nobody has read them
        return state
    memory = updates.deltas.untyped_storage()
    arrays, described = state.to_arrays()
    rows = {name: a for name, a in arrays.items() if 0 <= a.data_ptr() - memory.data_ptr() < memory.nbytes()}
    return _rebuild(arrays | {name: a.clone() for name, a in rows.items()}, described) if rows else state


def _rebuild(arrays: Mapping[str, Tensor], described: Mapping[str, Any]) -> Any:
    """Return the state as a checkpoint would give it back."""
    return State.from_arrays(arrays, json.loads(json.dumps(described)))


def _check_draft(part: str, before: Draft, draft: Draft, gives: frozenset[str]) -> Draft:
    """Return a stage's draft with weights as numpy columns. Raise `CustomPartError` if a field that it filled in is wrong."""
    for field, kinds in GIVEN_BY_FIELD.items():
        if getattr(draft, field) is not getattr(before, field) and gives.isdisjoint(kinds):
            remedy = f"add {' or '.join(map(repr, kinds))}, or leave {field} to another stage"
            raise CustomPartError(f"{part} set {field}, but its gives = {sorted(gives)}: {remedy}")
    mask: Any = draft.mask  # by its type it cannot be wrong, but a user's stage may be unchecked
    if not isinstance(mask, CountMask | SoftMask | None):
        kind = add_article(type(mask).__name__)
        remedy = "use keep_entries(draft, kept) of fedheal.aggregate.masks.entries for booleans"
        raise CustomPartError(f"{part} gave {kind} as mask: {remedy}")
    step, length = draft.step, draft.sizes.params
    if step is not None and not (isinstance(step, Tensor) and step.shape == (length,)):
        actual = f"shape {tuple(step.shape)}" if isinstance(step, Tensor) else add_article(type(step).__name__)
        raise CustomPartError(f"{part} must give a tensor of shape ({length},) as step, got {actual}")
    check_report(part, draft.report)
    for key in ("weights", "unnormalised_weights"):
        value = getattr(draft, key)
        if value is None or value is getattr(before, key):
            continue
        column = _to_column(part, key, value)
        if column.shape != draft.rows.shape or not np.isfinite(column).all() or (column < 0).any():
            wanted = f"{len(draft.rows)} finite, non-negative {key}"
            raise CustomPartError(f"{part} must give {wanted}, got {_shorten(column)}")
        draft = draft if column is value else replace(draft, **{key: column})
    return draft


def check_report(part: str, report: Any) -> None:
    """Raise `CustomPartError` unless the report of a part is a dictionary with text as keys."""
    if not isinstance(report, Mapping):
        raise CustomPartError(f"{part} must give a dictionary as report, got {add_article(type(report).__name__)}")
    for key in report:
        if not isinstance(key, str):
            raise CustomPartError(f"{part} gave {key!r} as a key of its report: use text as keys, such as {str(key)!r}")


def _to_column(part: str, key: str, value: Any) -> Any:
    """Return weights that a stage gave as a list or a tensor as a numpy column."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return value
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError, RuntimeError):
        kind = add_article(type(value).__name__)
        raise CustomPartError(f"{part} gave {kind} as {key}: give a numpy array of floats") from None


def _shorten(column: Floats) -> str:
    """Return a column for an error message, on one line."""
    return f"shape {column.shape}" if column.ndim != 1 else np.array2string(column, 10**9, 4, threshold=8)


def call_custom(what: str, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a part of an aggregator. If it is a user's own, with a name, raise `CustomPartError` for what it raises."""
    try:
        return function(*args)
    except (BadRows, CustomPartError):  # the first is for the aggregator, which then leaves clients out
        raise
    except (Exception, SystemExit) as error:  # `sys.exit()` would end the run without a word
        if not name:
            raise
        raise frame_error(what, name, error) from error


def stateless(apply: Callable[[Draft], Draft], needs: frozenset[str] = frozenset()) -> Stage:
    """Return a stage that gives weights and remembers nothing."""

    @functools.wraps(apply)  # for its name
    def apply_to_draft(draft: Draft, state: State) -> tuple[Draft, State]:
        return apply(draft), expect(state, Nothing)

    return Stage(lambda layout: Nothing(), apply_to_draft, needs, name=name_if_custom(apply))


@dataclass(frozen=True)
class ChainState(State, kind="chain"):
    """The states of a chain's stages, in the order they run."""

    states: tuple[State, ...]


def chain(*stages: Stage) -> Stage:
    """Run stages one after another, masks first, as one flat chain; no stage at all means FedAvg's weights and no mask.

    Args:
        *stages: The stages, in any order.

    Returns:
        The chain, itself a stage.

    Raises:
        TypeError: An argument is no `Stage`.
        ValueError: Two stages give the same, such as weights or a mask.
    """
    for i, stage in enumerate(stages):
        check_type(f"stages[{i}]", stage, Stage, _suggest_stage(stage))
    flat = [part for stage in stages for part in ((stage,) if stage.parts is None else stage.parts)]
    for what, why in GIVEN.items():
        if sum(what in stage.gives for stage in flat) > 1:
            raise ValueError(f"two of these stages give {what}: only one can decide {why}")
    parts = tuple(sorted(flat, key=lambda stage: ("mixture" in stage.gives, "weights" in stage.gives)))

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        states = expect(state, ChainState).states
        if len(states) != len(parts):
            raise ValueError(
                f"this state has {len(states)} parts, but the aggregator has {len(parts)}: give a state that it made itself"
            )
        after = []
        for stage, before in zip(parts, states, strict=True):
            draft, new = stage.run(draft, before, is_alone=len(parts) == 1)
            after.append(new)
        return draft, ChainState(tuple(after))

    needs = frozenset[str]().union(*(stage.needs for stage in parts))
    gives = frozenset[str]().union(*(stage.gives for stage in parts))
    return Stage(lambda layout: ChainState(tuple(stage.start(layout) for stage in parts)), apply, needs, gives, parts)


def _suggest_stage(given: object) -> str:
    """Return what to give to `chain` instead of something that is no stage."""
    if isinstance(given, list | tuple):
        return "give the stages one by one, as in chain(*stages)"
    name = getattr(given, "__name__", "")
    if callable(given) and name.isidentifier():  # the parentheses are forgotten
        return f"give the Stage that it returns, as in chain({name}())"
    return "give a Stage, such as what a function of a stage returns"
