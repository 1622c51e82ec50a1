"""The engine that trains all clients of a round as one program on a GPU.

A batch of 64 images is too small for a GPU, and a small network's step is dozens of kernels that are each launched for
one client. Here the clients' batches are stacked, and layers that hold every client's parameters replace the layers
with parameters (`models.stacked_layers`). So one launch per layer serves all clients (`cohort_group`). Terms that
change gradients act on all clients at once. Terms that add to the loss are called client by client.

Not every module fits: one that mixes the examples of a batch would mix clients. `cohort_check` finds that out before clients
train. A run that does not fit uses lanes, and `fallback_reason` says why.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedheal.core.layout import Packed, allocate_rows
from fedheal.core.updates import Metric
from fedheal.data.domains import Split
from fedheal.engine import graph_inputs, serial
from fedheal.engine.cohort_check import check_stacking, choose_group_size
from fedheal.engine.cohort_group import CohortGroup
from fedheal.engine.cohort_steps import Prepared, take_out_nets
from fedheal.engine.device_data import DeviceData
from fedheal.engine.graph_evaluation import GraphEvaluation
from fedheal.engine.lanes import Lanes, use_streams
from fedheal.engine.memory import release_gpu_memory
from fedheal.engine.serial import ClientResult, LocalTraining, Shared, Task
from fedheal.local.term import NotCapturableError
from fedheal.models.client_rows import split_models
from fedheal.models.stacked_layers import DoesNotFitError

log = logging.getLogger("fedheal")

WIDE = 64  # channels
PIXELS = 1 << 18  # in a batch

Fit = Callable[[Packed, float], Packed]


class SecondTraining(Exception):
    """A client's `finish` asks for a second training, which is done for all clients together."""

    def __init__(self, start: Packed, strength: float) -> None:
        self.start, self.strength = start, strength


