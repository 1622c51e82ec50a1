"""Check that a module and its terms give the same result for stacked clients, and choose how many clients train at a time."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedheal.core.errors import format_error
from fedheal.core.layout import Layout, Packed
from fedheal.core.rng import generator
from fedheal.engine import serial
from fedheal.engine.cohort_group import CohortGroup
from fedheal.engine.cohort_steps import Prepared, take_out_nets
from fedheal.engine.device_data import DeviceData
from fedheal.engine.memory import release_gpu_memory
from fedheal.engine.precision import use_precision
from fedheal.engine.serial import LocalTraining, Shared, Task
from fedheal.local.term import Context, NotCapturableError
from fedheal.models.client_rows import split_models
from fedheal.models.stacked_layers import DoesNotFitError, check_layers, list_layers

LARGEST_GROUP = 256
MEMORY_SHARE = 0.7  # of the free memory that a group may take
BATCH = 4
EXAMPLES = (8, 7)  # of the two clients: the second one's last batch is padded
NOISE = 0.01  # added to models and to what terms prepared, so that no value is zero or shared
TOLERANCE = 1e-6  # of float64 arithmetic in another order, relative to the largest change


def choose_group_size(
    local_training: LocalTraining, data: DeviceData, model: Packed, shared: Shared, tasks: Sequence[Task]
) -> int:
    """Return how many clients train at a time, by the memory that stacked steps of two clients take.

    Raises:
        DoesNotFitError: Clients cannot be stacked.
    """
    device = local_training.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    check_stacking(local_training, data, model, shared, tasks)
    if device.type != "cuda":
        return LARGEST_GROUP
    per_example = (torch.cuda.max_memory_allocated(device) - before) / (2 * BATCH)
    narrower = 4 if local_training.precision == "bf16" else 2  # than the float64 of the check
    per_client = per_example * local_training.training.batch_size / narrower
    release_gpu_memory()
    free = torch.cuda.mem_get_info(device)[0]
    return int(max(1, min(LARGEST_GROUP, MEMORY_SHARE * free // (per_client + 1))))


def check_stacking(
    local_training: LocalTraining, data: DeviceData, model: Packed, shared: Shared, tasks: Sequence[Task]
) -> None:
    """Let two clients take two small steps, stacked and one after the other, and compare the results.

    That is done in float64: in float32 the order of sums alone changes where ReLU is active.

    Raises:
        DoesNotFitError: A layer cannot be stacked, or the results differ.
    """
    check_layers(local_training.module)
    device = local_training.device
    training = replace(local_training.training, batch_size=BATCH, steps=2, epochs=1)
    module = copy.deepcopy(local_training.module).double()
    checked = replace(local_training, module=module, layout=Layout.of(module), training=training, precision="fp32")
    pair = [tasks[0], tasks[min(1, len(tasks) - 1)]]
    few = copy.copy(data)
    few.sizes = {task.client: min(data.sizes[task.client], n) for task, n in zip(pair, EXAMPLES, strict=True)}
    deterministic = torch.are_deterministic_algorithms_enabled()
    # cuDNN is slow in float64: without it the check takes a quarter of the time.
    with (
        use_precision("fp32", deterministic, device),
        torch.backends.cudnn.flags(enabled=False),
        _without_dropout(module),
    ):
        clients = [_prepare(local_training, checked, model, shared, task, i) for i, task in enumerate(pair)]
        one_by_one = [_train_alone(checked, few, task, *client) for task, client in zip(pair, clients, strict=True)]
        group = CohortGroup(checked, few, len(pair), is_check=True)
        prepared = [take_out_nets(contexts, start) for contexts, start in clients]
        if prepared[0].key != prepared[1].key:  # the two differ in shapes: check the first one with itself
            prepared[1], pair[1], one_by_one[1] = prepared[0], pair[0], one_by_one[0]
        stacked = _train_stacked(group, checked, prepared, pair)
    if unused := [layer.name for layer in list_layers(group.module) if not layer.calls]:
        raise DoesNotFitError(f"layer '{unused[0]}' is not used in training")
    if repeated := [layer.name for layer in list_layers(group.module) if layer.calls != 2]:
        raise DoesNotFitError(f"layer '{repeated[0]}' is applied several times")
    for client, alone, together in zip(prepared, one_by_one, stacked, strict=True):
        _compare(client.start, alone, together)


def _prepare(
    local_training: LocalTraining, checked: LocalTraining, model: Packed, shared: Shared, task: Task, number: int
) -> tuple[list[Context], Packed]:
    """Let the terms prepare a client as usual, then turn everything into float64, with noise."""

    def refuse(start: Packed, strength: float) -> Packed:
        raise DoesNotFitError("a term trains a second model before the first one")

    contexts = serial.make_contexts(local_training, model, shared, task, refuse)
    start = serial.prepare_start(local_training, contexts, model)
    rng = generator(0, "check of stacking", number)
    widened = [
        replace(ctx, module=checked.module, layout=checked.layout, scratch=_disturb(ctx.scratch, rng))
        for ctx in contexts
    ]
    return widened, replace(start, params=_disturb(start.params, rng), buffers=start.buffers.double())


def _disturb(value: Any, rng: torch.Generator) -> Any:
    """Return a copy with noise added to floating-point numbers, in float64."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double() + NOISE * torch.randn(value.shape, generator=rng, dtype=torch.float64).to(value.device)
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, nn.Module):  # a frozen network
        return copy.deepcopy(value).double()
    if isinstance(value, Mapping):
        return {name: _disturb(part, rng) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_disturb(part, rng) for part in value]
    return value


