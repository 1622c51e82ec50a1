"""One lane: a copy of the module with its optimiser, stream and graphs, that trains one client at a time."""

from __future__ import annotations

import copy
from collections.abc import Generator, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedheal.core.layout import Packed
from fedheal.core.rng import generator
from fedheal.engine import serial
from fedheal.engine.device_data import Resident
from fedheal.engine.graph_inputs import Static, Unable, apart, refill, shape_of, static, tensors_in
from fedheal.engine.serial import ClientResult, LocalTraining, Task
from fedheal.local.term import Arrays, Context, Term

WARM = 2  # steps of a kind that run before it is captured
BOOKS = 8

Fit = Generator[None, None, tuple[Packed, Tensor]]


@dataclass
class Book:
    """What a lane keeps for clients whose terms prepared things of one shape: contexts at fixed addresses, and graphs."""

    contexts: list[Static]
    graphs: dict[tuple[int, bool], int | torch.cuda.CUDAGraph] = field(default_factory=dict)  # or how often it ran


class Chance:
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

    def __init__(self, local_training: LocalTraining, resident: Resident, warmed: set[int]) -> None:
        module = copy.deepcopy(local_training.module)
        self.local_training = replace(local_training, module=module)
        self.resident, self.warmed = resident, warmed
        self.cuda = local_training.device.type == "cuda"
        self.stream = torch.cuda.Stream(local_training.device) if self.cuda else None  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle() if self.cuda else None
        self.optimiser = serial.optimiser_of(self.local_training)
        self.velocity = [torch.zeros_like(p) for p in module.parameters() if p.requires_grad]
        if local_training.training.momentum:
            trained = (p for p in module.parameters() if p.requires_grad)
            for param, velocity in zip(trained, self.velocity, strict=True):
                self.optimiser.state[param]["momentum_buffer"] = velocity
        longest = max(
            serial.steps_of(len(split), local_training.training) for split in local_training.examples.values()
        )
        self.plan = torch.zeros(
            longest, 4, local_training.training.batch_size, dtype=torch.int64, device=local_training.device
        )
        self.cursor = torch.zeros(1, dtype=torch.int64, device=local_training.device)
        self.total = torch.zeros((), dtype=torch.float64, device=local_training.device)
        self.nets: dict[str, nn.Module] = {}
        self.books: dict[Hashable, Book] = {}
        self.chance = Chance(local_training.device)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The lane's stream and random state are current only while it is at work: others come in between."""
        inside: AbstractContextManager[object] = torch.cuda.stream(self.stream) if self.cuda else nullcontext()
        with self.chance.current(), inside:
            yield

    def client(
        self, model: Packed, shared: tuple[Arrays, ...], task: Task, metrics: dict[str, float], out: Tensor
    ) -> Generator[None, None, tuple[ClientResult, Tensor]]:
        """A client's round, with pauses in which other lanes are served; what comes of it, and its mean loss."""

        def fit(start: Packed, strength: float) -> Packed:
            again, contexts = serial.anchored(self.local_training, model, task, strength, start)
            return _finished(self._fit(again, start, task, "personal", contexts))[0]

        contexts = serial.contexts_of(self.local_training, model, shared, task, fit, self.nets)
        start = serial.prepared(self.local_training, contexts, model)
        local, loss = yield from self._fit(self.local_training, start, task, "batches", contexts)
        trained = serial.concluded(self.local_training, model, task, contexts, local, dict(metrics), out)
        fixed = {t.data_ptr() for ctx in contexts for t in tensors_in(ctx.scratch)}
        slots = tuple(apart(slot, fixed) for slot in trained.slots)
        messages = tuple(apart(message, fixed) for message in trained.messages)
        return replace(trained, slots=slots, messages=messages), loss

    def _fit(
        self, local_training: LocalTraining, start: Packed, task: Task, purpose: str, contexts: Sequence[Context]
    ) -> Fit:
        module = local_training.module
        module.load_state_dict(local_training.layout.unpack(start))
        module.train()
        for tensors in (self.velocity, [self.cursor, self.total]):
            torch._foreach_zero_(tensors)
        steps = self._upload(task, purpose)
        book = self._book(local_training, contexts)
        self.chance.source.manual_seed(serial.layer_seed(local_training, purpose, task))
        epoch = -(-len(local_training.examples[task.client]) // local_training.training.batch_size)
        for number, (size, last) in enumerate(steps):
            if number % epoch == 0 and number:
                yield
            self._step(local_training, book, size, last)
        for fixed, ctx in zip(book.contexts, contexts, strict=True):
            ctx.scratch.update(fixed.scratch)
        return local_training.layout.pack(module.state_dict()), self.total / max(len(steps), 1)

    def _upload(self, task: Task, purpose: str) -> list[tuple[int, bool]]:
        """Put a client's batches on the device; the size of each, and whether it belongs to the last epoch."""
        local_training, chance = (
            self.local_training,
            generator(self.local_training.seed, purpose, task.round, task.client),
        )
        examples, first = len(local_training.examples[task.client]), self.resident.first[task.client]
        plan = torch.zeros(serial.steps_of(examples, local_training.training), *self.plan.shape[1:], dtype=torch.int64)
        found = []
        for row, (chosen, choices, last) in zip(
            plan.numpy(), serial.planned(examples, local_training.training, chance), strict=True
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

    def _book(self, local_training: LocalTraining, contexts: Sequence[Context]) -> Book:
        """The book for what these contexts hold, refilled from them."""
        key = (_identity(local_training.terms), tuple(shape_of(ctx.scratch) for ctx in contexts))
        if key not in self.books:
            while len(self.books) >= BOOKS:  # the oldest goes, with its graphs
                del self.books[next(iter(self.books))]
            self.books[key] = Book([static(ctx) for ctx in contexts])
        book = self.books[key]
        for fixed, ctx in zip(book.contexts, contexts, strict=True):
            refill(fixed.scratch, ctx.scratch)
        return book

    def _step(self, local_training: LocalTraining, book: Book, size: int, last: bool) -> None:
        # Only a term that looks at batches can tell the last epoch from the others.
        kind = size, last and any(type(term).loss is not Term.loss for term in local_training.terms)
        known = book.graphs.get(kind, 0)
        if isinstance(known, torch.cuda.CUDAGraph):
            known.replay()
        elif known < WARM or not self.cuda:
            if size not in self.warmed and self.cuda:
                torch.cuda.synchronize()  # cuDNN tries its algorithms on the first step of a size: by itself
                self.warmed.add(size)
            self._eager(local_training, book, *kind)
            book.graphs[kind] = known + 1
        else:
            graph = book.graphs[kind] = self._captured(local_training, book, *kind)
            graph.replay()

    def _captured(self, local_training: LocalTraining, book: Book, size: int, last: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        assert self.pool is not None
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            self._eager(local_training, book, size, last)
            graph.capture_end()
        except (RuntimeError, Unable) as error:
            with suppress(RuntimeError):
                graph.capture_end()
            if isinstance(error, torch.OutOfMemoryError | Unable):
                raise
            raise Unable(f"a step cannot be captured in a CUDA graph ({str(error).splitlines()[0]})") from error
        return graph

    def _eager(self, local_training: LocalTraining, book: Book, size: int, last: bool) -> None:
        x, y = self.resident.batch(self.plan.index_select(0, self.cursor)[0, :, :size])
        self.total += serial.step(local_training, self.optimiser, book.contexts, x, y, last)
        self.cursor += 1


def _finished(work: Fit) -> tuple[Packed, Tensor]:
    """Without the pauses."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: tuple[Packed, Tensor] = end.value
            return result


def _identity(terms: Sequence[Term]) -> Hashable:
    """Terms that are equal may share a graph."""
    try:
        hash(tuple(terms))
    except TypeError:
        return tuple(id(term) for term in terms)
    return tuple((type(term), term) for term in terms)
