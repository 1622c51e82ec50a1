"""The cohort engine against the serial engine, on the CPU, where layers use torch's operations: see `test_gpu_cohort.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedheal.core.layout import Layout, Packed
from fedheal.data.domains import Split
from fedheal.engine import cohort, describe_engine
from fedheal.engine.cohort import CohortEngine, find_faster_in_lanes
from fedheal.engine.cohort_group import list_kinds
from fedheal.engine.graph_evaluation import copy_with_faster_pooling
from fedheal.engine.serial import SerialEngine, Task, list_batch_sizes, plan_batches
from fedheal.local.term import Context, Term
from fedheal.models.client_rows import ClientRows, split_models
from fedheal.models.max_pooling import FusedMaxPool2d
from fedheal.models.small_cnn import SmallCNN
from fedheal.models.stacked_layers import DoesNotFitError, stack_module
from fedheal.simulate.round import initial_state
from small_federation import make_federation, run_rounds

pytestmark = pytest.mark.slow

# Methods with hooks of different kinds; the GPU tests have all of them.
KINDS = ["fedavg", "fedprox", "scaffold:option=1", "feddyn", "moon", "fpl", "ditto", "fedbn"]


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float = 2e-4) -> None:
    assert len(actual) == len(expected)
    for first, second in zip(actual, expected, strict=True):
        torch.testing.assert_close(first.double(), second.double(), rtol=tolerance, atol=tolerance * 1e-2)


@pytest.mark.parametrize("method", KINDS)
def test_clients_trained_together_are_those_trained_one_after_another(method: str) -> None:
    fed = make_federation(method)
    expected = run_rounds(fed, SerialEngine(fed.local_training))
    engine = CohortEngine(fed.local_training)
    actual = run_rounds(fed, engine)
    assert engine.fallback_reason == ""
    assert describe_engine(engine) == "cohort"
    assert_close(actual, expected)


def test_a_learning_rate_that_changes_from_round_to_round_is_used() -> None:
    fed = make_federation("scaffold", lr_schedule="step", lr_decay_every=1, lr_decay=0.1)
    engine = CohortEngine(fed.local_training)
    assert_close(run_rounds(fed, engine, 3), run_rounds(fed, SerialEngine(fed.local_training), 3))
    assert engine.fallback_reason == ""


def test_clients_of_different_sizes_have_padded_batches() -> None:
    fed = make_federation(batch_size=64, epochs=1, participation=1.0)
    examples = dict(fed.local_training.examples)
    every = Split(*(torch.cat([getattr(s, key) for s in examples.values()] * 3) for key in ("images", "labels")))
    for client, size in zip(examples, (1, 7, 63, 64, 65), strict=False):
        examples[client] = Split(every.images[:size], every.labels[:size])
    fed = replace(fed, local_training=replace(fed.local_training, examples=examples))
    engine = CohortEngine(fed.local_training)
    assert_close(run_rounds(fed, engine), run_rounds(fed, SerialEngine(fed.local_training)))
    assert engine.fallback_reason == ""


def test_groups_of_two_clients_give_the_same_as_all_at_once() -> None:
    fed = make_federation("scaffold")
    small = CohortEngine(fed.local_training)
    small.group_size = 2
    assert_close(run_rounds(fed, small), run_rounds(fed, CohortEngine(fed.local_training)), 1e-5)


@pytest.mark.parametrize("augment", ["crop", "crop-flip"])
def test_batches_that_the_last_round_planned_are_those_of_the_round(augment: str) -> None:
    fed = make_federation(participation=1.0, augment=augment)
    engine = CohortEngine(fed.local_training)
    state = initial_state(fed)
    tasks = [Task(client, 0) for client in fed.clients]
    actual, expected = [], []
    for number, chosen in enumerate([tasks, tasks, tasks, tasks[1:], tasks[1:], tasks], start=1):
        of_round = [replace(task, round=number) for task in chosen]
        assert (engine.group is not None and engine.group.begun_plan is not None) == (number in (3, 4, 6))
        actual += [result.reply.delta for result in engine.train(state.model, (), of_round)]
        fresh = CohortEngine(fed.local_training)
        expected += [result.reply.delta for result in fresh.train(state.model, (), of_round)]
    assert all(torch.equal(first, second) for first, second in zip(actual, expected, strict=True))


class AllKinds(nn.Module):
    """A module with a layer of every kind that can be stacked."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, kernel_size=5, stride=3, padding=1)
        self.groups, self.layer, self.batch = nn.GroupNorm(4, 16), nn.LayerNorm(16), nn.BatchNorm1d(16)
        self.table, self.drop, self.head = nn.Embedding(8, 16), nn.Dropout(0.0), nn.Linear(16, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        brightness = (x.mean(dim=(1, 2, 3)).sigmoid() * 7.99).long()
        maps = self.groups(self.conv(x)).relu().mean(dim=(2, 3))
        logits: Tensor = self.head(self.drop(self.batch(self.layer(maps) + self.table(brightness))))
        return logits


class SubtractsMean(AllKinds):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=0))


