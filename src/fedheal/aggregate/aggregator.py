"""An aggregator: stages that fill in a draft and a reducer that makes the new model, as one pure function of arrays."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedheal.aggregate import kernels, reduce
from fedheal.aggregate.draft import Draft
from fedheal.aggregate.stage import Stage, call_custom, check_report
from fedheal.aggregate.validate import (
    NON_FINITE_BUFFERS,
    BadRows,
    BadUpdate,
    NonFinite,
    find_bad_updates,
    find_non_finite_buffers,
)
from fedheal.core.arrays import Floats, Integers, as_tensor, normalise_weights
from fedheal.core.checks import check_type
from fedheal.core.errors import CustomPartError, add_article, check_returned, name_callable, name_if_custom, name_part
from fedheal.core.layout import Layout, Packed, Sizes
from fedheal.core.parameter import Parameter
from fedheal.core.state import State, expect
from fedheal.core.updates import NO_UPDATE, Updates

Reducer = Callable[[Draft, Floats], tuple[Packed, dict[str, Any]]]


@dataclass(frozen=True)
class AggregatorState(State, kind="aggregator"):
    """Everything an aggregator remembers between rounds.

    Attributes:
        sizes: The sizes of the model that the state was made for.
        stage: The state of the stages.
    """

    sizes: Sizes
    stage: State


@dataclass(frozen=True, kw_only=True)
class Aggregated:
    """The result of one round's aggregation.

    Attributes:
        model: The new global model, of the type that was given.
        weights: `[K]`, in the order of `updates.clients`; 0 for a skipped client.
        unnormalised_weights: `[K]`, before they are normalised over this cohort; comparable between rounds.
        state: The state after the round.
        report: JSON-ready: the `skipped` clients with the reason, and what the stages report.
    """

    model: Any
    weights: Tensor
    unnormalised_weights: Tensor
    state: AggregatorState
    report: dict[str, Any]

    def __repr__(self) -> str:
        """Return the model's size, the weights and what the report holds, without states."""
        model = self.model if isinstance(self.model, Packed) else f"{type(self.model).__name__}{list(self.model.shape)}"
        weights = np.array2string(self.weights.numpy(), 10**9, 4, threshold=8, separator=", ")
        return f"Aggregated(model={model}, weights={weights}, report={list(self.report)})"


class ModelOverflow(ValueError):
    """The new model would not be finite, although every update is. `result` has the old model."""

    def __init__(self, reason: str, result: Aggregated) -> None:
        super().__init__(reason)
        self.result = result


