"""What a training reply holds, checked, or refused with a reason; and how it becomes a row of updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedheal.core.layout import Layout, Packed
from fedheal.flower import messages as wire
from fedheal.flower.node_registry import Heard
from fedheal.local.term import Arrays


@dataclass(frozen=True)
class Trained:
    """What a client's training reply holds, its arrays still over the message's own bytes."""

    client: str
    domain: str
    arrays: Mapping[str, NDArray[Any]]
    num_examples: float
    metrics: Mapping[str, float]
    messages: tuple[Arrays, ...]
    kept: NDArray[np.uint8] | None


class Refused(ValueError):
    """A reply that cannot count, with the reason."""


class Unfit(Refused):
    """A reply that lacks what the method needs of every client. `needed` says what: where none has it, the app is wrong."""

    def __init__(self, why: str, needed: str) -> None:
        super().__init__(why)
        self.needed = needed


@dataclass(frozen=True)
class Admission:
    """What a reply must be like. `needs`: metrics it must hold; `terms`: what it must have trained with."""

    arrays_key: str = "arrays"
    examples_key: str = "num-examples"
    max_examples: float = 1e9
    max_norm: float | None = None
    needs: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    masked: bool = False  # the clients mask their own updates

    def __post_init__(self) -> None:
        for key, bound in (("max_examples", self.max_examples), ("max_norm", self.max_norm)):
            number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
            if bound is not None and not (number and 0 < bound < float("inf")):
                raise ValueError(f"{key} = {bound!r}: use a finite number above 0")


def trained(one: Heard, layout: Layout, admission: Admission) -> Trained:
    """A training reply, checked but for its parameters' values; `Refused` says what is wrong."""
    content = one.message.content
    metrics = numbers(content.metric_records)
    examples = examples_of(metrics, admission)
    _check_fit(content, metrics, admission)
    kept = None
    try:
        arrays = _model(_chosen(content.array_records, admission.arrays_key), layout)
        told = wire.grouped(content.array_records.get(wire.MESSAGES), len(admission.terms))
        if admission.masked:
            kept = wire.unbits(content.array_records.get(wire.KEPT, ArrayRecord()), layout.sizes().params)
    except Refused:
        raise
    except ValueError as flaw:
        raise Refused(str(flaw)) from None
    if not all(bool(tensor.isfinite().all()) for group in told for tensor in group.values()):
        raise Refused("what its local method tells the server holds NaN or infinity")
    return Trained(one.client, one.domain, arrays, examples, metrics, told, kept)


def examples_of(metrics: dict[str, float], admission: Admission) -> float:
    """How many examples stand behind a reply, taken out of its metrics."""
    key, most = admission.examples_key, admission.max_examples
    examples = metrics.pop(key, None)
    if examples is None:
        raise Refused(f"it sends no metric '{key}' that is a number")
    if not 0 < examples <= most:
        raise Refused(f"{key} = {examples:g}; a positive number up to max_examples = {most:g} is needed")
    return examples


def _check_fit(content: RecordDict, metrics: Mapping[str, float], admission: Admission) -> None:
    """Without local terms a method does not mind how clients train; with them, other training is another method."""
    about: Mapping[str, Any] = content.config_records.get(wire.ABOUT, {})
    said = about.get("terms", [])
    wanted = ", ".join(admission.terms)
    if wanted and said != list(admission.terms):
        trained_with = f"with {said!s:.200}" if said else "without the method's local terms, as far as it says"
        raise Unfit(
            f"it trained {trained_with}; this federation trains with {wanted}",
            f"clients that train with {wanted}, which none says it does: train with fedheal.flower.client.train, on a "
            "local_training with the same method",
        )
    for name in admission.needs:
        if name not in metrics:
            raise Unfit(
                f"it sends no metric '{name}', which this aggregation needs",
                f"the client metric '{name}', which no client sends: train with fedheal.flower.client.train, or send it "
                "with fedheal.flower.client.reply",
            )


