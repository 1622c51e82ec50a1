"""Put the valid replies of a round together into one cohort of `Updates`; skip the others with the reason."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedheal.core.layout import Layout, Packed
from fedheal.core.parameter import Parameter
from fedheal.core.state import RunState
from fedheal.core.updates import Reply, Updates
from fedheal.federation.model_arrays import widen_bfloat16
from fedheal.federation.reply_limits import escape_text, find_far_norms
from fedheal.local.term import Arrays, ServerContext, Term

# Numbers of a model that all clients are compared with before the next ones: a megabyte of float32.
BLOCK = 1 << 18
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
    """A checked training reply; its arrays may be views of the message's bytes."""

    client: str
    domain: str
    arrays: Mapping[str, NDArray[Any]]
    num_examples: float
    metrics: Mapping[str, float]
    messages: tuple[Arrays, ...] = ()  # of the local terms to the server
    mask: NDArray[np.uint8] | None = None
    is_difference: bool = False  # whether the parameters are local minus global; buffers and counters are local values


@dataclass(frozen=True)
class EvaluateReply:
    """A checked evaluation reply; `accuracy` is from 0 to 1, None if the client sent none."""

    client: str
    domain: str
    num_examples: float
    accuracy: float | None


class Sender(Protocol):
    """A reply as it arrived."""

    @property
    def client(self) -> str: ...


R = TypeVar("R", bound=Sender)


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
                start = 0 if reply.is_difference else model[place]
                np.subtract(arrays[name][part], start, out=delta, casting="same_kind")
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


class CohortBuilder(Generic[R]):
    """Reads replies into a matrix that is reused from round to round: allocating it anew costs more than filling it."""

    def __init__(
        self,
        layout: Layout,
        requirements: ReplyRequirements,
        read: Callable[[R, Layout, ReplyRequirements], TrainReply],  # reads and checks one reply
        terms: Sequence[Term] = (),
        budget: int | None = None,
    ) -> None:
        self.layout, self.requirements, self.read = layout, requirements, read
        self.terms, self.budget = terms, budget
        self._matrix, self._blocks = torch.empty(0, 0), split_parameters(layout)

    def build(self, received: Iterable[R], state: RunState, known_digests: Mapping[str, str]) -> Cohort:
        """Build the cohort. `known_digests`: of each client's last usable messages."""
        replies: dict[str, TrainReply] = {}
        skipped: dict[str, str] = {}
        missing: list[str] = []
        for reply in received:
            try:
                replies[reply.client] = self.read(reply, self.layout, self.requirements)
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