def _train_alone(
    checked: LocalTraining, data: DeviceData, task: Task, contexts: Sequence[Context], start: Packed
) -> Packed:
    """Take the steps as the serial engine does, with the batches of the stacked ones."""
    own = [replace(ctx, scratch=dict(ctx.scratch)) for ctx in contexts]
    module = checked.load_model(start, training=True)
    optimiser = serial.make_optimiser(checked)
    plan, steps = data.plan_client(checked, task, "batches")
    for row, (size, last) in zip(plan.to(checked.device), steps, strict=True):
        x, y = data.make_batch(row[:, :size])
        serial.train_step(checked, optimiser, own, x.double(), y, last)
    return checked.layout.pack(module.state_dict())


def _train_stacked(
    group: CohortGroup, checked: LocalTraining, prepared: Sequence[Prepared], pair: Sequence[Task]
) -> list[Packed]:
    """Take the steps stacked. Whatever fails here, and did not one client at a time, does not fit."""
    try:
        return split_models(group.train(checked, prepared, pair, "batches")[0])
    except (DoesNotFitError, NotCapturableError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise DoesNotFitError(f"a step fails when clients are stacked ({format_error(error)})") from error


def _compare(start: Packed, alone: Packed, together: Packed) -> None:
    pairs = [((together.params - alone.params), (alone.params - start.params))]
    if len(alone.buffers):
        pairs.append((together.buffers - alone.buffers, alone.buffers))
    worst = [float(difference.abs().max() / scale.abs().max().clamp(min=1e-12)) for difference, scale in pairs]
    if not all(error <= TOLERANCE for error in worst):  # NaN is no agreement
        raise DoesNotFitError(
            f"two steps of two clients give another result when they are stacked (by {max(worst):.2g} of the change): an "
            "operation mixes the examples of a batch, or a term those of several clients"
        )


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    """Switch dropout layers off for the context: stacked clients draw other random numbers."""
    layers = [part for part in module.modules() if isinstance(part, nn.modules.dropout._DropoutNd)]
    rates = [layer.p for layer in layers]
    for layer in layers:
        layer.p = 0.0
    try:
        yield
    finally:
        for layer, rate in zip(layers, rates, strict=True):
            layer.p = rate
