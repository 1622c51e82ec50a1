"""Read and check replies, and put the valid ones of a round together into one cohort of `Updates`.

A reply that cannot count is rejected with the reason.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedheal.core.layout import Layout, Packed
from fedheal.core.parameter import Parameter
from fedheal.core.state import RunState
from fedheal.core.updates import Reply, Updates
from fedheal.flower import messages
from fedheal.flower.messages import CLIENT_INFO, MASK, TERM_MESSAGES, view_array, widen_bfloat16
from fedheal.flower.node_registry import ReceivedReply
from fedheal.flower.reply_limits import MAX_COUNTER, MAX_MESSAGE, MAX_METRIC, escape_text, find_far_norms
from fedheal.local.term import Arrays, ServerContext, Term

ACCURACY = ("accuracy", "eval_acc")  # names that clients give to their accuracy, from 0 to 1

METRICS = {  # what a client with a training loop of its own sends
    "loss": "the mean loss of the received model on the client's training data",
    "lr": "the learning rate",
    "reach": "the learning rate times the number of local steps; with momentum fedheal.local.term.effective_step",
}

BLOCK = (
    1 << 17
)  # numbers of a model that all clients are compared with before the next ones; half a megabyte of float32
AUTO = "auto"  # as max_norm: leave out norms far above the median of the round


class RejectedReply(ValueError):
    """A reply that cannot count, with the reason, which may hold the client's own words."""

    def __init__(self, reason: str) -> None:
        super().__init__(escape_text(reason))


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
    max_norm: float | str | None = None
    max_reply_bytes: int | None = None
    needs: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    masked: bool = False  # the clients mask their own updates

    def __post_init__(self) -> None:
        Parameter("max_examples", 1.0, gt=0).check(self.max_examples)
        if self.max_norm not in (None, AUTO):
            Parameter("max_norm", 1.0, gt=0).check(self.max_norm)
        if self.max_reply_bytes is not None:
            Parameter("max_reply_bytes", 1, ge=1).check(self.max_reply_bytes)


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
    num_examples, metrics = read_train_metrics(content, requirements)
    mask, records = None, content.array_records
    try:
        arrays = _read_arrays(_find_model_record(records, requirements.arrays_key), layout)
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
    num_examples = _take_num_examples(metrics, requirements)
    _check_requirements(content, metrics, requirements)
    return num_examples, metrics


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
        metrics |= {name: _to_float(value) for name, value in record.items() if isinstance(value, (int, float))}
    metrics.pop("partition-id", None)
    return metrics


def _to_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number may have any number of digits
        return math.inf


def _take_num_examples(metrics: dict[str, float], requirements: ReplyRequirements) -> float:
    """Remove the number of examples from the metrics and return it."""
    key, most = requirements.examples_key, requirements.max_examples
    num_examples = metrics.pop(key, None)
    if num_examples is None:
        raise RejectedReply(f"it sends no metric '{key}' that is a number: put it into the reply's MetricRecord")
    if not 0 < num_examples <= most:
        raise RejectedReply(f"{key} = {num_examples:g} must be positive and at most max_examples = {most:g}")
    return num_examples


def _check_requirements(content: RecordDict, metrics: Mapping[str, float], requirements: ReplyRequirements) -> None:
    """Check local terms and metrics. A method without local terms accepts any training; with them, other training is wrong."""
    info: Mapping[str, Any] = content.config_records.get(CLIENT_INFO, {})
    terms, required = info.get("terms", []), ", ".join(requirements.terms)
    if required and terms != list(requirements.terms):
        training = f"with {terms!s:.200}" if terms else "without the method's local terms, or does not name them"
        advice = "train with fedheal.flower.client.train, on a LocalTraining with the same method"
        needed = f"clients that train with {required}, but none says so: {advice}"
        raise MissingRequirement(f"it trained {training}; this federation trains with {required}", needed)
    for name in requirements.needs:
        if name not in metrics:
            advice = "train with fedheal.flower.client.train, or send it with fedheal.flower.client.reply"
            meaning = f" ({METRICS[name]})" if name in METRICS else ""
            needed = f"the client metric '{name}', which no client sends: {advice}{meaning}"
            raise MissingRequirement(f"it sends no metric '{name}', which this aggregation needs", needed)

        if MAX_METRIC < abs(metrics[name]) < math.inf:  # the aggregator names those that are not finite
            raise RejectedReply(f"its metric '{name}' = {metrics[name]:g} is beyond {MAX_METRIC:g}")


