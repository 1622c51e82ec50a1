"""Clients side by side on one GPU.

A small network's step is dozens of kernels that each fill a fraction of a GPU and are launched one by one. A *lane* is a copy
of the module with an optimiser, a stream, and CUDA graphs of its steps; several lanes train a client each at the same time.
What a step reads lies at fixed addresses and is refilled: the images of all clients stay on the device, a client's batches for
the round are uploaded as one table of indices and shifts, and what its terms prepared is copied into the lane's own `scratch`.
Hence the rule for a term: `loss` and `grad` read `ctx.scratch`, and nothing else of `ctx` that differs from client to client.

A step of a batch size that a lane meets for the first time runs as it is, which also warms up what must not be set up inside a
graph; later ones are captured and replayed. A module or a term that cannot be captured makes the run fall back to the serial
engine. The serial engine is this one's obvious twin: same seeds, same batches, same steps.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedheal.data.augment import PAD, normalised
from fedheal.data.domains import Split
from fedheal.engine import serial
from fedheal.engine.numerics import lowered
from fedheal.engine.serial import Bench, Task, Trained
from fedheal.layout import Packed
from fedheal.local.term import Arrays, Context, Term
from fedheal.rng import generator

log = logging.getLogger("fedheal")

WARM = 2  # steps of a kind that run before it is captured
PIXELS = 1 << 22  # in the batches of all lanes together: where an H200 is full
MOST = 8
BOOKS = 8

Fit = Generator[None, None, tuple[Packed, Tensor]]


class Unable(Exception):
    """Why this module or term cannot be trained in lanes."""


class _Static(Context):
    """A context as a step may see it: what differs between clients and rounds is out of reach, and so cannot be frozen."""

    VARYING = frozenset(
        {"client", "round", "steps", "reach", "received", "slot", "shared", "fit", "gradient", "validate"}
    )

    def __getattribute__(self, name: str) -> Any:
        if name in _Static.VARYING:
            raise Unable(
                f"a step reads ctx.{name}, which differs from client to client; `prepare` may put it in ctx.scratch"
            )
        return super().__getattribute__(name)


class Resident:
    """All clients' examples on the device, as bytes, channels last, with room for shifts."""

    def __init__(self, bench: Bench) -> None:
        clients, how = sorted(bench.examples), bench.training.augment
        self.pad = PAD if "crop" in how else 0
        stored = [functional.pad(bench.examples[c].images, [self.pad] * 4).permute(0, 2, 3, 1) for c in clients]
        self.images = torch.cat([part.contiguous() for part in stored])
        self.labels = torch.cat([bench.examples[c].labels for c in clients])
        ends = np.cumsum([len(bench.examples[c]) for c in clients])
        self.first = {c: int(end) - len(bench.examples[c]) for c, end in zip(clients, ends, strict=True)}
        self.height, self.width = bench.examples[clients[0]].images.shape[-2:]
        self.varied = how != "none"
        self.rows = torch.arange(self.height, device=bench.device)
        self.columns = torch.arange(self.width, device=bench.device)

    def batch(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        """The batch of a plan `[4, size]`: which example, its shifts, whether it is mirrored."""
        which, top, left, mirrored = plan.unbind()
        if self.varied:
            rows = top[:, None] + self.rows
            columns = left[:, None] + torch.where(mirrored[:, None] > 0, self.columns.flip(0), self.columns)
            images = self.images[which[:, None, None], rows[:, :, None], columns[:, None, :]]
        else:
            images = self.images[which]
        return normalised(images.permute(0, 3, 1, 2)), self.labels[which]

    def plain(self, clients: Sequence[str], bench: Bench) -> tuple[Tensor, Tensor]:
        """The examples of some clients as they are."""
        where = torch.cat(
            [torch.arange(self.first[c], self.first[c] + len(bench.examples[c]), device=bench.device) for c in clients]
        )
        inner = slice(self.pad, self.pad + self.height), slice(self.pad, self.pad + self.width)
        return self.images[where][:, inner[0], inner[1]].permute(0, 3, 1, 2), self.labels[where]


@dataclass
class _Book:
    """What a lane keeps for clients whose terms prepared things of one shape: contexts at fixed addresses, and graphs."""

    contexts: list[_Static]
    graphs: dict[tuple[int, bool], int | torch.cuda.CUDAGraph] = field(default_factory=dict)  # or how often it ran


class _Chance:
    """A lane's own state of the device's generator, from which dropout and the like draw.

    Graphs read it on the device, so that lanes with one state between them would disturb each other.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        index = torch.cuda.current_device() if self.cuda and device.index is None else device.index
        self.source = torch.cuda.default_generators[index] if self.cuda else torch.default_generator
        self.own = self.source.clone_state() if self.cuda else torch.Generator()

    @contextmanager
    def current(self) -> Iterator[None]:
        if self.cuda:
            shared = self.source.graphsafe_get_state()
            self.source.graphsafe_set_state(self.own)
            try:
                yield
            finally:
                self.source.graphsafe_set_state(shared)
        else:
            before = self.source.get_state()
            self.source.set_state(self.own.get_state())
            try:
                yield
            finally:
                self.own.set_state(self.source.get_state())
                self.source.set_state(before)


class Lane:
    """One client at a time."""

    def __init__(self, bench: Bench, resident: Resident, warmed: set[int]) -> None:
        module = copy.deepcopy(bench.module)
        self.bench = replace(bench, module=module)
        self.resident, self.warmed = resident, warmed
        self.cuda = bench.device.type == "cuda"
        self.stream = torch.cuda.Stream(bench.device) if self.cuda else None  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle() if self.cuda else None
        self.optimiser = serial.optimiser_of(self.bench)
        self.velocity = [torch.zeros_like(p) for p in module.parameters() if p.requires_grad]
        if bench.training.momentum:
            trained = (p for p in module.parameters() if p.requires_grad)
            for param, velocity in zip(trained, self.velocity, strict=True):
                self.optimiser.state[param]["momentum_buffer"] = velocity
        longest = max(serial.steps_of(len(split), bench.training) for split in bench.examples.values())
        self.plan = torch.zeros(longest, 4, bench.training.batch_size, dtype=torch.int64, device=bench.device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=bench.device)
        self.total = torch.zeros((), dtype=torch.float64, device=bench.device)
        self.nets: dict[str, nn.Module] = {}
        self.books: dict[Hashable, _Book] = {}
        self.chance = _Chance(bench.device)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The lane's stream and random state are current only while it is at work: others come in between."""
        inside: AbstractContextManager[object] = torch.cuda.stream(self.stream) if self.cuda else nullcontext()
        with self.chance.current(), inside:
            yield

    def client(
        self, model: Packed, shared: tuple[Arrays, ...], task: Task, metrics: dict[str, float], out: Tensor
    ) -> Generator[None, None, tuple[Trained, Tensor]]:
        """A client's round, with pauses in which other lanes are served; what comes of it, and its mean loss."""

        def fit(start: Packed, strength: float) -> Packed:
            again, contexts = serial.anchored(self.bench, model, task, strength, start)
            return _finished(self._fit(again, start, task, "personal", contexts))[0]

        contexts = serial.contexts_of(self.bench, model, shared, task, fit, self.nets)
        start = serial.prepared(self.bench, contexts, model)
        local, loss = yield from self._fit(self.bench, start, task, "batches", contexts)
        trained = serial.concluded(self.bench, model, task, contexts, local, dict(metrics), out)
        fixed = {t.data_ptr() for ctx in contexts for t in _tensors(ctx.scratch)}
        slots = tuple(_apart(slot, fixed) for slot in trained.slots)
        messages = tuple(_apart(message, fixed) for message in trained.messages)
        return replace(trained, slots=slots, messages=messages), loss

    def _fit(self, bench: Bench, start: Packed, task: Task, purpose: str, contexts: Sequence[Context]) -> Fit:
        module = bench.module
        module.load_state_dict(bench.layout.unpack(start))
        module.train()
        for tensors in (self.velocity, [self.cursor, self.total]):
            torch._foreach_zero_(tensors)
        steps = self._upload(task, purpose)
        book = self._book(bench, contexts)
        self.chance.source.manual_seed(serial.layer_seed(bench, purpose, task))
        epoch = -(-len(bench.examples[task.client]) // bench.training.batch_size)
        for number, (size, last) in enumerate(steps):
            if number % epoch == 0 and number:
                yield
            self._step(bench, book, size, last)
        for fixed, ctx in zip(book.contexts, contexts, strict=True):
            ctx.scratch.update(fixed.scratch)
        return bench.layout.pack(module.state_dict()), self.total / max(len(steps), 1)

    def _upload(self, task: Task, purpose: str) -> list[tuple[int, bool]]:
        """Put a client's batches on the device; the size of each, and whether it belongs to the last epoch."""
        bench, chance = self.bench, generator(self.bench.seed, purpose, task.round, task.client)
        examples, first = len(bench.examples[task.client]), self.resident.first[task.client]
        plan = torch.zeros(serial.steps_of(examples, bench.training), *self.plan.shape[1:], dtype=torch.int64)
        found = []
        for row, (chosen, choices, last) in zip(
            plan.numpy(), serial.planned(examples, bench.training, chance), strict=True
        ):
            size = len(chosen)
            row[0, :size] = chosen + first
            for channel, choice in enumerate(choices, start=1):
                if choice is not None:
                    row[channel, :size] = choice
            found.append((size, last))
        source = plan.pin_memory() if self.cuda else plan
        self.plan[: len(plan)].copy_(source, non_blocking=True)
        return found

    def _book(self, bench: Bench, contexts: Sequence[Context]) -> _Book:
        """The book for what these contexts hold, refilled from them."""
        key = (_identity(bench.terms), tuple(_shape(ctx.scratch) for ctx in contexts))
        if key not in self.books:
            while len(self.books) >= BOOKS:  # the oldest goes, with its graphs
                del self.books[next(iter(self.books))]
            self.books[key] = _Book([_static(ctx) for ctx in contexts])
        book = self.books[key]
        for fixed, ctx in zip(book.contexts, contexts, strict=True):
            _refill(fixed.scratch, ctx.scratch)
        return book

    def _step(self, bench: Bench, book: _Book, size: int, last: bool) -> None:
        # Only a term that looks at batches can tell the last epoch from the others.
        kind = size, last and any(type(term).loss is not Term.loss for term in bench.terms)
        known = book.graphs.get(kind, 0)
        if isinstance(known, torch.cuda.CUDAGraph):
            known.replay()
        elif known < WARM or not self.cuda:
            if size not in self.warmed and self.cuda:
                torch.cuda.synchronize()  # cuDNN tries its algorithms on the first step of a size: by itself
                self.warmed.add(size)
            self._eager(bench, book, *kind)
            book.graphs[kind] = known + 1
        else:
            graph = book.graphs[kind] = self._captured(bench, book, *kind)
            graph.replay()

    def _captured(self, bench: Bench, book: _Book, size: int, last: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        assert self.pool is not None
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            self._eager(bench, book, size, last)
            graph.capture_end()
        except (RuntimeError, Unable) as error:
            with suppress(RuntimeError):
                graph.capture_end()
            if isinstance(error, torch.OutOfMemoryError | Unable):
                raise
            raise Unable(f"a step cannot be captured in a CUDA graph ({str(error).splitlines()[0]})") from error
        return graph

    def _eager(self, bench: Bench, book: _Book, size: int, last: bool) -> None:
        x, y = self.resident.batch(self.plan.index_select(0, self.cursor)[0, :, :size])
        self.total += serial.step(bench, self.optimiser, book.contexts, x, y, last)
        self.cursor += 1


class Lanes:
    """A trainer of cohorts: see `engine.workers.Trainer`."""

    def __init__(self, bench: Bench, lanes: int | None = None) -> None:
        self.bench, self.asked = bench, lanes
        self.resident = Resident(bench)
        self.most = lanes or _most(bench)
        self.lanes: list[Lane] = []
        self.warmed: set[int] = set()
        self.reason = ""  # why the serial engine has taken over

    def __call__(self, model: Packed, shared: tuple[Arrays, ...], tasks: Sequence[Task]) -> Iterator[Trained]:
        while not self.reason:
            try:
                return iter(self._train(model, shared, tasks))
            except Unable as unable:
                self.reason = str(unable)
                log.warning("training one client after another: %s", self.reason)
            except torch.OutOfMemoryError:
                if len(self.lanes) <= 1:
                    raise
                self.most = len(self.lanes) // 2
                log.warning("out of memory with %d lanes: going on with %d", len(self.lanes), self.most)
            self._release()
        return (serial.train(self.bench, model, shared, task) for task in tasks)

    def _train(self, model: Packed, shared: tuple[Arrays, ...], tasks: Sequence[Task]) -> list[Trained]:
        bench = self.bench
        steps = [serial.steps_of(len(bench.examples[task.client]), bench.training) for task in tasks]
        queues = _shared_out(steps, self.most)
        while len(self.lanes) < len(queues):
            self.lanes.append(Lane(bench, self.resident, self.warmed))
        metrics = self._metrics(model, tasks)
        deltas = torch.empty(len(tasks), len(model.params), dtype=model.params.dtype, device=bench.device)
        done: dict[int, tuple[Trained, Tensor]] = {}

        def work(lane: Lane, queue: Sequence[int]) -> Generator[None, None, None]:
            for i in queue:
                done[i] = yield from lane.client(model, shared, tasks[i], metrics[i], deltas[i])
                yield

        with _side_by_side(bench.device, self.lanes):
            busy = [(lane, work(lane, queue)) for lane, queue in zip(self.lanes, queues, strict=False)]
            while busy:
                for pair in list(busy):
                    with pair[0].entered():
                        if next(pair[1], _END) is _END:
                            busy.remove(pair)
        losses = torch.stack([done[i][1] for i in range(len(tasks))]).tolist() if tasks else []
        return [_with_loss(done[i][0], loss) for i, loss in enumerate(losses)]

    @torch.no_grad()
    def _metrics(self, model: Packed, tasks: Sequence[Task]) -> list[dict[str, float]]:
        """The loss of the received model on each client's data, where it is asked for: all clients in one pass."""
        bench = self.bench
        if not bench.received_loss or not tasks:
            return [{} for _ in tasks]
        bench.module.load_state_dict(bench.layout.unpack(model))
        bench.module.eval()
        images, labels = self.resident.plain([task.client for task in tasks], bench)
        losses = []
        for x, y in serial.in_turn(Split(images, labels)):
            with lowered(bench.precision, bench.device):
                logits = bench.module(normalised(x)).to(torch.float32)
            losses.append(functional.cross_entropy(logits, y, reduction="none"))
        parts = torch.split(torch.cat(losses).double(), [len(bench.examples[task.client]) for task in tasks])
        return [{"loss": loss} for loss in torch.stack([part.mean() for part in parts]).tolist()]

    def _release(self) -> None:
        self.lanes.clear()
        if self.bench.device.type == "cuda":
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()


_END = object()


@contextmanager
def _side_by_side(device: torch.device, lanes: Sequence[Lane]) -> Iterator[None]:
    """Lanes begin after what is under way here, and what follows here waits for them."""
    here = torch.cuda.current_stream(device) if device.type == "cuda" else None
    for lane in lanes:
        if lane.stream is not None and here is not None:
            lane.stream.wait_stream(here)
    try:
        yield
    finally:
        for lane in lanes:
            if lane.stream is not None and here is not None:
                here.wait_stream(lane.stream)


def _finished(work: Fit) -> tuple[Packed, Tensor]:
    """Without the pauses."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: tuple[Packed, Tensor] = end.value
            return result


def _most(bench: Bench) -> int:
    """As many lanes as fill the device, which large images do sooner; more give nothing and take memory."""
    height, width = next(iter(bench.examples.values())).images.shape[-2:]
    return max(4, min(MOST, PIXELS // (bench.training.batch_size * height * width)))


def _shared_out(steps: Sequence[int], most: int) -> list[list[int]]:
    """Clients to lanes, the longest first to the least busy; as many lanes as end soonest, and no more than needed.

    >>> _shared_out([120, 120, 100, 100, 20, 20], 6)
    [[0], [1], [2, 4], [3, 5]]
    """

    def dealt(lanes: int) -> tuple[int, list[list[int]]]:
        queues: list[list[int]] = [[] for _ in range(lanes)]
        load = [0] * lanes
        for i in sorted(range(len(steps)), key=lambda i: (-steps[i], i)):
            lane = load.index(min(load))
            queues[lane].append(i)
            load[lane] += steps[i]
        return max(load), queues

    tried = [dealt(lanes) for lanes in range(1, min(most, len(steps)) + 1)]
    return min(tried, key=lambda one: one[0])[1] if tried else []


def _with_loss(trained: Trained, loss: float) -> Trained:
    reply = trained.reply
    return replace(trained, reply=reply._replace(metrics=dict(reply.metrics) | {"train_loss": loss}))


def _identity(terms: Sequence[Term]) -> Hashable:
    """Terms that are equal may share a graph."""
    try:
        hash(tuple(terms))
    except TypeError:
        return tuple(id(term) for term in terms)
    return tuple((type(term), term) for term in terms)


def _shape(value: Any) -> Hashable:
    """What must be equal for a graph to be used again: the shapes of tensors, the very modules, plain values."""
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if isinstance(value, nn.Module):
        return "module", id(value)
    if isinstance(value, Mapping):
        return "mapping", tuple((name, _shape(value[name])) for name in sorted(value))
    if isinstance(value, list | tuple):
        return "sequence", tuple(_shape(part) for part in value)
    if value is None or isinstance(value, bool | int | float | str):
        return type(value).__name__, value
    raise Unable(f"ctx.scratch holds a {type(value).__name__}, which cannot be refilled from client to client")


def _static(ctx: Context) -> _Static:
    known = {f.name: getattr(ctx, f.name) for f in fields(Context)}
    return _Static(**known | {"scratch": _clone(ctx.scratch)})


def _clone(value: Any) -> Any:
    """The same at addresses of its own; tensors shaped like a convolution's are laid out as the module's are."""
    if isinstance(value, Tensor):
        return value.clone(memory_format=torch.channels_last if value.ndim == 4 else torch.contiguous_format)
    if isinstance(value, Mapping):
        return {name: _clone(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_clone(part) for part in value]
    return value


def _refill(fixed: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Copy what was prepared for a client; what steps themselves have put there starts from zero."""
    own = [part for name, value in fixed.items() if name not in given for part in _tensors(value)]
    if own:
        torch._foreach_zero_(own)
    pairs = [
        (a, b) for name, value in given.items() for a, b in zip(_tensors(fixed[name]), _tensors(value), strict=True)
    ]
    pairs = [(a, b) for a, b in pairs if a is not b]
    if pairs:
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for name in sorted(value) for tensor in _tensors(value[name])]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def _apart(arrays: Arrays, fixed: set[int]) -> Arrays:
    """A term may hand out what lies in its scratch, which the next client overwrites."""
    return {name: t.clone() if t.data_ptr() in fixed else t for name, t in arrays.items()}