def numbers(records: Mapping[str, MetricRecord]) -> dict[str, float]:
    """All single numbers of a reply's metrics."""
    found: dict[str, float] = {}
    for record in records.values():
        found |= {k: float(v) for k, v in record.items() if isinstance(v, (int, float))}
    found.pop("partition-id", None)
    return found


def averaged(contents: list[RecordDict], examples_key: str) -> MetricRecord:
    """Each metric, a number or a list, averaged by examples over the clients that send it whole: finite, and of one length."""
    means: dict[str, tuple[NDArray[Any], float]] = {}  # so far, and of how many examples
    for content in contents:
        examples = numbers(content.metric_records)[examples_key]
        for name, value in (item for record in content.metric_records.values() for item in record.items()):
            found = np.asarray(value, np.float64)
            mean, before = means.get(name, (np.zeros_like(found), 0.0))
            if mean.shape == found.shape and np.isfinite(found).all():
                share = examples / (before + examples)  # of numbers near the largest, sums would overflow
                means[name] = (1 - share) * mean + share * found, before + examples
    left_out = {examples_key, "partition-id"}
    return MetricRecord({k: mean.tolist() for k, (mean, _) in sorted(means.items()) if k not in left_out})


def difference(
    layout: Layout, arrays: Mapping[str, NDArray[Any]], model: Packed, row: NDArray[Any]
) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
    """Write local minus global parameters into `row`; the local buffers and counters come back as vectors."""
    sizes, before = layout.sizes(), model.params.numpy()
    extras: dict[str, list[NDArray[Any]]] = {"buffer": [], "counter": []}
    seen: set[tuple[str, int, int]] = set()
    for entry in layout.entries:
        place = (entry.kind, entry.start, entry.stop)
        if place in seen or entry.start == entry.stop:
            continue  # a tied tensor stands once
        seen.add(place)
        local = arrays[entry.name].reshape(-1)
        if entry.kind == "param":
            here = slice(entry.start, entry.stop)
            real = local.view(local.real.dtype) if np.iscomplexobj(local) else local
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found and named later
                np.subtract(real, before[here], out=row[here], casting="same_kind")
        else:
            extras[entry.kind].append(local)
    buffers = np.concatenate(extras["buffer"]).astype(model.buffers.numpy().dtype) if sizes.buffers else None
    counters = np.concatenate(extras["counter"]).astype(np.int64) if sizes.counters else None
    return buffers, counters


def _model(record: ArrayRecord, layout: Layout) -> dict[str, NDArray[Any]]:
    missing = [e.name for e in layout.entries if e.name not in record]
    extra = sorted(set(record) - {e.name for e in layout.entries})
    if missing or extra:
        said = [f"lacks {missing[:3]}"] if missing else []
        said += [f"has unknown {extra[:3]}"] if extra else []
        raise Refused(f"its model {' and '.join(said)}")
    arrays = {}
    for entry in layout.entries:
        array: Array = record[entry.name]
        try:
            values = wire.viewed(array)
        except ValueError as flaw:
            raise Refused(f"its '{entry.name}' cannot be read: {flaw}") from None
        kind = "iub" if entry.kind == "counter" else "c" if entry.dtype.is_complex else "f"
        if values.shape != entry.shape or values.dtype.kind not in kind:
            raise Refused(
                f"its '{entry.name}' is {values.dtype} of shape {values.shape}; {entry.dtype} of shape "
                f"{entry.shape} is needed"
            )
        arrays[entry.name] = values
    return arrays


def _chosen(records: Mapping[str, ArrayRecord], key: str) -> ArrayRecord:
    """The model's record: by its key, or the only one that is not ours."""
    others = [record for name, record in records.items() if not name.startswith("fedheal")]
    if key in records:
        return records[key]
    if len(others) != 1:
        raise Refused(f"it holds {len(others)} array records and none called '{key}'")
    return others[0]