def _check_term_messages(groups: Sequence[Arrays], most: float) -> None:
    """Raise RejectedReply if a value could make the server's terms infinite, and so silence every client."""
    for name, tensor in (item for group in groups for item in group.items() if item[1].numel()):
        largest = float(tensor.abs().max())
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


def _read_arrays(record: ArrayRecord, layout: Layout) -> dict[str, NDArray[Any]]:
    """View a model's arrays. Raise RejectedReply if a name, shape or dtype is wrong."""
    given, names = dict(record.items()), [entry.name for entry in layout.entries]
    if given.keys() != set(names):
        missing, unknown = [name for name in names if name not in given], sorted(given.keys() - set(names))
        problems = [f"lacks {missing[:3]}"] if missing else []
        problems += [f"has unknown {unknown[:3]}"] if unknown else []
        raise RejectedReply(f"its model {' and '.join(problems)}")
    arrays = {}
    for entry in layout.entries:
        try:
            values = view_array(given[entry.name])
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


Block = tuple[str, slice, slice]  # an array's name, a part of it, and its place in the vector of parameters


def split_parameters(layout: Layout) -> list[Block]:
    """Split the parameters into parts of at most `BLOCK` numbers."""
    # A tied tensor appears once. A complex number is two real ones.
    places = {(entry.start, entry.stop): entry.name for entry in layout.entries if entry.kind == "param"}
    return [
        (name, slice(i - start, min(i + BLOCK, stop) - start), slice(i, min(i + BLOCK, stop)))
        for (start, stop), name in places.items()
        for i in range(start, stop, BLOCK)
    ]


def write_deltas(
    blocks: Iterable[Block], replies: Sequence[TrainReply], model: NDArray[Any], rows: NDArray[Any], pool: Executor
) -> dict[str, float]:
    """Write local minus global parameters into the rows; return the finite ones of their norms by client.

    Every client's part of one block comes before the next block: so much of the model stays in a core's cache.
    """
    flat = [{name: _view_flat(array) for name, array in reply.arrays.items()} for reply in replies]

    def write_block(block: Block) -> list[float]:
        name, part, place = block
        squares = []
        with np.errstate(over="ignore", invalid="ignore"):  # the aggregator names updates that are not finite
            for reply, arrays, row in zip(replies, flat, rows, strict=True):
                delta = row[place]
                np.subtract(arrays[name][part], model[place], out=delta, casting="same_kind")
                if reply.mask is not None:
                    np.multiply(delta, reply.mask[place], out=delta)  # what the client says it dropped does not count
                squares.append(float(np.dot(delta, delta)))
        return squares

    norms = {}
    for reply, row, squares in zip(replies, rows, zip(*pool.map(write_block, blocks), strict=True), strict=True):
        norm = math.sqrt(total) if math.isfinite(total := sum(squares)) else _measure_slowly(row)
        if math.isfinite(norm):
            norms[reply.client] = norm
    return norms


def _view_flat(array: NDArray[Any]) -> NDArray[Any]:
    flat = array.reshape(-1)
    return flat.view(flat.real.dtype) if np.iscomplexobj(flat) else flat


