"""Checks of what a reply holds. What comes from a client is hostile until it has passed them."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, SupportsFloat, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedheal.core.layout import Layout
from fedheal.federation.replies import MissingRequirement, RejectedReply, ReplyRequirements
from fedheal.federation.reply_limits import MAX_COUNTER, MAX_METRIC

V = TypeVar("V")

ACCURACY = ("accuracy", "eval_acc")  # names that clients give to their accuracy, from 0 to 1

METRICS = {  # what a client with a training loop of its own sends
    "loss": "the mean loss of the received model on the client's training data",
    "lr": "the learning rate",
    "reach": "the learning rate times the number of local steps; with momentum fedheal.local.term.effective_step",
}


def to_float(value: SupportsFloat) -> float:
    """Return a number as a float; a whole number may have more digits than a float holds."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def take_num_examples(metrics: dict[str, float], requirements: ReplyRequirements, remedy: str) -> float:
    """Remove the number of examples from the metrics and return it."""
    key, most = requirements.examples_key, requirements.max_examples
    num_examples = metrics.pop(key, None)
    if num_examples is None:
        raise RejectedReply(f"it sends no metric '{key}' that is a number: {remedy}")
    if not 0 < num_examples <= most:
        raise RejectedReply(f"{key} = {num_examples:g} must be positive and at most max_examples = {most:g}")
    return num_examples


def check_metrics(metrics: Mapping[str, float], needs: Collection[str], advice: str) -> None:
    """Raise RejectedReply if a metric that the aggregation needs is missing or too large. `advice`: how to send it."""
    for name in needs:
        if name not in metrics:
            meaning = f" ({METRICS[name]})" if name in METRICS else ""
            needed = f"the client metric '{name}', which no client sends: {advice}{meaning}"
            raise MissingRequirement(f"it sends no metric '{name}', which this aggregation needs", needed)
        if MAX_METRIC < abs(metrics[name]) < math.inf:  # the aggregator names those that are not finite
            raise RejectedReply(f"its metric '{name}' = {metrics[name]:g} is beyond {MAX_METRIC:g}")


def find_accuracy(metrics: Mapping[str, float]) -> float | None:
    """Return the accuracy among the metrics, or None. Raise RejectedReply if one is not from 0 to 1."""
    accuracies = {name: metrics[name] for name in ACCURACY if name in metrics}
    wrong = [f"{name} = {value}: use a number from 0 to 1" for name, value in accuracies.items() if not 0 <= value <= 1]
    if wrong:
        raise RejectedReply(", ".join(wrong))
    return next(iter(accuracies.values()), None)


def match_arrays(given: Mapping[str, V], view: Callable[[V], NDArray[Any]], layout: Layout) -> dict[str, NDArray[Any]]:
    """View a model's arrays by name. Raise RejectedReply if a name, shape or dtype is wrong."""
    names = [entry.name for entry in layout.entries]
    if given.keys() != set(names):
        missing, unknown = [name for name in names if name not in given], sorted(given.keys() - set(names))
        problems = [f"lacks {missing[:3]}"] if missing else []
        problems += [f"has unknown {unknown[:3]}"] if unknown else []
        raise RejectedReply(f"its model {' and '.join(problems)}")
    arrays = {}
    for entry in layout.entries:
        try:
            values = view(given[entry.name])
        except ValueError as error:
            raise RejectedReply(f"its '{entry.name}' cannot be read: {error}") from None
        kinds = "iub" if entry.kind == "counter" else "c" if entry.dtype.is_complex else "f"
        if values.shape != entry.shape or values.dtype.kind not in kinds:
            wanted = f"it must be {entry.dtype} of shape {entry.shape}"
            raise RejectedReply(f"its '{entry.name}' is {values.dtype} of shape {values.shape}; {wanted}")
        if entry.kind == "counter" and values.size and int(np.abs(values.astype(np.float64)).max()) > MAX_COUNTER:
            raise RejectedReply(f"its '{entry.name}' counts beyond {MAX_COUNTER}")
        arrays[entry.name] = values
    return arrays
