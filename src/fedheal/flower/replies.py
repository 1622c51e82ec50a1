"""Read and check one reply, of a training or an evaluation; a reply that cannot count is rejected with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedheal.core.layout import Layout, Packed
from fedheal.flower.messages import CLIENT_INFO, MASK, TERM_MESSAGES, record_to_mask, record_to_terms, view_array
from fedheal.flower.node_registry import ReceivedReply
from fedheal.local.term import Arrays

ACCURACY = ("accuracy", "eval_acc")  # names that clients give to their accuracy, from 0 to 1


class RejectedReply(ValueError):
    """A reply that cannot count, with the reason."""


class MissingRequirement(RejectedReply):
    """A reply without what the method needs from every client. `needed` says what: if no reply has it, the app is wrong."""

    def __init__(self, reason: str, needed: str) -> None:
        super().__init__(reason)
        self.needed = needed


@dataclass(frozen=True)
class ReplyRequirements:
    """What a reply must hold. `needs`: metrics; `terms`: the local terms it must have been trained with."""

    arrays_key: str = "arrays"
    examples_key: str = "num-examples"
    max_examples: float = 1e9
    max_norm: float | None = None
    needs: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    masked: bool = False  # the clients mask their own updates

    def __post_init__(self) -> None:
        for name, bound in (("max_examples", self.max_examples), ("max_norm", self.max_norm)):
            is_number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
            if bound is not None and not (is_number and 0 < bound < float("inf")):
                raise ValueError(f"{name} = {bound!r}: use a finite number above 0")


@dataclass(frozen=True)
class TrainReply:
    """A checked training reply; its arrays are views of the message's bytes."""

    client: str
    domain: str
    arrays: Mapping[str, NDArray[Any]]
    num_examples: float
    metrics: Mapping[str, float]
    messages: tuple[Arrays, ...]  # of the local terms to the server
    mask: NDArray[np.uint8] | None


@dataclass(frozen=True)
class EvaluateReply:
    """A checked evaluation reply; `accuracy` is from 0 to 1, None if the client sent none."""

    client: str
    domain: str
    num_examples: float
    accuracy: float | None


def read_train_reply(reply: ReceivedReply, layout: Layout, requirements: ReplyRequirements) -> TrainReply:
    """Read a training reply and check all but its parameters' values. Raise RejectedReply if it cannot count."""
    content = reply.message.content
    metrics = read_metrics(content.metric_records)
    num_examples = _take_num_examples(metrics, requirements)
    _check_requirements(content, metrics, requirements)
    mask = None
    try:
        arrays = _read_arrays(_find_model_record(content.array_records, requirements.arrays_key), layout)
        messages = record_to_terms(content.array_records.get(TERM_MESSAGES), len(requirements.terms))
        if requirements.masked:
            mask = record_to_mask(content.array_records.get(MASK, ArrayRecord()), layout.sizes().params)
    except RejectedReply:
        raise
    except ValueError as error:
        raise RejectedReply(str(error)) from None
    if not all(bool(tensor.isfinite().all()) for group in messages for tensor in group.values()):
        raise RejectedReply("the messages of its local terms hold NaN or infinity")
    return TrainReply(
        client=reply.client,
        domain=reply.domain,
        arrays=arrays,
        num_examples=num_examples,
        metrics=metrics,
        messages=messages,
        mask=mask,
    )


def read_evaluate_reply(reply: ReceivedReply, requirements: ReplyRequirements) -> EvaluateReply:
    """Read and check an evaluation reply. Raise RejectedReply if it cannot count."""
    if reply.problem is not None:
        raise RejectedReply(reply.problem)
    metrics = read_metrics(reply.message.content.metric_records)
    num_examples = _take_num_examples(metrics, requirements)
    accuracies = {name: metrics[name] for name in ACCURACY if name in metrics}
    wrong = [f"{name} = {value}: use a number from 0 to 1" for name, value in accuracies.items() if not 0 <= value <= 1]
    if wrong:
        raise RejectedReply(", ".join(wrong))
    return EvaluateReply(reply.client, reply.domain, num_examples, next(iter(accuracies.values()), None))


def read_metrics(records: Mapping[str, MetricRecord]) -> dict[str, float]:
    """Return all metrics of a reply that are single numbers."""
    metrics: dict[str, float] = {}
    for record in records.values():
        metrics |= {name: float(value) for name, value in record.items() if isinstance(value, (int, float))}
    metrics.pop("partition-id", None)
    return metrics


def _take_num_examples(metrics: dict[str, float], requirements: ReplyRequirements) -> float:
    """Remove the number of examples from the metrics and return it."""
    key, most = requirements.examples_key, requirements.max_examples
    num_examples = metrics.pop(key, None)
    if num_examples is None:
        raise RejectedReply(f"it sends no metric '{key}' that is a number")
    if not 0 < num_examples <= most:
        raise RejectedReply(f"{key} = {num_examples:g} must be positive and at most max_examples = {most:g}")
    return num_examples