def _measure_slowly(row: NDArray[Any]) -> float:
    """Return a norm whose square may be infinite in the row's own dtype only."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.linalg.norm(row.astype(np.float64)))


def read_extras(
    layout: Layout, arrays: Mapping[str, NDArray[Any]], model: Packed
) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
    """Return the local buffers and counters as vectors."""
    parts: dict[str, dict[int, NDArray[Any]]] = {"param": {}, "buffer": {}, "counter": {}}
    for entry in layout.entries:
        if entry.kind != "param" and entry.start != entry.stop:
            parts[entry.kind].setdefault(entry.start, arrays[entry.name].reshape(-1))  # a tied tensor appears once
    buffers, counters = list(parts["buffer"].values()), list(parts["counter"].values())
    return (
        np.concatenate(buffers).astype(model.buffers.numpy().dtype) if buffers else None,
        np.concatenate(counters).astype(np.int64) if counters else None,
    )


def average_metrics(contents: list[RecordDict], examples_key: str) -> MetricRecord:
    """Average each metric by examples over the clients that send it.

    A metric is a number or a list; one that is not finite, or not of the first one's length, is left out.
    """
    means: dict[str, tuple[NDArray[Any], float]] = {}  # so far, and over how many examples
    for content in contents:
        num_examples = read_metrics(content.metric_records)[examples_key]
        for name, value in (item for record in content.metric_records.values() for item in record.items()):
            values = np.asarray([_to_float(v) for v in value] if isinstance(value, list) else _to_float(value))
            mean, total = means.get(name, (np.zeros_like(values), 0.0))
            if mean.shape == values.shape and np.isfinite(values).all():
                share = num_examples / (total + num_examples)  # sums of very large numbers would overflow
                means[name] = (1 - share) * mean + share * values, total + num_examples
    hidden = {examples_key, "partition-id"}
    return MetricRecord({name: mean.tolist() for name, (mean, _) in sorted(means.items()) if name not in hidden})


@dataclass(frozen=True)
class Cohort:
    """The updates to aggregate, the replies they come from, and the skipped clients with the reasons."""

    updates: Updates
    replies: Mapping[str, TrainReply]
    skipped: dict[str, str]
    missing_requirement: str | None = None  # what the method needs, if no reply has it
    message_digests: dict[str, str] = field(default_factory=dict)  # by client; of their names, shapes and dtypes
    far_norms: dict[str, str] = field(
        default_factory=dict
    )  # clients that count, although far from the others, and how far

    def skip_all(self, reason: str) -> Self:
        """Return the cohort with every client skipped."""
        nobody = Updates([], self.updates.deltas[:0], [], domains=[])
        skipped = self.skipped | dict.fromkeys(self.updates.clients, reason)
        return replace(self, updates=nobody, replies={}, skipped=skipped, missing_requirement=None)


class CohortBuilder:
    """Reads replies into a matrix that is reused from round to round: allocating it anew costs more than filling it."""

    def __init__(
        self, layout: Layout, requirements: ReplyRequirements, terms: Sequence[Term] = (), budget: int | None = None
    ) -> None:
        self.layout, self.requirements, self.terms, self.budget = layout, requirements, terms, budget
        self._matrix, self._blocks = torch.empty(0, 0), split_parameters(layout)

    def build(self, received: Iterable[ReceivedReply], state: RunState, known_digests: Mapping[str, str]) -> Cohort:
        """Build the cohort. `known_digests`: of each client's last usable messages."""
        replies: dict[str, TrainReply] = {}
        skipped: dict[str, str] = {}
        missing: list[str] = []
        for reply in received:
            try:
                replies[reply.client] = read_train_reply(reply, self.layout, self.requirements)
            except RejectedReply as error:
                skipped[reply.client] = str(error)
                missing += [error.needed] if isinstance(error, MissingRequirement) else []
        if self.terms:
            missing += self._skip_unusable_messages(replies, state, known_digests, skipped)
        missing_requirement = missing[0] if missing and not replies else None
        digests = {client: _digest_messages(reply.messages) for client, reply in replies.items()} if self.terms else {}
        _skip_unusual_messages(replies, {**known_digests, **digests}, skipped)
        replies = dict(sorted(replies.items()))
        updates, far_norms = self._collect_updates(replies, state.model, skipped)
        return Cohort(updates, replies, skipped | dict(updates.refused), missing_requirement, digests, far_norms)

    def _skip_unusable_messages(
        self, replies: dict[str, TrainReply], state: RunState, known_digests: Mapping[str, str], skipped: dict[str, str]
    ) -> list[str]:
        """Skip clients whose messages the server's terms cannot absorb; return what is needed instead."""
        errors: dict[str, str | None] = dict.fromkeys(known_digests.values())  # these were usable before
        missing = []
        for client, reply in list(replies.items()):
            digest = _digest_messages(reply.messages)
            if digest not in errors:
                errors[digest] = _find_absorb_error(self.terms, self.layout, state, reply.messages)
            if errors[digest] is not None:
                skipped[client] = f"the server cannot use the messages of its local terms ({errors[digest]})"
                missing.append(f"messages of the clients' local terms that the server can use ({errors[digest]})")
                del replies[client]
        return missing

    def _collect_updates(
        self, replies: Mapping[str, TrainReply], model: Packed, skipped: dict[str, str]
    ) -> tuple[Updates, dict[str, str]]:
        """Write the updates into the matrix, or through one row into a file if they exceed the budget.

        Return them, and the clients that count although their norms are far above the others'.
        """
        wide = Packed(widen_bfloat16(model.params), widen_bfloat16(model.buffers), model.counters)
        size, dtype = self.layout.sizes().params, wide.params.dtype
        exceeds_budget = self.budget is not None and len(replies) * size * dtype.itemsize > self.budget
        num_rows = 1 if exceeds_budget else len(replies)
        if len(self._matrix) < num_rows or self._matrix.shape[1] != size or self._matrix.dtype != dtype:
            self._matrix = torch.empty(num_rows, size, dtype=dtype)
        norms: dict[str, float] = {}

        def make_updates(some: Sequence[TrainReply]) -> list[Reply]:
            rows = self._matrix[: len(some)]
            norms.update(write_deltas(self._blocks, some, wide.params.numpy(), rows.numpy(), pool))
            return [self._make_update(reply, wide, row) for reply, row in zip(some, rows, strict=True)]

        def keep_valid(updates: Iterable[Reply]) -> Iterator[Reply]:
            far = find_far_norms(norms) if self.requirements.max_norm == AUTO else {}
            for update in updates:
                client = str(update.client)
                if (problem := self._find_norm_problem(norms.get(client), far.get(client))) is not None:
                    skipped[client] = problem
                else:
                    yield _match_dtypes(model, update)

        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:  # numpy releases the GIL
            if exceeds_budget:
                if self.requirements.max_norm == AUTO:  # the median must be known before the first row is written
                    for reply in replies.values():
                        make_updates([reply])
                updates: Iterable[Reply] = (make_updates([reply])[0] for reply in replies.values())
            else:
                updates = make_updates(list(replies.values()))
            budget = self.budget if exceeds_budget else None
            collected = Updates.collect(
                keep_valid(updates), budget, on_bad_update="skip", layout=self.layout, keep=not exceeds_budget
            )
        return collected, {c: why for c, why in find_far_norms(norms).items() if c not in skipped}

    def _make_update(self, reply: TrainReply, model: Packed, row: Tensor) -> Reply:
        buffers, counters = read_extras(self.layout, reply.arrays, model)
        return Reply(reply.client, row, reply.num_examples, buffers, counters, reply.metrics, reply.domain)

    def _find_norm_problem(self, norm: float | None, far: str | None) -> str | None:
        max_norm = self.requirements.max_norm
        if far is not None:
            return f"its update has {far}, and max_norm is '{AUTO}'"
        if norm is None or not isinstance(max_norm, int | float) or norm <= max_norm:
            return None  # the aggregator names updates that are not finite
        return f"its update has norm {norm:g}, more than max_norm = {max_norm:g}"