class OwnLayer(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3)) @ self.weight.T


class Repeating(AllKinds):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x.flip(3))


class Unused(AllKinds):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.spare = nn.Linear(2, 2)


def make_federation_with(kind: Any) -> Any:
    fed = make_federation(augment="none")
    torch.manual_seed(0)
    module = kind(fed.local_training.classes)
    return replace(fed, local_training=replace(fed.local_training, module=module, layout=Layout.of(module)))


def test_every_kind_of_layer_is_stacked() -> None:
    fed = make_federation_with(AllKinds)
    engine = CohortEngine(fed.local_training)
    assert_close(run_rounds(fed, engine), run_rounds(fed, SerialEngine(fed.local_training)))
    assert engine.fallback_reason == ""


def test_a_round_does_not_depend_on_what_the_last_one_left() -> None:
    fed = make_federation()
    engine = CohortEngine(fed.local_training)
    first = run_rounds(fed, engine, 1)
    assert engine.group is not None
    assert engine.group.rows.gradients is not None
    engine.group.rows.gradients.fill_(torch.nan)
    assert all(torch.equal(a, b) for a, b in zip(run_rounds(fed, engine, 1), first, strict=True))
    assert engine.group.rows.params.isfinite().all()


@dataclass(frozen=True)
class MixesClients(Term):
    """Scales the gradient by its largest entry, over all clients if they are stacked."""

    def grad(self, ctx: Context) -> None:
        for p in ctx.params:
            assert p.grad is not None
            p.grad.div_(p.grad.abs().max() + 1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (SubtractsMean, "an operation mixes the examples"),
        (OwnLayer, "layer '' of type OwnLayer has parameters"),
        (Repeating, "layer 'conv' is applied several times"),
        (Unused, "layer 'spare' is not used in training"),
    ],
)
def test_a_module_that_does_not_fit_is_trained_in_lanes(kind: Any, reason: str, caplog: Any) -> None:
    fed = make_federation_with(kind)
    engine = CohortEngine(fed.local_training)
    actual, expected = run_rounds(fed, engine, 1), run_rounds(fed, SerialEngine(fed.local_training), 1)
    assert reason in engine.fallback_reason
    assert describe_engine(engine).startswith("lanes, since ")
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert len([r for r in caplog.records if "not as one program" in r.message]) == 1


def test_so_is_a_term_that_mixes_clients_and_a_shared_parameter() -> None:
    fed = make_federation()
    local_training = replace(fed.local_training, terms=(MixesClients(),))
    engine = CohortEngine(local_training)
    actual = run_rounds(replace(fed, local_training=local_training), engine, 1)
    assert "another result when they are stacked" in engine.fallback_reason
    assert all(
        map(
            torch.equal,
            actual,
            run_rounds(replace(fed, local_training=local_training), SerialEngine(local_training), 1),
        )
    )
    tied = CohortEngine(make_federation(model="tiny_data:tied_weights").local_training)
    run_rounds(make_federation(model="tiny_data:tied_weights"), tied, 1)
    assert "is also" in tied.fallback_reason


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("fedsam", "a step fails when clients are stacked"),
        ("fccl", "a term trains a second model before the first one"),
    ],
)
def test_methods_that_do_not_fit_are_trained_in_lanes(method: str, reason: str) -> None:
    fed = make_federation(method)
    engine = CohortEngine(fed.local_training)
    actual, expected = run_rounds(fed, engine, 1), run_rounds(fed, SerialEngine(fed.local_training), 1)
    assert reason in engine.fallback_reason
    assert_close(actual, expected, 1e-6)


def test_out_of_memory_halves_the_group(monkeypatch: Any, caplog: Any) -> None:
    fed = make_federation()
    expected, engine, really = (
        run_rounds(fed, CohortEngine(fed.local_training)),
        CohortEngine(fed.local_training),
        CohortEngine._train_together,
    )
    engine.group_size = 4

    def train_with_little_memory(self: CohortEngine, *arguments: Any) -> Any:
        if self.group_size > 1:
            raise torch.OutOfMemoryError("none left")
        return really(self, *arguments)

    monkeypatch.setattr(CohortEngine, "_train_together", train_with_little_memory)
    assert_close(run_rounds(fed, engine), expected, 1e-5)
    assert [r.message for r in caplog.records] == [
        f"out of memory with {n} clients at a time: continuing with half" for n in (4, 2)
    ]