def _check_requirements(content: RecordDict, metrics: Mapping[str, float], requirements: ReplyRequirements) -> None:
    """Check local terms and metrics. A method without local terms accepts any training; with them, other training is wrong."""
    info: Mapping[str, Any] = content.config_records.get(CLIENT_INFO, {})
    terms, required = info.get("terms", []), ", ".join(requirements.terms)
    if required and terms != list(requirements.terms):
        training = f"with {terms!s:.200}" if terms else "without the method's local terms, or does not name them"
        raise MissingRequirement(
            f"it trained {training}; this federation trains with {required}",
            f"clients that train with {required}, but none says so: train with fedheal.flower.client.train, on a "
            "LocalTraining with the same method",
        )
    for name in requirements.needs:
        if name not in metrics:
            raise MissingRequirement(
                f"it sends no metric '{name}', which this aggregation needs",
                f"the client metric '{name}', which no client sends: train with fedheal.flower.client.train, or send it "
                "with fedheal.flower.client.reply",
            )


def _find_model_record(records: Mapping[str, ArrayRecord], key: str) -> ArrayRecord:
    """Return the record with this key, or else the only one that is not ours."""
    if key in records:
        return records[key]
    others = [record for name, record in records.items() if not name.startswith("fedheal")]
    if len(others) != 1:
        raise RejectedReply(f"it holds {len(others)} array records and none called '{key}'")
    return others[0]


def _read_arrays(record: ArrayRecord, layout: Layout) -> dict[str, NDArray[Any]]:
    """View a model's arrays. Raise RejectedReply if a name, shape or dtype is wrong."""
    missing = [entry.name for entry in layout.entries if entry.name not in record]
    unknown = sorted(set(record) - {entry.name for entry in layout.entries})
    if missing or unknown:
        problems = [f"lacks {missing[:3]}"] if missing else []
        problems += [f"has unknown {unknown[:3]}"] if unknown else []
        raise RejectedReply(f"its model {' and '.join(problems)}")
    arrays = {}
    for entry in layout.entries:
        try:
            values = view_array(record[entry.name])
        except ValueError as error:
            raise RejectedReply(f"its '{entry.name}' cannot be read: {error}") from None
        kinds = "iub" if entry.kind == "counter" else "c" if entry.dtype.is_complex else "f"
        if values.shape != entry.shape or values.dtype.kind not in kinds:
            raise RejectedReply(
                f"its '{entry.name}' is {values.dtype} of shape {values.shape}; it must be {entry.dtype} of shape {entry.shape}"
            )
        arrays[entry.name] = values
    return arrays


def write_delta(
    layout: Layout, arrays: Mapping[str, NDArray[Any]], model: Packed, row: NDArray[Any]
) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
    """Write local minus global parameters into `row`; return the local buffers and counters as vectors."""
    sizes, global_params = layout.sizes(), model.params.numpy()
    extras: dict[str, list[NDArray[Any]]] = {"buffer": [], "counter": []}
    seen: set[tuple[str, int, int]] = set()
    for entry in layout.entries:
        place = (entry.kind, entry.start, entry.stop)
        if place in seen or entry.start == entry.stop:
            continue  # a tied tensor appears once
        seen.add(place)
        local = arrays[entry.name].reshape(-1)
        if entry.kind == "param":
            span = slice(entry.start, entry.stop)
            real = local.view(local.real.dtype) if np.iscomplexobj(local) else local
            with np.errstate(over="ignore", invalid="ignore"):  # the aggregator names updates that are not finite
                np.subtract(real, global_params[span], out=row[span], casting="same_kind")
        else:
            extras[entry.kind].append(local)
    buffers = np.concatenate(extras["buffer"]).astype(model.buffers.numpy().dtype) if sizes.buffers else None
    counters = np.concatenate(extras["counter"]).astype(np.int64) if sizes.counters else None
    return buffers, counters


def average_metrics(contents: list[RecordDict], examples_key: str) -> MetricRecord:
    """Average each metric by examples over the clients that send it.

    A metric is a number or a list; one that is not finite, or not of the first one's length, is left out.
    """
    means: dict[str, tuple[NDArray[Any], float]] = {}  # so far, and over how many examples
    for content in contents:
        num_examples = read_metrics(content.metric_records)[examples_key]
        for name, value in (item for record in content.metric_records.values() for item in record.items()):
            values = np.asarray(value, np.float64)
            mean, total = means.get(name, (np.zeros_like(values), 0.0))
            if mean.shape == values.shape and np.isfinite(values).all():
                share = num_examples / (total + num_examples)  # sums of very large numbers would overflow
                means[name] = (1 - share) * mean + share * values, total + num_examples
    hidden = {examples_key, "partition-id"}
    return MetricRecord({name: mean.tolist() for name, (mean, _) in sorted(means.items()) if name not in hidden})