@dataclass(frozen=True)
class Aggregator:
    """Stages and a reducer as one pure function of arrays.

    Attributes:
        stage: Decides who counts how much and which entries count.
        reduce: Makes the new model from the filled-in draft and the normalised weights.
        on_bad_update: `"raise"`: a bad update is an error. `"skip"`: its client counts as absent.
        kernel: `"auto"`, `"reference"`, `"cpu"` or `"cuda"`.
        min_updates: With fewer usable updates no client counts, and model and state stay as they were.
    """

    stage: Stage
    reduce: Reducer = reduce.mean
    on_bad_update: str = "raise"
    kernel: str = "auto"
    min_updates: int = 1
    _warned: set[Sizes] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        remedy = "give a Stage, such as chain(...) or what a function of a stage returns"
        check_type(
            "stage", self.stage, Stage, f"{remedy}; methods.get('fedheal').aggregator is a ready-made Aggregator"
        )
        if not callable(self.reduce):
            raise TypeError(f"reduce = {self.reduce!r}: give a function of (draft, weights), such as reduce.mean")
        if self.on_bad_update not in ("raise", "skip"):
            raise ValueError(f"on_bad_update = {self.on_bad_update!r}: use 'raise' or 'skip'")
        kernels.check_kernel(self.kernel)
        Parameter("min_updates", 1, ge=1).check(self.min_updates)

    def __repr__(self) -> str:
        values = {
            "reduce": name_callable(self.reduce),
            "on_bad_update": repr(self.on_bad_update),
            "kernel": repr(self.kernel),
        }
        values |= {"min_updates": str(self.min_updates)} if self.min_updates > 1 else {}
        return f"Aggregator({self.stage}, {', '.join(f'{key}={value}' for key, value in values.items())})"

    def init(self, layout: Layout) -> AggregatorState:
        """Return the state before the first round. Raise TypeError if `layout` is no `Layout`."""
        check_type("layout", layout, Layout, "give the layout of the model, Layout.of(module)")
        return AggregatorState(layout.sizes(), self.stage.start(layout))

    def apply(self, model: Any, updates: Updates, state: State, donate: bool = False) -> Aggregated:
        """Make the new global model of one round from the old one and a cohort's updates.

        Args:
            model: A `Packed`, or just the flat parameters as a tensor or numpy array.
            updates: The cohort's updates. If none is usable, model and state stay as they were.
            state: What `init` or the last round's `apply` gave.
            donate: Whether the old state's memory may be reused; that state must then not be used again.

        Raises:
            BadUpdate: A client's update cannot be used, and `on_bad_update` is `"raise"`.
            ValueError: Model, updates or state do not fit this aggregator. Or the new model would not be finite
                (`ModelOverflow`), or a user's own stage or reducer failed (`CustomPartError`).
            TypeError: Model or updates are of another type.
        """
        check_type(
            "updates", updates, Updates, "give Updates(clients, deltas, num_examples) or Updates.from_modules(...)"
        )
        if state is None:
            raise ValueError(
                "state is None: give what init(layout) returned, then the state of the last round's result"
            )
        state = expect(state, AggregatorState)
        packed = _pack_model(model, updates, state.sizes)
        bad = find_bad_updates(updates, state.sizes, self.stage.needs)
        is_checked = bool(bad) or self._must_check_first()
        if is_checked:
            are_finite = reduce.find_finite(*_list_inputs(packed, updates))
            bad = dict.fromkeys(_find_bad_buffers(are_finite, updates), NON_FINITE_BUFFERS) | bad
            bad = updates.find_diverged_rows() | bad
        while True:
            if bad and self.on_bad_update == "raise":
                raise BadUpdate({updates.clients[row]: bad[row] for row in sorted(bad)})
            rows, bad = self._choose_rows(updates, bad)
            try:
                new_model, *columns, after, report = self._aggregate(packed, updates, rows, state, donate)
                overflow = _check_result(new_model, packed, updates, rows, is_checked)
                break
            except BadRows as error:  # the state is still as it was
                bad |= error.reasons
        self._warn_of_missing_buffers(updates, state.sizes)
        new_model = _copy_kept(new_model, packed)
        if not isinstance(model, Packed):
            new_model = new_model.params.numpy() if isinstance(model, np.ndarray) else new_model.params
        by_client = np.zeros((2, len(updates.clients)))
        by_client[:, rows] = columns
        weights = torch.from_numpy(by_client)
        skipped = dict(updates.refused) | {updates.clients[row]: why for row, why in bad.items()}
        report = {"skipped": skipped, **report}
        result = Aggregated(
            model=new_model, weights=weights[0], unnormalised_weights=weights[1], state=after, report=report
        )
        if overflow:
            raise ModelOverflow(overflow, replace(result, model=model))
        return result

    def _choose_rows(self, updates: Updates, bad: Mapping[int, str]) -> tuple[Integers, dict[int, str]]:
        """Return the rows that count, by client, and the others with the reason. With fewer than `min_updates` none counts."""
        good = [row for row in range(len(updates.clients)) if row not in bad]
        if len(good) < self.min_updates:
            needed = f"min_updates = {self.min_updates} (in a federation min_replies)"
            too_few = f"only {len(good)} updates of this round can be used, fewer than {needed}"
            return np.zeros(0, np.int64), {**dict.fromkeys(good, too_few), **bad}
        return np.array(sorted(good, key=lambda row: updates.clients[row]), np.int64), dict(bad)

    def _must_check_first(self) -> bool:
        """Return whether model and buffers must be checked before they are used.

        A mask writes to a donated state, and a user's own part may fail for numbers that are not finite. Otherwise one
        check after the round is enough. It covers the old model and the new one together, so that the host waits for a
        GPU once.
        """
        stages = (self.stage,) if self.stage.parts is None else self.stage.parts
        return "mask" in self.stage.gives or any(stage.name for stage in stages) or bool(name_if_custom(self.reduce))

    def _warn_of_missing_buffers(self, updates: Updates, sizes: Sizes) -> None:
        """Warn, once for each layout, if running statistics stay as they are because no update carries them."""
        if sizes.buffers and updates.clients and updates.buffers is None and sizes not in self._warned:
            self._warned.add(sizes)
            warnings.warn(
                f"the model has {sizes.buffers} buffer values, such as BatchNorm's running statistics, and the updates carry "
                "none: they stay as they were in every round. Use Updates.from_modules, or give buffers= and counters= of "
                "each client's packed model",
                UserWarning,
                stacklevel=3,
            )

    def _aggregate(
        self, model: Packed, updates: Updates, rows: Integers, state: AggregatorState, donate: bool
    ) -> tuple[Any, Floats, Floats, AggregatorState, dict[str, Any]]:
        """Return model, weights, unnormalised weights, state and report. Raise `BadRows` if rows cannot count."""
        if len(rows) == 0:
            return model, np.zeros(0), np.zeros(0), state, {}
        kernel = kernels.choose_kernel(self.kernel, updates.no_rows)
        draft = Draft(sizes=state.sizes, model=model, updates=updates, rows=rows, kernel=kernel, donate=donate)
        draft, after = self.stage.run(draft, state.stage)
        state = replace(state, stage=after)
        weights, unnormalised_weights = _final_weights(draft)
        if not weights.any():
            return model, weights, np.zeros_like(weights), state, {}
        name = name_if_custom(self.reduce)
        returned = call_custom("reducer", name, self.reduce, draft, weights)
        new_model, report = check_returned(name_part("reducer", name), returned, Packed, Mapping)
        check_report(name_part("reducer", name), report)
        for field_name, old in vars(model).items():
            if (made := getattr(new_model, field_name)).shape != old.shape:
                shapes = f"of shape {tuple(old.shape)}, got {tuple(made.shape)}"
                raise CustomPartError(f"{name_part('reducer', name)} must return {field_name} {shapes}")
        return new_model, weights, unnormalised_weights, state, {**draft.report, **report}