def test_lanes_are_chosen_where_they_are_faster() -> None:
    fed = make_federation(model="resnet10", width=16)
    lanes_reason = find_faster_in_lanes(fed.local_training, cohort.DeviceData(fed.local_training))
    assert lanes_reason == "with layers of 128 channels, lanes are faster in fp32; use tf32 or bf16 for one program"
    for precision in ("tf32", "bf16"):
        faster = replace(fed.local_training, precision=precision)
        assert find_faster_in_lanes(faster, cohort.DeviceData(faster)) == ""
    large = replace(fed.local_training, training=replace(fed.local_training.training, batch_size=1 << 12))
    reason = "one client's batch of such images fills the GPU; use bf16 for one program"
    for precision, expected in (("tf32", reason), ("bf16", "")):
        chosen = replace(large, precision=precision)
        assert find_faster_in_lanes(chosen, cohort.DeviceData(chosen)) == expected


def test_rows_hold_models_and_return_them_bit_for_bit() -> None:
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5, 2))
    layout = Layout.of(module)
    rows = ClientRows(layout, 3, torch.device("cpu"))
    models = [Packed(torch.randn(layout.sizes().params), torch.randn(10), torch.tensor([i])) for i in range(2)]
    rows.load(models)
    for first, second in zip(split_models(rows.unload(torch.tensor([1, 0]))), reversed(models), strict=True):
        assert all(torch.equal(getattr(first, key), getattr(second, key)) for key in ("params", "buffers", "counters"))
    same = ClientRows(layout, 3, torch.device("cpu"))
    same.load([models[1], models[1]])
    assert torch.equal(same.params[0], same.params[1])
    assert torch.equal(same.unload(torch.tensor([0])).params[0], models[1].params)
    rows.active = 2
    views = rows.get_parameter("0.weight")
    assert torch.equal(views[1].reshape(-1), models[1].params[: 5 * 27])
    with pytest.raises(DoesNotFitError, match="single layer"):
        stack_module(nn.Linear(2, 2), rows)


def test_only_plain_pooling_of_two_by_two_is_replaced() -> None:
    hooked = nn.MaxPool2d(2)
    hooked.register_forward_hook(lambda *_: None)
    others = [
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(3, 2, 1),
        nn.AvgPool2d(2),
        hooked,
    ]
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.MaxPool2d(2), nn.MaxPool2d((2, 2), padding=(0, 0)), *others)
    stacked = stack_module(module, ClientRows(Layout.of(module), 2, torch.device("cpu")))
    assert [isinstance(part, FusedMaxPool2d) for part in stacked] == [False, True, True, *[False] * len(others)]
    x = torch.randn(2, 3, 5, 7)
    assert torch.equal(stacked[1](x), module[1](x))


def test_relu_behind_pooling_is_applied_once() -> None:
    relu = nn.ReLU()
    module = nn.Sequential(nn.Conv2d(3, 5, 3), relu, nn.MaxPool2d(2), relu, nn.Identity(), relu)
    stacked = stack_module(module, ClientRows(Layout.of(module), 2, torch.device("cpu")))
    assert [type(part) for part in stacked[1:]] == [nn.ReLU, FusedMaxPool2d, nn.Identity, nn.Identity, nn.ReLU]
    x = torch.randn(2, 3, 5, 7)
    assert torch.equal(stacked[2:](x), module[2:](x))


def test_levels_of_active_clients_are_few() -> None:
    steps = [[(4, True)] * n for n in range(40, 0, -1)]
    kinds = list_kinds(False, steps)
    assert len(kinds) == 40
    assert len({active for active, _, _ in kinds}) <= 8
    assert all(active >= sum(len(s) > t for s in steps) for t, (active, _, _) in enumerate(kinds))


def test_batch_sizes_are_those_of_the_planned_batches() -> None:
    training = make_federation().local_training.training
    for examples, steps, epochs in ((7, None, 2), (8, 3, 1), (1, 5, 1), (65, None, 1)):
        changed = replace(training, steps=steps, epochs=epochs, batch_size=4)
        planned = [(len(index), last) for index, _, last in plan_batches(examples, changed, torch.Generator())]
        assert list_batch_sizes(examples, changed) == planned


def test_the_copy_for_evaluation_shares_the_tensors_and_has_the_same_results() -> None:
    module = SmallCNN(10).eval()
    copied = copy_with_faster_pooling(module)
    for first, second in zip(
        [*module.parameters(), *module.buffers()], [*copied.parameters(), *copied.buffers()], strict=True
    ):
        assert first is second
    assert any(isinstance(part, FusedMaxPool2d) for part in copied.modules())
    assert not any(isinstance(part, FusedMaxPool2d) for part in module.modules())
    x = torch.randn(4, 3, 32, 32)
    assert torch.equal(module(x), copied(x))
