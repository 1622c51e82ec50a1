"""One lane: a copy of the module with its optimiser, stream and graphs, which trains one client at a time."""

import copy
from collections.abc import Generator, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedheal.core.arrays import upload
from fedheal.core.layout import Packed
from fedheal.core.updates import Metric
from fedheal.engine import graph_inputs, serial
from fedheal.engine.device_data import DeviceData
from fedheal.engine.graph_inputs import FixedContext, capture_graph
from fedheal.engine.serial import ClientResult, LocalTraining, Shared, Task
from fedheal.local.term import Context, Term

WARMUP_STEPS = 2  # of a kind, before it is captured
MAX_STEP_SETS = 8

Fit = Generator[None, None, tuple[Packed, Tensor]]


@dataclass
class StepSet:
    """The steps for clients whose terms prepared values of the same shapes: contexts at fixed addresses, and graphs.

    `graphs` has a captured graph for each batch size and whether it is the last epoch, or how often such a step ran so far.
    """

    contexts: list[FixedContext]
    graphs: dict[tuple[int, bool], int | torch.cuda.CUDAGraph] = field(default_factory=dict)


class LaneRandomState:
    """A lane's own state of the device's generator, which dropout and other random layers draw from.

    Graphs read it on the device, so lanes that shared one state would disturb each other.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        index = torch.cuda.current_device() if self.cuda and device.index is None else device.index
        self.source = torch.cuda.default_generators[index] if self.cuda else torch.default_generator
        self.own = self.source.clone_state() if self.cuda else torch.Generator()

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Let the device's generator use this state for the context."""
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
    """Trains one client at a time."""

    def __init__(self, local_training: LocalTraining, data: DeviceData, tuned_sizes: set[int]) -> None:
        device, training = local_training.device, local_training.training
        module = copy.deepcopy(local_training.module)
        self.local_training = replace(local_training, module=module)
        self.data, self.tuned_sizes = data, tuned_sizes
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.cuda else None  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle() if self.cuda else None
        self.optimiser = serial.make_optimiser(self.local_training)
        params = [p for p in module.parameters() if p.requires_grad]
        self.velocity = [torch.zeros_like(p) for p in params]
        if training.momentum:
            for param, velocity in zip(params, self.velocity, strict=True):
                self.optimiser.state[param]["momentum_buffer"] = velocity
        most_steps = max(serial.count_steps(size, training) for size in data.sizes.values())
        self.plan = torch.zeros(most_steps, 4, training.batch_size, dtype=torch.int64, device=device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.nets: dict[str, nn.Module] = {}
        self.step_sets: dict[Hashable, StepSet] = {}
        self.random_state = LaneRandomState(device)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make the lane's stream and random state current for the context; other lanes run in between."""
        stream: AbstractContextManager[object] = torch.cuda.stream(self.stream) if self.cuda else nullcontext()
        with self.random_state.activate(), stream:
            yield

    def train_client(
        self, model: Packed, shared: Shared, task: Task, metrics: dict[str, Metric], out: Tensor
    ) -> Generator[None, None, ClientResult]:
        """Train a client, pausing after each epoch to let other lanes run."""

        def fit(start: Packed, strength: float) -> Packed:
            retraining, contexts = serial.proximal_retraining(self.local_training, model, task, strength, start)
            return _run_to_end(self._fit(retraining, start, task, "personal", contexts))[0]

        contexts = serial.make_contexts(self.local_training, model, shared, task, fit, self.nets)
        start = serial.prepare_start(self.local_training, contexts, model)
        local, loss = yield from self._fit(self.local_training, start, task, "batches", contexts)
        result = serial.finish_client(
            self.local_training, model, task, contexts, local, metrics | {"train_loss": loss}, out
        )
        addresses = {t.data_ptr() for ctx in contexts for t in graph_inputs.list_tensors(ctx.scratch)}
        slots = tuple(graph_inputs.clone_fixed(slot, addresses) for slot in result.slots)
        messages = tuple(graph_inputs.clone_fixed(message, addresses) for message in result.messages)
        return replace(result, slots=slots, messages=messages)

    def _fit(
        self, local_training: LocalTraining, start: Packed, task: Task, purpose: str, contexts: Sequence[Context]
    ) -> Fit:
        module = local_training.load_model(start, training=True)
        for tensors in (self.velocity, [self.cursor, self.total]):
            torch._foreach_zero_(tensors)
        steps = self._upload_batches(task, purpose)
        step_set = self._get_step_set(local_training, contexts)
        self.random_state.source.manual_seed(serial.derive_layer_seed(local_training, purpose, task))
        steps_per_epoch = -(-self.data.sizes[task.client] // local_training.training.batch_size)
        for number, (size, last) in enumerate(steps):
            if number % steps_per_epoch == 0 and number:
                yield
            self._step(local_training, step_set, size, last)
        for fixed, ctx in zip(step_set.contexts, contexts, strict=True):
            ctx.scratch.update(fixed.scratch)
        return local_training.layout.pack(module.state_dict()), self.total / max(len(steps), 1)

    def _upload_batches(self, task: Task, purpose: str) -> list[tuple[int, bool]]:
        """Put a client's batches on the device; return the size of each and whether it belongs to the last epoch."""
        plan, steps = self.data.plan_client(self.local_training, task, purpose)
        self.plan[: len(plan)] = upload(plan, self.plan.device)
        return steps

    def _get_step_set(self, local_training: LocalTraining, contexts: Sequence[Context]) -> StepSet:
        """Return the step set for these contexts, refilled from them."""
        shapes = tuple(graph_inputs.make_shape_key(ctx.scratch) for ctx in contexts)
        key = (identify_terms(local_training.terms), shapes)
        if key not in self.step_sets:
            while len(self.step_sets) >= MAX_STEP_SETS:  # drop the oldest, with its graphs
                del self.step_sets[next(iter(self.step_sets))]
            self.step_sets[key] = StepSet([graph_inputs.make_fixed_context(ctx) for ctx in contexts])
        step_set = self.step_sets[key]
        for fixed, ctx in zip(step_set.contexts, contexts, strict=True):
            graph_inputs.refill(fixed.scratch, ctx.scratch)
        return step_set

    def _step(self, local_training: LocalTraining, step_set: StepSet, size: int, last: bool) -> None:
        """Take a step: replay its graph, or run it as it is until it is captured."""
        # Only a term that looks at batches can tell the last epoch from the others.
        kind = size, last and any(type(term).loss is not Term.loss for term in local_training.terms)
        graph = step_set.graphs.get(kind, 0)
        if isinstance(graph, torch.cuda.CUDAGraph):
            graph.replay()
        elif graph < WARMUP_STEPS or not self.cuda:
            if size not in self.tuned_sizes and self.cuda:
                torch.cuda.synchronize()  # cuDNN tries its algorithms on the first step of a size: let it run alone
                self.tuned_sizes.add(size)
            self._step_eagerly(local_training, step_set, *kind)
            step_set.graphs[kind] = graph + 1
        else:
            captured = capture_graph(self.pool, lambda: self._step_eagerly(local_training, step_set, *kind))
            step_set.graphs[kind] = captured
            captured.replay()

    def _step_eagerly(self, local_training: LocalTraining, step_set: StepSet, size: int, last: bool) -> None:
        x, y = self.data.make_batch(self.plan.index_select(0, self.cursor)[0, :, :size])
        self.total += serial.train_step(local_training, self.optimiser, step_set.contexts, x, y, last)
        self.cursor += 1


def _run_to_end(fit: Fit) -> tuple[Packed, Tensor]:
    """Run without the pauses."""
    while True:
        try:
            next(fit)
        except StopIteration as stop:
            result: tuple[Packed, Tensor] = stop.value
            return result


def identify_terms(terms: Sequence[Term]) -> Hashable:
    """Return a key under which equal terms share graphs."""
    try:
        hash(tuple(terms))
    except TypeError:
        return tuple(id(term) for term in terms)
    return tuple((type(term), term) for term in terms)
