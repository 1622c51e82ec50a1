"""A group of clients that take their steps together, as one program: one launch per layer for all of them.

Clients are sorted by their number of steps. The first clients, which have more than t steps, take step t. The others
keep their values. A batch that is smaller than others is padded: loss and batch normalisation count its examples only.
Each kind of step runs once as it is and is then captured in a CUDA graph. What it reads is at fixed addresses.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor, nn

from fedheal.core.arrays import upload
from fedheal.core.import_path import import_triton_kernels
from fedheal.core.layout import Packed
from fedheal.core.rng import derive
from fedheal.engine import serial
from fedheal.engine.cohort_batch import make_stacked_batch
from fedheal.engine.cohort_loss import compute_client_losses
from fedheal.engine.cohort_steps import Kind, Prepared, StackedSteps
from fedheal.engine.device_data import DeviceData
from fedheal.engine.graph_inputs import capture_graph
from fedheal.engine.lane import LaneRandomState, identify_terms
from fedheal.engine.precision import autocast
from fedheal.engine.serial import LocalTraining, Task
from fedheal.local.term import Batch, Term
from fedheal.models.client_rows import ClientRows
from fedheal.models.kernel_launches import compile_in_parallel
from fedheal.models.stacked_layers import KERNELS, allow_kernels, stack_module

MAX_STEP_SETS = 8
MAX_GRAPHS = 32
MAX_LEVELS = 8  # different numbers of active clients in a round


class CohortGroup:
    """Memory, module and graphs for up to `size` clients that train together; a check runs without graphs and kernels."""

    def __init__(self, local_training: LocalTraining, data: DeviceData, size: int, is_check: bool = False) -> None:
        device, training = local_training.device, local_training.training
        self.device, self.data, self.size, self.is_check = device, data, size, is_check
        self.cuda = device.type == "cuda" and not is_check
        low = torch.bfloat16 if local_training.precision == "bf16" else None
        self.rows = ClientRows(local_training.layout, size, device, low=low)
        self.module = stack_module(local_training.module, self.rows).train()
        allow_kernels(self.module, not is_check)
        self.stream = torch.cuda.Stream(device) if self.cuda else None  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle() if self.cuda else None
        most_steps = max(serial.count_steps(examples, training) for examples in data.sizes.values())
        self.batch_size = self.rows.batch_size = training.batch_size
        self.plan = torch.zeros(most_steps, size, 4, self.batch_size, dtype=torch.int64, device=device)
        self.counts = torch.zeros(most_steps, size, dtype=torch.int32, device=device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.total = torch.zeros(size, dtype=torch.float64, device=device)
        self.nets: dict[str, nn.Module] = {}
        self.schedule: Schedule | None = None  # the last one, which `counts` belongs to
        self.begun_plan: tuple[Hashable, Iterator[Tensor]] | None = None  # of the next round
        self.last_trained: Hashable = None  # the clients, and what for
        self.is_compiled = False
        self.step_sets: dict[Hashable, StackedSteps] = {}
        self.random_state = LaneRandomState(device)

    def train(
        self, local_training: LocalTraining, prepared: Sequence[Prepared], tasks: Sequence[Task], purpose: str
    ) -> tuple[Packed, Tensor]:
        """Train clients; return their models, as matrices with a row for each client, and their mean losses."""
        schedule = self._make_schedule(local_training, tasks)
        prepared, tasks = [prepared[i] for i in schedule.order], [tasks[i] for i in schedule.order]
        step_set = self._get_step_set(local_training, prepared)
        if self.cuda and not self.is_compiled:
            self._compile(local_training, step_set, schedule.kinds[0])
        self.rows.load([client.start for client in prepared])
        step_set.refill(prepared)
        assert self.rows.velocity is not None
        assert self.rows.gradients is not None
        # Gradients too: compiling leaves arbitrary numbers between the tensors of a row, where no step writes.
        torch._foreach_zero_([self.rows.velocity, self.rows.gradients])
        self.cursor.zero_()
        self.total.zero_()
        self.rows.lr.fill_(local_training.training.lr)  # a schedule changes it from round to round
        seed = derive(local_training.seed, f"{purpose} layers of a cohort", tasks[0].round, *(t.client for t in tasks))
        self.random_state.source.manual_seed(seed)
        taken = 0
        for part in self._open_plan(local_training, tasks, purpose):
            planned = taken + len(part)
            self.plan[taken:planned].copy_(part, non_blocking=True)
            for kind in schedule.kinds[taken:planned]:
                self._step(local_training, step_set, kind)
            taken = planned
        for client, fixed in zip(prepared, step_set.contexts, strict=False):
            for ctx, fixed_ctx in zip(client.contexts, fixed, strict=True):
                ctx.scratch.update(fixed_ctx.scratch)
        trained = self.rows.unload(schedule.rows), self.total.index_select(0, schedule.rows) / schedule.steps
        self._begin_next_plan(local_training, tasks, purpose)
        return trained

    def _make_schedule(self, local_training: LocalTraining, tasks: Sequence[Task]) -> "Schedule":
        """Return the schedule of these clients, most often that of the last round; set `counts` to their batch sizes."""
        training, needs_sizes = local_training.training, looks_at_batches(local_training.terms)
        key = tuple(t.client for t in tasks), needs_sizes, training.batch_size, training.epochs, training.steps
        if self.schedule is None or self.schedule.key != key:
            batches = [serial.list_batch_sizes(self.data.sizes[task.client], training) for task in tasks]
            order = sorted(range(len(batches)), key=lambda i: (-len(batches[i]), i))
            kinds = list_kinds(needs_sizes, [batches[i] for i in order])
            sizes = [torch.tensor([size for size, _ in batches[i]], dtype=torch.int32) for i in order]
            counts = torch.nn.utils.rnn.pad_sequence(sizes)
            self.counts.zero_()
            self.counts[: len(counts), : len(order)] = upload(counts, self.device)
            rows = torch.tensor(order).argsort()
            steps = torch.tensor([len(of_client) for of_client in batches]).clamp(min=1)
            self.schedule = Schedule(key, order, kinds, upload(rows, self.device), upload(steps, self.device))
        return self.schedule

    def _open_plan(self, local_training: LocalTraining, tasks: Sequence[Task], purpose: str) -> Iterator[Tensor]:
        """Return the plans of the steps; the last round may have begun them."""
        key, plan = self.begun_plan or (None, None)
        self.begun_plan = None
        if plan is not None and key == (purpose, [(t.client, t.round) for t in tasks]):
            return plan
        return self.data.plan_cohort(local_training, tasks, purpose, self.plan.shape[1:])

    def _begin_next_plan(self, local_training: LocalTraining, tasks: Sequence[Task], purpose: str) -> None:
        """Plan the next round's first steps, while the device takes this round's, if the clients stay the same."""
        trained = purpose, [t.client for t in tasks]
        if trained == self.last_trained:
            following = [Task(t.client, t.round + 1) for t in tasks]
            plan = self.data.plan_cohort(local_training, following, purpose, self.plan.shape[1:])
            first = list(islice(plan, 1))
            self.begun_plan = (purpose, [(t.client, t.round) for t in following]), chain(first, plan)
        self.last_trained = trained

    def _compile(self, local_training: LocalTraining, step_set: StackedSteps, kind: Kind) -> None:
        """Compile the kernels of a step, before it is taken with values that count."""
        if import_triton_kernels(KERNELS, self.device.type) is not None:
            self.cursor.zero_()
            compile_in_parallel(
                lambda: self._step_eagerly(local_training, step_set, kind), self.device,
                meanwhile=lambda: self._load_libraries(local_training),
            )  # fmt: skip
        self.is_compiled = True

    @torch.no_grad()
    def _load_libraries(self, local_training: LocalTraining) -> None:
        """Evaluate a batch, so that CUDA's libraries are loaded while kernels are compiled: it takes seconds."""
        module, was_training = local_training.module, local_training.module.training
        plan = torch.zeros(4, self.batch_size, dtype=torch.int64, device=self.device)
        with autocast(local_training.precision, self.device):
            module.eval()(self.data.make_batch(plan)[0])
        module.train(was_training)

    def _get_step_set(self, local_training: LocalTraining, prepared: Sequence[Prepared]) -> StackedSteps:
        """Return the step set for these clients."""
        key = identify_terms(local_training.terms), prepared[0].key
        if key not in self.step_sets:
            while len(self.step_sets) >= MAX_STEP_SETS:  # drop the oldest, with its graphs
                del self.step_sets[next(iter(self.step_sets))]
            self.step_sets[key] = StackedSteps.create(prepared[0], local_training.module, self.rows)
        return self.step_sets[key]

    def _step(self, local_training: LocalTraining, step_set: StackedSteps, kind: Kind) -> None:
        """Take a step: replay its graph, or run it as it is until it is captured."""
        graph = step_set.graphs.get(kind, 0)
        if isinstance(graph, torch.cuda.CUDAGraph):
            graph.replay()
        elif graph == 0 or not self.cuda:
            self._step_eagerly(local_training, step_set, kind)
            step_set.graphs[kind] = 1
        else:
            del step_set.graphs[kind]
            while len(step_set.graphs) >= MAX_GRAPHS:
                del step_set.graphs[next(iter(step_set.graphs))]
            captured = capture_graph(self.pool, lambda: self._step_eagerly(local_training, step_set, kind))
            step_set.graphs[kind] = captured
            captured.replay()

    def _step_eagerly(self, local_training: LocalTraining, step_set: StackedSteps, kind: Kind) -> None:
        rows, sizes = self.rows, kind[1]
        rows.active = kind[0]
        uses_kernels, precise = not self.is_check, rows.params.dtype
        # The network's first layer would round images anyway; terms see them as they are.
        dtype = precise if sizes or rows.low is None else rows.low.dtype
        x, y = make_stacked_batch(self.data, self.plan, self.counts, self.cursor, rows, dtype, uses_kernels)
        features: Tensor | None = None
        with autocast(local_training.precision, self.device):
            if any(term.features for term in local_training.terms):
                features = self.module.features(x)  # type: ignore[operator]
                logits = self.module.head(features)  # type: ignore[operator]
                features = features.to(precise)
            else:
                logits = self.module(x)
            if sizes:
                logits = logits.to(precise)
            ce = compute_client_losses(logits, y, rows, self.total, self.cursor, not sizes, uses_kernels)
            loss = ce.sum() if sizes else ce
            for term_loss in self._list_term_losses(local_training.terms, step_set, kind, x, y, logits, ce, features):
                loss = loss + term_loss
        rows.take_gradients(loss)
        with torch.no_grad():
            for term, ctx in zip(local_training.terms, step_set.get_gradient_contexts(rows), strict=True):
                term.grad(ctx)
            for clip in [term.clip for term in local_training.terms if term.clip]:
                clip_gradients(rows, clip)
            update_parameters(rows, local_training, uses_kernels)

    def _list_term_losses(
        self, terms: Sequence[Term], step_set: StackedSteps, kind: Kind, x: Tensor, y: Tensor, logits: Tensor,
        ce: Tensor, features: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        """Return what the terms add to the loss, client by client: each sees its own examples only."""
        active, sizes, lasts = kind
        if not sizes:
            return []
        size, losses = self.batch_size, []
        slices = [slice(i * size, i * size + sizes[i]) for i in range(active)]
        parts = [x[part] for part in slices]
        for nets in step_set.nets.values():
            nets.set_batch(x, parts, size)
        for i, part in enumerate(slices):
            if not sizes[i]:
                continue
            of_client = None if features is None else features[part]
            batch = Batch(parts[i], y[part], logits[part], ce[i], of_client, lasts[i])
            returned = [term.loss(batch, ctx) for term, ctx in zip(terms, step_set.contexts[i], strict=True)]
            losses += [loss for loss in returned if loss is not None]
        return losses


@dataclass(frozen=True)
class Schedule:
    """Which client has which row, and the steps that the clients take together."""

    key: Hashable  # what it follows from: the clients, their steps, and whether a term looks at batches
    order: list[int]  # the clients, by index, in the order of their rows: those with the most steps first
    kinds: list[Kind]  # of the steps
    rows: Tensor  # each client's row
    steps: Tensor  # how many each client takes


def looks_at_batches(terms: Sequence[Term]) -> bool:
    """Return whether a term adds to the loss, and so needs to know how large each client's batch is."""
    return any(type(term).loss is not Term.loss for term in terms)


def list_kinds(needs_sizes: bool, steps: Sequence[Sequence[tuple[int, bool]]]) -> list[Kind]:
    """Return the kind of each step, given each client's batch sizes and whether they belong to its last epoch.

    >>> list_kinds(False, [[(2, True), (1, True)], [(2, True)]])
    [(2, (), ()), (1, (), ())]
    """
    numbers = [sum(len(client) > t for client in steps) for t in range(max(map(len, steps), default=0))]
    levels = sorted(set(numbers))
    if len(levels) > MAX_LEVELS:  # fewer graphs; clients that are at their end do not move
        width = -(-levels[-1] // MAX_LEVELS)
        levels = [min(i * width, levels[-1]) for i in range(1, MAX_LEVELS + 1)]
    kinds: list[Kind] = []
    for t, number in enumerate(numbers):
        active = next(level for level in levels if level >= number)
        batches = [client[t] if t < len(client) else (0, False) for client in steps[:active]]
        sizes, lasts = zip(*batches, strict=True) if needs_sizes else ((), ())
        kinds.append((active, sizes, lasts))
    return kinds


def clip_gradients(rows: ClientRows, clip: float) -> None:
    """Scale the gradient of each active client down to this norm if it is larger, as `clip_grad_norm_` does."""
    assert rows.gradients is not None
    gradients = rows.gradients[: rows.active]
    norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
    gradients *= (clip / (norms + 1e-6)).clamp(max=1.0)


def update_parameters(rows: ClientRows, local_training: LocalTraining, uses_kernels: bool = True) -> None:
    """Take a step of SGD for the active clients that have examples in this step."""
    momentum, weight_decay = local_training.training.momentum, local_training.training.weight_decay
    kernels = import_triton_kernels(KERNELS, rows.params.device.type) if uses_kernels else None
    if kernels is not None:
        kernels.launch_sgd_step(rows, momentum, weight_decay)
        return
    assert rows.gradients is not None
    assert rows.velocity is not None
    params, gradients, velocity = (t[: rows.active] for t in (rows.params, rows.gradients, rows.velocity))
    is_active = rows.valid[: rows.active, None] > 0
    new = momentum * velocity + gradients + weight_decay * params
    velocity.copy_(torch.where(is_active, new, velocity))
    params.sub_(rows.lr * velocity * is_active)
    rows.update_low()