class CohortEngine:
    """An engine that trains all clients of a round together."""

    def __init__(self, local_training: LocalTraining, only_if_faster: bool = False) -> None:
        self.local_training = local_training
        self.data = DeviceData(local_training)
        self.evaluation = GraphEvaluation(local_training)
        self.lanes: Lanes | None = None
        self.group: CohortGroup | None = None
        self.group_size = 0  # chosen in the first round
        self.checked_keys: set[Hashable] = set()  # of clients for whom stacking was checked
        # Why lanes train the clients instead.
        self.fallback_reason = find_faster_in_lanes(local_training, self.data) if only_if_faster else ""

    def train(self, model: Packed, shared: Shared, tasks: Sequence[Task]) -> Iterator[ClientResult]:
        """Train all clients, then return their results; fall back to smaller groups or to lanes if needed."""
        while not self.fallback_reason:
            try:
                return iter(self._train_together(model, shared, tasks))
            except (DoesNotFitError, NotCapturableError) as error:
                self.fallback_reason = str(error)
                log.warning("training the clients side by side and not as one program: %s", self.fallback_reason)
            except torch.OutOfMemoryError:
                if self.group_size <= 1:
                    raise
                log.warning("out of memory with %d clients at a time: continuing with half", self.group_size)
                self.group_size //= 2
            self.group = None
            release_gpu_memory()
        if self.lanes is None:
            self.lanes = Lanes(self.local_training, data=self.data)
        return self.lanes.train(model, shared, tasks)

    def find_correct(self, pairs: Sequence[tuple[Packed, Split]]) -> list[Tensor]:
        """Return, for each pair of a model and a split, which examples the model classifies correctly."""
        return self.evaluation.find_correct(pairs)

    def _train_together(self, model: Packed, shared: Shared, tasks: Sequence[Task]) -> list[ClientResult]:
        if not tasks:
            return []
        training = self.local_training.training.resolve_lr(tasks[0].round, self.local_training.rounds)
        local_training = replace(self.local_training, training=training)
        if not self.group_size:
            self.group_size = choose_group_size(local_training, self.data, model, shared, tasks)
        metrics = self.data.compute_received_losses(local_training, model, tasks)
        deltas = allocate_rows(len(tasks), len(model.params), model.params.dtype, local_training.device)
        results: dict[int, ClientResult] = {}
        steps = [serial.count_steps(self.data.sizes[task.client], local_training.training) for task in tasks]
        order = sorted(range(len(tasks)), key=lambda i: (-steps[i], i))
        width = -(-len(order) // -(-len(order) // self.group_size))
        if self.group is None or self.group.size < width:
            self.group = CohortGroup(local_training, self.data, width)
        for start in range(0, len(order), width):
            indices = sorted(order[start : start + width])
            prepared = [Prepared((), model)] * len(indices)
            if local_training.terms:
                prepared = [self._prepare(local_training, model, shared, tasks[i]) for i in indices]
            for key, members in _group_by_key(prepared).items():
                if key not in self.checked_keys:
                    check_stacking(local_training, self.data, model, shared, [tasks[indices[k]] for k in members])
                    self.checked_keys.add(key)
                chosen = [indices[k] for k in members]
                clients, of_clients = [prepared[k] for k in members], [tasks[i] for i in chosen]
                with _activate(self.group):
                    trained, mean_losses = self.group.train(local_training, clients, of_clients, "batches")
                    all_rows = deltas.unbind()
                    rows = [all_rows[i] for i in chosen]
                    if not local_training.terms and len(rows) == len(tasks):  # terms may change what is sent
                        torch.sub(trained.params, model.params, out=deltas)
                    elif not local_training.terms:
                        torch._foreach_copy_(rows, list(trained.params - model.params))
                    # The losses stay on the device: reading them here would wait for it.
                    with_losses = [
                        metrics[i] | {"train_loss": loss} for i, loss in zip(chosen, mean_losses.unbind(), strict=True)
                    ]
                    finished = self._finish(
                        local_training, model, of_clients, clients, split_models(trained), with_losses, rows
                    )
                results |= dict(zip(chosen, finished, strict=True))
        return [results[i] for i in range(len(tasks))]

    def _prepare(self, local_training: LocalTraining, model: Packed, shared: Shared, task: Task) -> Prepared:
        nets: dict[str, nn.Module] = {} if self.group is None else self.group.nets
        contexts = serial.make_contexts(local_training, model, shared, task, _ask_for_training, nets)
        return take_out_nets(contexts, serial.prepare_start(local_training, contexts, model))

    def _finish(
        self, local_training: LocalTraining, model: Packed, tasks: Sequence[Task], prepared: Sequence[Prepared],
        local: Sequence[Packed], metrics: Sequence[dict[str, Metric]], deltas: Sequence[Tensor],
    ) -> list[ClientResult]:  # fmt: skip
        """Call the terms' last hooks; a second training that they ask for is done for all clients together.

        `deltas` receive the clients' updates. Without terms they have them already.
        """
        results: dict[int, ClientResult] = {}
        waiting: dict[int, SecondTraining] = {}

        def finish(i: int) -> ClientResult:
            contexts, is_known = prepared[i].contexts, not local_training.terms
            result = serial.finish_client(
                local_training, model, tasks[i], contexts, local[i], dict(metrics[i]), deltas[i], is_known
            )
            if not contexts:
                return result
            scratches = [ctx.scratch for ctx in prepared[i].contexts]
            addresses = {t.data_ptr() for scratch in scratches for t in graph_inputs.list_tensors(scratch)}
            slots = tuple(graph_inputs.clone_fixed(slot, addresses) for slot in result.slots)
            messages = tuple(graph_inputs.clone_fixed(message, addresses) for message in result.messages)
            return replace(result, slots=slots, messages=messages)

        for i in range(len(tasks)):
            try:
                results[i] = finish(i)
            except SecondTraining as asked:
                waiting[i] = asked
        if waiting:
            trained = self._train_again(local_training, model, [tasks[i] for i in waiting], list(waiting.values()))
            for (i, request), personal in zip(waiting.items(), trained, strict=True):
                answer = _answer(request, personal)
                prepared[i].contexts = [replace(ctx, fit=answer) for ctx in prepared[i].contexts]
                results[i] = finish(i)
        return [results[i] for i in range(len(tasks))]

    def _train_again(
        self, local_training: LocalTraining, model: Packed, tasks: Sequence[Task], asked: Sequence[SecondTraining]
    ) -> list[Packed]:
        assert self.group is not None
        if len({request.strength for request in asked}) > 1:
            raise DoesNotFitError("the clients' second trainings differ in strength")
        pairs = [
            serial.proximal_retraining(local_training, model, task, request.strength, request.start)
            for task, request in zip(tasks, asked, strict=True)
        ]
        prepared = [take_out_nets(contexts, request.start) for (_, contexts), request in zip(pairs, asked, strict=True)]
        return split_models(self.group.train(pairs[0][0], prepared, tasks, "personal")[0])


def find_faster_in_lanes(local_training: LocalTraining, data: DeviceData) -> str:
    """Return why lanes are faster for this run, or "" if they are not, by measurements on an H200 (docs/performance.md)."""
    convolutions = [part for part in local_training.module.modules() if isinstance(part, nn.Conv2d)]
    widest = max((max(conv.in_channels, conv.out_channels) for conv in convolutions), default=0)
    if local_training.precision == "fp32" and widest >= WIDE:
        return f"with layers of {widest} channels, lanes are faster in fp32; use tf32 or bf16 for one program"
    fills_the_gpu = local_training.training.batch_size * data.height * data.width >= PIXELS
    if local_training.precision != "bf16" and fills_the_gpu:
        return "one client's batch of such images fills the GPU; use bf16 for one program"
    return ""


def _ask_for_training(start: Packed, strength: float) -> Packed:
    raise SecondTraining(start, strength)


def _answer(asked: SecondTraining, personal: Packed) -> Fit:
    def fit(start: Packed, strength: float) -> Packed:
        if strength != asked.strength or not torch.equal(start.params, asked.start.params):
            raise DoesNotFitError("a term asks for another second training when it is called again")
        return personal

    return fit


def _group_by_key(prepared: Sequence[Prepared]) -> dict[Hashable, list[int]]:
    """Return the clients, by index, that can be stacked together."""
    groups: dict[Hashable, list[int]] = {}
    for i, client in enumerate(prepared):
        groups.setdefault(client.key, []).append(i)
    return groups


@contextmanager
def _activate(group: CohortGroup) -> Iterator[None]:
    """Make the group's stream and random state current for the context."""
    stream = torch.cuda.stream(group.stream) if group.cuda else nullcontext()
    with use_streams(group.device, [group.stream]), group.random_state.activate(), stream:
        yield