def _copy_kept(new_model: Packed, model: Packed) -> Packed:
    """Return the new model with copies of the parts that are the old model's, so that the two can change apart."""
    parts = vars(new_model).items()
    return Packed(**{name: part.clone() if part is getattr(model, name) else part for name, part in parts})


def _pack_model(model: Any, updates: Updates, sizes: Sizes) -> Packed:
    """Return the model as vectors. Raise ValueError if it does not fit the state's sizes or the updates."""
    if isinstance(model, Packed):
        packed = model
    else:
        params = as_tensor(model, "model") if isinstance(model, np.ndarray) else model
        if not isinstance(params, Tensor):
            remedy = (
                "give a Packed, such as layout.pack(module.state_dict()), or the flat parameters as tensor or array"
            )
            raise TypeError(f"model is {add_article(type(model).__name__)}: {remedy}")
        if updates.buffers is not None or updates.counters is not None:
            raise ValueError("the updates carry buffers or counters but the model is a flat vector: give a Packed")
        packed = Packed(params.detach(), torch.empty(0, dtype=params.dtype), torch.empty(0, dtype=torch.int64))
        sizes = replace(sizes, buffers=0, counters=0)
    for name in ("params", "buffers", "counters"):
        vector, length = getattr(packed, name), getattr(sizes, name)
        if vector.shape != (length,):
            has = f"have shape {tuple(vector.shape)}"
            raise ValueError(f"the model's {name} {has}; this aggregator's state has {length} of them")
    if not packed.params.is_floating_point():
        raise ValueError(f"the model's parameters are {packed.params.dtype}, not floating point")
    if updates.clients and packed.params.device != updates.no_rows.device:  # the device of no updates says nothing
        raise ValueError(f"the model is on {packed.params.device}, the updates are on {updates.no_rows.device}")
    return packed


def _list_inputs(model: Packed, updates: Updates) -> tuple[Tensor, Tensor, Tensor]:
    """Return what must be finite before a round, apart from the updates themselves."""
    buffers = updates.buffers
    return model.params, model.buffers, NO_UPDATE if buffers is None or not buffers.is_floating_point() else buffers


def _find_bad_buffers(are_finite: Sequence[bool], updates: Updates) -> list[int]:
    """Return the rows whose buffers are not finite, given which inputs are. Raise ValueError if the model is not finite."""
    *of_model, of_updates = are_finite
    for name, is_finite in zip(("params", "buffers"), of_model, strict=True):
        if not is_finite:
            raise ValueError(f"the global model's {name} already hold NaN or infinity: start from a finite one")
    return [] if of_updates else find_non_finite_buffers(updates)


def _final_weights(draft: Draft) -> tuple[Floats, Floats]:
    """Return the stages' weights, or this round's examples if no stage gave any: normalised, and unnormalised."""
    weights = draft.num_examples if draft.weights is None else draft.weights
    unnormalised_weights = weights if draft.unnormalised_weights is None else draft.unnormalised_weights
    return normalise_weights(weights), unnormalised_weights


def _check_result(new_model: Packed, model: Packed, updates: Updates, rows: Integers, is_checked: bool) -> str:
    """Return why the new model overflows, or an empty string. Raise `BadRows` if clients are at fault.

    An overflow is never skipped: the stages have counted these updates already, and each of them may be valid. Unless
    `is_checked`, the old model and the buffers of the updates are checked, too.
    """
    inputs = () if is_checked else _list_inputs(model, updates)
    of_params, of_buffers, *of_inputs = reduce.find_finite(new_model.params, new_model.buffers, *inputs)
    if of_inputs and (bad := set(_find_bad_buffers(of_inputs, updates)).intersection(rows.tolist())):
        raise NonFinite(sorted(bad), NON_FINITE_BUFFERS)
    if not is_checked:
        diverged = updates.find_diverged_rows()
        if counted := diverged.keys() & set(rows.tolist()):
            raise BadRows({row: diverged[row] for row in sorted(counted)})
    for name, is_finite in (("params", of_params), ("buffers", of_buffers)):
        if not is_finite:
            kernels.reference.check_finite(updates.deltas, rows)
            dtype, before = getattr(new_model, name).dtype, model.params.to(torch.float64)
            own_models = ((before + updates.deltas[row].to(before)).to(model.params.dtype) for row in rows)
            clients = [
                updates.clients[row] for row, own in zip(rows, own_models, strict=True) if not reduce.is_finite(own)
            ]
            hint = f"; the models of {', '.join(map(repr, clients))} do not fit it by themselves" if clients else ""
            return f"this round would make the global model's {name} overflow {dtype}{hint}"
    return ""