def _digest_messages(groups: Sequence[Arrays]) -> str:
    """Return a digest of the names, shapes and dtypes of a client's messages."""
    described = [sorted((name, list(t.shape), str(t.dtype)) for name, t in group.items()) for group in groups]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


def _find_absorb_error(terms: Sequence[Term], layout: Layout, state: RunState, groups: Sequence[Arrays]) -> str | None:
    """Return the error if the terms cannot absorb these messages. It is tried out: only a term knows what it needs."""
    updates = Updates(["client"], torch.zeros(1, layout.sizes().params, dtype=state.model.params.dtype), [1])
    given = dict.fromkeys(("weights", "unnormalised_weights"), torch.ones(1, dtype=torch.float64))
    number = state.round + 1
    context = ServerContext(round=number, rounds=0, clients=1, layout=layout, slots={}, updates=updates, **given)
    for term, message, before in zip(terms, groups, state.terms, strict=True):
        try:
            term.absorb(state.model, state.model, [message], before.shared, context)
        except Exception as error:  # terms need not check: missing or misshapen messages raise nearly anything
            return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def _skip_unusual_messages(replies: dict[str, TrainReply], digests: Mapping[str, str], skipped: dict[str, str]) -> None:
    """Skip clients whose messages differ in shape from those of most clients, each as last seen."""
    usual = Counter(digests.values()).most_common(1)[0][0] if digests else None
    for client in [client for client in replies if digests.get(client) != usual]:
        skipped[client] = "the messages of its local terms differ in names, shapes or dtypes from those of most clients"
        del replies[client]


def _match_dtypes(model: Packed, update: Reply) -> Reply:
    """Convert an update to the model's dtypes, as in a simulation."""
    buffers = None if update.buffers is None else torch.as_tensor(update.buffers).to(model.buffers.dtype)
    return update._replace(delta=torch.as_tensor(update.delta).to(model.params.dtype), buffers=buffers)
