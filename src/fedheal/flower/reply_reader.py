"""Read and check Flower's replies. A reply that cannot count is rejected with the reason."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedheal.core.errors import add_article, format_error, name_callable
from fedheal.core.layout import Layout
from fedheal.core.updates import FLOATS
from fedheal.federation.replies import EvaluateReply, MissingRequirement, RejectedReply, ReplyRequirements, TrainReply
from fedheal.federation.reply_checks import check_metrics, find_accuracy, match_arrays, take_num_examples, to_float
from fedheal.federation.reply_limits import MAX_MESSAGE, escape_text
from fedheal.flower import messages
from fedheal.flower.messages import CLIENT_INFO, MASK, TERM_MESSAGES, view_array
from fedheal.flower.node_registry import ReceivedReply
from fedheal.local.term import Arrays

log = logging.getLogger("flwr.fedheal")

EXAMPLES_REMEDY = "put it into the reply's MetricRecord, or set weighted_by_key to the name that the clients send"
MESSAGE_DTYPES = (
    *FLOATS, torch.complex64, torch.complex128, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def read_train_reply(reply: ReceivedReply, layout: Layout, requirements: ReplyRequirements) -> TrainReply:
    """Read a training reply and check all but its parameters' values. Raise RejectedReply if it cannot count."""
    content = reply.message.content
    num_examples, metrics = read_train_metrics(content, requirements)
    mask, records = None, content.array_records
    try:
        model = _find_model_record(records, requirements.arrays_key)
        arrays = match_arrays(dict(model.items()), view_array, layout)
        groups = messages.record_to_terms(records.get(TERM_MESSAGES), len(requirements.terms))
        if requirements.masked:
            mask = messages.record_to_mask(records.get(MASK, ArrayRecord()), layout.sizes().params)
    except ValueError as error:
        raise RejectedReply(str(error)) from None
    _check_term_messages(groups, max(MAX_MESSAGE, num_examples))
    return TrainReply(reply.client, reply.domain, arrays, num_examples, metrics=metrics, messages=groups, mask=mask)


def read_train_metrics(content: RecordDict, requirements: ReplyRequirements) -> tuple[float, dict[str, float]]:
    """Return a reply's number of examples and other metrics. Raise RejectedReply if they, or its terms, cannot count."""
    metrics = read_metrics(content.metric_records)
    num_examples = take_num_examples(metrics, requirements, EXAMPLES_REMEDY)
    _check_requirements(content, metrics, requirements)
    return num_examples, metrics


def read_evaluate_reply(reply: ReceivedReply, requirements: ReplyRequirements) -> EvaluateReply:
    """Read and check an evaluation reply. Raise RejectedReply if it cannot count."""
    if reply.problem is not None:
        raise RejectedReply(reply.problem)
    metrics = read_metrics(reply.message.content.metric_records)
    num_examples = take_num_examples(metrics, requirements, EXAMPLES_REMEDY)
    return EvaluateReply(reply.client, reply.domain, num_examples, find_accuracy(metrics))


def read_metrics(records: Mapping[str, MetricRecord]) -> dict[str, float]:
    """Return all metrics of a reply that are single numbers."""
    metrics: dict[str, float] = {}
    for record in records.values():
        metrics |= {name: to_float(value) for name, value in record.items() if isinstance(value, (int, float))}
    metrics.pop("partition-id", None)
    return metrics


def _check_requirements(content: RecordDict, metrics: Mapping[str, float], requirements: ReplyRequirements) -> None:
    """Check local terms and metrics. A method without local terms accepts any training; with them, other training is wrong."""
    info: Mapping[str, Any] = content.config_records.get(CLIENT_INFO, {})
    terms, required = info.get("terms", []), ", ".join(requirements.terms)
    if required and terms != list(requirements.terms):
        training = f"with {terms!s:.200}" if terms else "without the method's local terms, or does not name them"
        advice = "train with fedheal.flower.client.train, on a LocalTraining with the same method"
        needed = f"clients that train with {required}, but none says so: {advice}"
        raise MissingRequirement(f"it trained {training}; this federation trains with {required}", needed)
    advice = "train with fedheal.flower.client.train, or send it with fedheal.flower.client.reply"
    check_metrics(metrics, requirements.needs, advice)


def _check_term_messages(groups: Sequence[Arrays], most: float) -> None:
    """Raise RejectedReply if the server's terms cannot compute with a message, or a value could make them infinite."""
    for name, tensor in (item for group in groups for item in group.items()):
        if tensor.dtype not in MESSAGE_DTYPES:
            raise RejectedReply(f"'{name}' of its local terms is {tensor.dtype}: send floats or signed integers")
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        low, high = torch.aminmax(numbers) if numbers.numel() else (0.0, 0.0)
        largest = max(abs(float(low)), abs(float(high)))  # the smallest integer has no absolute value of its own type
        if not np.isfinite(largest):
            raise RejectedReply(f"'{name}' of its local terms holds NaN or infinity")
        if largest > most:
            raise RejectedReply(f"'{name}' of its local terms holds {largest:g}, beyond {most:g}")


def _find_model_record(records: Mapping[str, ArrayRecord], key: str) -> ArrayRecord:
    """Return the record with this key, or else the only one that is not ours."""
    if key in records:
        return records[key]
    others = [record for name, record in records.items() if not name.startswith("fedheal")]
    if len(others) != 1:
        raise RejectedReply(f"it holds {len(others)} array records and none called '{key}': send the model as '{key}'")
    return others[0]


def aggregate_metrics(
    name: str,
    function: Callable[[list[RecordDict], str], Any],
    contents: list[RecordDict],
    examples_key: str,
    number: int,
) -> MetricRecord | None:
    """Return a round's metrics, or None if no reply counts or the function fails on one: no client's metrics may end a run.

    Args:
        name: The setting that `function` was given as.
        function: Makes one record of the replies.
        contents: The replies that count.
        examples_key: The metric with a reply's number of examples.
        number: The round.
    """
    if not contents:
        return None
    try:
        metrics = function(contents, examples_key)
        if metrics is None or isinstance(metrics, MetricRecord):
            return metrics
        problem = f"returned {add_article(type(metrics).__name__)}, not a MetricRecord or None"
    except Exception as error:  # an operator's function may raise anything, and the metrics are the clients'
        problem = f"raised {escape_text(format_error(error))}"
        log.debug("%s of round %d raised:", name, number, exc_info=error)
    log.warning("round %d has no aggregated metrics: %s = %s %s", number, name, name_callable(function), problem)
    return None


def average_metrics(contents: list[RecordDict], examples_key: str) -> MetricRecord:
    """Average each metric by examples over the clients that send it.

    A metric is a number or a list. A metric that is not finite, or not of the length that most clients send, is left
    out.
    """
    sent: dict[str, list[tuple[NDArray[Any], float]]] = {}  # values and examples of each client
    for content in contents:
        num_examples = read_metrics(content.metric_records)[examples_key]
        for name, value in (item for record in content.metric_records.values() for item in record.items()):
            values = np.asarray([to_float(v) for v in value] if isinstance(value, list) else to_float(value))
            if np.isfinite(values).all():
                sent.setdefault(name, []).append((values, num_examples))
    means: dict[str, Any] = {}
    for name in sorted(sent.keys() - {examples_key, "partition-id"}):
        usual = Counter(values.shape for values, _ in sent[name]).most_common(1)[0][0]
        mean, total = np.zeros(usual), 0.0
        for values, num_examples in sent[name]:
            if values.shape == usual:
                total += num_examples
                share = num_examples / total  # sums of very large numbers would overflow
                mean = (1 - share) * mean + share * values
        means[name] = mean.tolist()
    return MetricRecord(means)
