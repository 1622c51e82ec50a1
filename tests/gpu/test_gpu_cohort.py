"""The cohort engine and its kernels on a GPU: skipped where there is none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedheal
from fedheal import Layout, methods
from fedheal.core.import_path import import_triton_kernels
from fedheal.data.domains import Split
from fedheal.engine import open_engine, serial
from fedheal.engine.cohort import CohortEngine
from fedheal.engine.cohort_batch import make_stacked_batch
from fedheal.engine.cohort_loss import compute_client_losses
from fedheal.engine.device_data import DeviceData
from fedheal.engine.graph_evaluation import GraphEvaluation
from fedheal.engine.precision import use_precision
from fedheal.models.client_rows import ClientRows
from fedheal.models.kernel_notes import get_note
from fedheal.models.max_pooling import FusedMaxPool2d
from fedheal.models.resnet import BasicBlock
from fedheal.models.small_cnn import SmallCNN
from fedheal.models.stacked_layers import KERNELS, allow_kernels, list_layers, stack_module
from fedheal.simulate.build import build_federation
from fedheal.simulate.round import initial_state, run_round
from needs import needs
from tiny_data import load, quick

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def _gpu():
    needs("gpu")


class Layers(nn.Module):
    """A convolution, a normalisation with a shortcut, and a convolution with stride 2 behind it."""

    def __init__(self, inputs, outputs, size, stride, bias):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=bias)
        self.norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, 16, 3, 2, 1, bias=False)

    def forward(self, x, shortcut):
        return self.second(self.norm.norm_relu(self.first(x), shortcut))


def run_layers(module, x, shortcut, valid, uses_kernels, low):
    """Return the outputs, all gradients and the running statistics of stacked layers."""
    clients, batch_size = len(valid), len(x) // len(valid)
    rows = ClientRows(Layout.of(module), clients, x.device, low=torch.bfloat16 if low else None)
    rows.batch_size = batch_size
    rows.valid.copy_(torch.tensor(valid))
    rows.params.copy_(0.2 * torch.randn(rows.params.shape, generator=torch.Generator().manual_seed(1)))
    rows.update_low()
    stacked = stack_module(module, rows).train()
    for layer in list_layers(stacked):
        layer.uses_kernels = uses_kernels
    given = [t.clone().requires_grad_() for t in (x, shortcut) if t is not None]
    with torch.autocast("cuda", torch.bfloat16, enabled=low):
        y = stacked(given[0], given[1] if shortcut is not None else None).float()
    y = y * rows.find_padding(batch_size).view(-1, 1, 1, 1)
    parameters = rows.list_parameters()
    loss = (y * torch.linspace(-1, 1, y.numel(), device="cuda").view(y.shape)).sum()
    found = torch.autograd.grad(loss, [*parameters, *given], allow_unused=True)
    for parameter, gradient in zip(parameters, found, strict=False):
        if gradient is not None:
            parameter.grad.copy_(gradient)
    return [y.detach(), *found[len(parameters) :], rows.gradients, rows.buffers, rows.counters.float()]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("tf32", 5e-3), ("bf16", 5e-2)])
@pytest.mark.parametrize("shortcut", [False, True])
@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "stride", "bias", "height", "width"),
    [
        (3, 8, 3, 1, False, 6, 6),
        (16, 16, 3, 1, True, 5, 7),
        (8, 24, 3, 2, False, 8, 8),
        (16, 32, 1, 2, False, 7, 6),
        (64, 64, 3, 1, False, 8, 8),
        (64, 128, 3, 2, True, 9, 9),
        (128, 64, 1, 1, False, 4, 4),
        (128, 512, 3, 1, False, 4, 4),
    ],
)
def test_kernels_equal_the_plain_layers(
    inputs, outputs, size, stride, bias, height, width, shortcut, precision, tolerance
):
    compare_layers(inputs, outputs, size, stride, bias, height, width, shortcut, precision, tolerance)


@pytest.mark.parametrize("shortcut", [False, True])
@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "stride", "bias", "height", "width"),
    [
        (64, 128, 3, 2, False, 16, 16),
        (192, 64, 3, 1, False, 8, 24),
        (128, 128, 3, 1, True, 8, 8),
        (256, 128, 3, 1, False, 24, 8),
        (256, 512, 3, 2, False, 16, 16),
        (512, 128, 3, 1, False, 8, 8),
        (128, 64, 1, 2, False, 16, 16),
    ],
)
def test_convolutions_by_boxes_equal_the_plain_layers(inputs, outputs, size, stride, bias, height, width, shortcut):
    compare_layers(inputs, outputs, size, stride, bias, height, width, shortcut, "bf16", 5e-2)


def compare_layers(inputs, outputs, size, stride, bias, height, width, shortcut, precision, tolerance):
    torch.manual_seed(0)
    low = precision == "bf16"
    module = Layers(inputs, outputs, size, stride, bias).cuda()
    x = torch.randn(12, inputs, height, width, device="cuda")
    shape = (12, outputs, (height - 1) // stride + 1, (width - 1) // stride + 1)
    added = torch.randn(shape, device="cuda", dtype=torch.bfloat16 if low else torch.float32) if shortcut else None
    with use_precision("fp32", True, torch.device("cuda")):
        plain = run_layers(module, x, added, [4, 3, 1], False, low)
    with use_precision(precision, True, torch.device("cuda")):
        found = run_layers(module, x, added, [4, 3, 1], True, low)
    for one, two in zip(found, plain, strict=True):
        apart = float((one.float() - two.float()).norm() / two.float().norm())
        assert apart < tolerance, apart  # where ReLU is active may change with the last digit


@pytest.mark.parametrize(("inputs", "outputs", "stride", "side"), [(64, 64, 1, 8), (64, 128, 2, 16), (128, 256, 2, 32)])
def test_gradients_that_are_added_in_one_kernel_equal_separate_ones(monkeypatch, inputs, outputs, stride, side):
    torch.manual_seed(0)
    module = nn.Sequential(BasicBlock(inputs, outputs, stride)).cuda()
    x = torch.randn(12, inputs, side, side, device="cuda").to(torch.bfloat16)
    found = []
    for is_fused in (True, False):
        if not is_fused:
            monkeypatch.setattr(import_triton_kernels(KERNELS, "cuda"), "supports_fork", lambda *_: False)
        rows = ClientRows(Layout.of(module), 3, x.device, low=torch.bfloat16)
        rows.batch_size = 4
        rows.valid.copy_(torch.tensor([4, 3, 1]))
        rows.params.copy_(0.1 * torch.randn(rows.params.shape, generator=torch.Generator().manual_seed(1)))
        rows.update_low()
        stacked = stack_module(module, rows).train()
        given = (x * rows.find_padding(4).view(-1, 1, 1, 1)).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            y = stacked(given).float() * rows.find_padding(4).view(-1, 1, 1, 1)
        assert ("StackedForkBackward" in {type(node).__name__ for node in list_graph(y.grad_fn)}) == is_fused
        loss = (y * torch.linspace(-1, 1, y.numel(), device="cuda").view(y.shape)).sum()
        *_, of_input = torch.autograd.grad(loss, [*rows.list_parameters(), given], allow_unused=True)
        found.append([y.detach(), of_input.float(), rows.gradients.clone()])
    for one, two in zip(*found, strict=True):
        assert float((one - two).norm() / two.norm()) < 5e-3  # separate gradients are rounded before they are added


@pytest.mark.parametrize(("channels", "side", "valid"), [(64, 32, (4, 3, 1)), (128, 8, (4, 2, 4))])
def test_a_convolution_notes_the_moments_of_its_output(channels, side, valid):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(64, channels, 3, padding=1, bias=False)).cuda()
    rows = ClientRows(Layout.of(module), 3, DEVICE, low=torch.bfloat16)
    rows.batch_size = 4
    rows.valid.copy_(torch.tensor(valid))
    rows.params.normal_()
    rows.update_low()
    with torch.autocast("cuda", torch.bfloat16):
        y = stack_module(module, rows).train()(torch.randn(12, 64, side, side, device="cuda"))
    moments = get_note(y, "moments")
    for i, number in enumerate(valid):
        of_client = y.detach()[4 * i : 4 * i + number].double()
        used = number * side * side // moments.rows
        means, deviations = moments.values[i, :, :used].double()
        mean = means.mean(dim=0)
        variance = (deviations + moments.rows * (means - mean) ** 2).sum(dim=0) / (used * moments.rows)
        scale = of_client.std()
        torch.testing.assert_close(mean, of_client.mean(dim=(0, 2, 3)), rtol=0, atol=float(1e-3 * scale))
        torch.testing.assert_close(variance, of_client.var(dim=(0, 2, 3), unbiased=False), rtol=1e-2, atol=0)


def test_a_skip_connection_around_a_wide_convolution_gets_its_own_gradient():
    """The convolution reads the gradient beside what follows, where autograd would add to it in place."""
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(128, 128, 3, padding=1, bias=False) for _ in range(2))
    module = nn.Sequential(*convolutions).cuda()
    x = torch.randn(32, 128, 32, 32, device="cuda").to(torch.bfloat16)
    results = []
    for uses_kernels in (True, False):
        rows = ClientRows(Layout.of(module), 2, DEVICE, low=torch.bfloat16)
        rows.batch_size = 16
        rows.valid.fill_(16)
        rows.params.copy_(0.05 * torch.randn(rows.params.shape, generator=torch.Generator().manual_seed(1)))
        rows.update_low()
        stacked = stack_module(module, rows).train()
        allow_kernels(stacked, uses_kernels)
        with torch.autocast("cuda", torch.bfloat16):
            inner = stacked[0](x)
            loss = ((stacked[1](inner) + inner) ** 2).float().mean()
        rows.take_gradients(loss)
        results.append(rows.gradients.clone())
    assert float((results[0] - results[1]).norm() / results[1].norm()) < 2e-2


def list_graph(node):
    """Return the nodes of a backward graph."""
    seen, waiting = [], [node]
    while waiting:
        if (current := waiting.pop()) is not None and current not in seen:
            seen.append(current)
            waiting += [following for following, _ in current.next_functions]
    return seen


@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1.0, 1e6])
def test_weight_gradients_in_tf32_do_not_depend_on_the_scale(scale):
    """They are computed in float16, whose range is small: numbers far from 1 must be scaled first."""
    torch.manual_seed(0)
    module = Layers(16, 32, 3, 1, False).cuda()
    x = torch.randn(12, 16, 8, 8, device="cuda")
    gradients = []
    for factor in (1.0, scale):
        rows = ClientRows(Layout.of(module), 3, x.device)
        rows.batch_size = 4
        rows.valid.fill_(4)
        layer = next(part for part in list_layers(stack_module(module, rows)) if part.name == "first")
        kernels = import_triton_kernels(KERNELS, "cuda")
        dy = torch.randn(12, 32, 8, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        with use_precision("tf32", True, torch.device("cuda")):
            given = [t.contiguous(memory_format=torch.channels_last) for t in (x, factor * dy)]
            kernels.write_weight_gradient(layer, *given)
        gradients.append(rows.gradients.double() / factor)
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 1e-3


def test_splits_that_are_evaluated_as_one_have_their_own_results():
    fed = build_federation(quick(device="cuda"), load(), torch.device("cuda"))
    model = initial_state(fed).model
    splits = list(fed.tests.values())
    together = serial.find_correct_in_turn(fed.local_training, [(model, split) for split in splits])
    alone = [serial.find_correct_in_turn(fed.local_training, [(model, split)])[0] for split in splits]
    assert [len(hits) for hits in together] == [len(split) for split in splits]
    assert all(torch.equal(one, two) for one, two in zip(together, alone, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluation_in_a_graph_has_the_same_results(precision):
    fed = build_federation(quick(device="cuda"), load(), torch.device("cuda"))
    local_training = replace(fed.local_training, precision=precision)
    first = initial_state(fed).model
    splits = list(fed.tests.values())
    evaluation = GraphEvaluation(local_training)
    for number in range(5):
        model = replace(first, params=first.params + 0.1 * number * torch.randn_like(first.params))
        given = splits[:1] if number == 4 else splits
        found = evaluation.find_correct([(model, split) for split in given])
        assert (evaluation.captured is not None) == (number in (1, 2, 3))
        pairs = [(model, split) for split in given]
        at_first = GraphEvaluation(local_training).find_correct(pairs)  # as after a resume
        assert all(torch.equal(one, two) for one, two in zip(found, at_first, strict=True))
        expected = torch.cat(serial.find_correct_in_turn(local_training, pairs))
        agreement = float((torch.cat(found) == expected).float().mean())
        assert agreement == 1 if precision == "fp32" else agreement > 0.97


def test_a_narrow_network_in_bf16_is_evaluated_by_the_kernels_of_a_cohort():
    module = SmallCNN(classes=10).to(DEVICE)
    fed = build_federation(quick(device="cuda"), load(), DEVICE)
    local_training = replace(fed.local_training, module=module, layout=Layout.of(module))
    images = torch.randint(0, 256, (300, 3, 32, 32), dtype=torch.uint8, device=DEVICE)
    split, model = Split(images, torch.arange(300, device=DEVICE) % 10), local_training.layout.pack(module.state_dict())
    for precision in ("bf16", "tf32", "fp32"):
        evaluation = GraphEvaluation(replace(local_training, precision=precision))
        found = [evaluation.find_correct([(model, split)])[0] for _ in range(3)]
        assert (evaluation.narrow is not None) == (precision == "bf16")
        assert evaluation.captured is not None
        assert torch.equal(found[0], found[2])
        expected = serial.find_correct_in_turn(evaluation.local_training, [(model, split)])[0]
        assert float((found[2] == expected).float().mean()) > 0.97


DO_NOT_FIT = ("fedsam", "feddg", "fccl")
LOCAL = [*methods.LOCAL, "scaffold:option=1", "ditto", "fedbn", "fpl"]


@pytest.mark.parametrize("method", LOCAL)
def test_a_cohort_equals_the_serial_engine(method):
    """fp32, after 12 steps of each client in each of two rounds; methods that do not fit say so and use lanes."""
    keys = {"epochs": 4, "augment": "crop-flip", "rounds": 2, "device": "cuda", "lr": 0.01}
    fed = build_federation(quick(method=method, model="tiny_data:feature_model", **keys), load(), torch.device("cuda"))
    start, finals = initial_state(fed), []
    with use_precision("fp32", True, torch.device("cuda")):
        together = CohortEngine(fed.local_training)
        for engine in (together, serial.SerialEngine(fed.local_training)):
            state = start
            for _ in range(2):
                state, _ = run_round(fed, state, engine, evaluate=False)
            finals.append(state)
            fed.local_training.module.load_state_dict(fed.local_training.layout.unpack(start.model))
    assert (together.fallback_reason == "") == (method not in DO_NOT_FIT)
    one, two = (state.model.params - start.model.params for state in finals)
    assert float((one - two).norm() / two.norm()) < 1e-5


def test_many_clients_of_different_sizes_train_in_groups():
    fed = build_federation(
        quick(model="tiny_data:feature_model", epochs=2, device="cuda", dirichlet=0.5),
        load(),
        torch.device("cuda"),
    )
    state, ends = initial_state(fed), []
    with use_precision("fp32", True, torch.device("cuda")):
        for size in (256, 4):
            engine = CohortEngine(fed.local_training)
            engine.group_size = size
            ends.append(run_round(fed, state, engine, evaluate=False)[0].model.params)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_dropout_and_deterministic_runs_repeat_bit_for_bit(precision):
    keys = {"rounds": 3, "device": "cuda", "augment": "crop", "engine": "cohort", "deterministic": True}
    for model in ("tiny_data:dropout", "resnet10"):
        runs = [
            fedheal.run(quick(method="fedheal", model=model, precision=precision, **keys), progress=False)
            for _ in range(2)
        ]
        states = [run.model.state_dict() for run in runs]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert np.isfinite(runs[0].history[-1].train_loss)
        assert runs[0].summary["engine"] == "cohort"


def test_bf16_follows_lanes_within_their_noise():
    losses = {}
    fed = build_federation(quick(model="resnet10", epochs=2, device="cuda", lr=0.01), load(), torch.device("cuda"))
    fed = replace(fed, local_training=replace(fed.local_training, precision="bf16"))
    for name in ("cohort", "lanes"):
        state, losses[name] = initial_state(fed), []
        with use_precision("bf16", False, torch.device("cuda")), open_engine(fed.local_training, name) as engine:
            for _ in range(4):
                state, record = run_round(fed, state, engine, evaluate=False)
                losses[name].append(record.train_loss)
        assert getattr(engine, "fallback_reason", "") == ""
    np.testing.assert_allclose(losses["cohort"], losses["lanes"], rtol=0.05, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("number", "channels", "height", "width"),
    [(5, 8, 32, 32), (3, 3, 5, 7), (2, 24, 2, 3), (4, 130, 6, 4), (1, 1, 9, 2)],
)
@pytest.mark.parametrize("relu", [False, True])
def test_pooling_equals_that_of_torch(relu, number, channels, height, width, dtype):
    """Bit for bit, also where inputs are equal, not a number or beyond the last window."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 3, (number, channels, height, width), generator=rng).to(DEVICE, dtype)
    x[torch.rand(x.shape, generator=rng) < 0.1] = torch.nan
    x[..., 1::2][
        torch.rand(x[..., 1::2].shape, generator=rng) < 0.1
    ] = -torch.inf  # torch's choice in a window of them is odd
    x = x.contiguous(memory_format=torch.channels_last)
    pooling, found = FusedMaxPool2d(relu), []
    for uses_kernels in (True, False):
        pooling.uses_kernels, given = uses_kernels, x.clone().requires_grad_()
        y = pooling(given)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
        found.append((y.detach(), *torch.autograd.grad(y, given, dy)))
    for one, two in zip(*found, strict=True):
        assert one.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("augment", ["none", "crop", "flip", "crop-flip"])
def test_the_batch_of_one_kernel_is_that_of_tensor_code(augment, dtype):
    """Bit for bit, with clients without examples in the step, and with more clients than are active."""
    fed = build_federation(quick(augment=augment, device=DEVICE.type), load(), DEVICE)
    data, rng = DeviceData(fed.local_training), torch.Generator().manual_seed(0)
    limits = torch.tensor([len(data.labels), 2 * data.pad + 1, 2 * data.pad + 1, 1 + ("flip" in augment)])
    plan = (torch.rand(3, 5, 4, 6, generator=rng) * limits[:, None]).long().to(DEVICE)
    counts = torch.randint(0, 7, (3, 5), generator=rng).to(DEVICE, torch.int32)
    counts[2, 1] = 0
    made = []
    for uses_kernels in (True, False):
        rows = ClientRows(fed.local_training.layout, 5, DEVICE)
        rows.active, rows.batch_size = 4, 6
        cursor = torch.tensor([2], device=DEVICE)
        x, y = make_stacked_batch(data, plan, counts, cursor, rows, dtype, uses_kernels)
        assert x.dtype == dtype
        assert x.is_contiguous(memory_format=torch.channels_last)
        made.append((x, y, rows.valid[: rows.active]))
    assert all(torch.equal(one, two) for one, two in zip(*made, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("classes", [2, 10, 100, 1000, 1025])
@pytest.mark.parametrize("valid", [(0, 1, 7, 63, 64), (3, 5)])
def test_losses_of_one_kernel_equal_the_plain_ones(valid, classes, dtype, tolerance):
    size, clients, rng = max(valid), len(valid), torch.Generator().manual_seed(0)
    rows = ClientRows(Layout.of(nn.Linear(1, 1)), clients + 1, DEVICE)
    rows.active, rows.batch_size = clients, size
    rows.valid[:clients] = torch.tensor(valid)
    logits = (4 * torch.randn(clients * size, classes, generator=rng)).to(DEVICE, dtype)
    labels = torch.randint(0, classes, (clients * size,), generator=rng).to(DEVICE)
    factors = torch.randn(clients, generator=rng).to(DEVICE)
    found = []
    for uses_kernels in (True, False):
        given = logits.clone().requires_grad_()
        totals, cursor = torch.ones(clients + 1, dtype=torch.float64, device=DEVICE), torch.tensor([5], device=DEVICE)
        gradients = []
        for is_whole in (True, False):
            losses = compute_client_losses(given, labels, rows, totals, cursor, is_whole, uses_kernels)
            gradients.append(torch.autograd.grad(losses, given, rows.ones[:clients], retain_graph=True)[0])
        gradients.append(torch.autograd.grad((factors * losses).sum(), given)[0])
        found.append([losses.detach(), *gradients, totals])
        assert int(cursor) == 7
        assert torch.equal(totals[:-1], 1 + losses.detach().double() + losses.detach().double())
        assert float(totals[-1]) == 1
    assert torch.equal(found[0][1], found[0][2])
    for one, two in zip(*found, strict=True):
        assert one.dtype == two.dtype
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance * 1e-1)
        assert one.isfinite().all()
    padding = ~rows.find_padding(size).flatten()
    assert not found[0][1][padding].any()


@pytest.mark.parametrize("shape", [(12,), (12, 5)])
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"), [(512, 10, True), (70, 100, False), (33, 1, True), (8, 200, True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_layers_in_bf16_equal_the_plain_ones(dtype, inputs, outputs, bias, shape):
    """Also for examples of several rows each; layers with many outputs use torch."""
    module, rng, found = nn.Sequential(nn.Linear(inputs, outputs, bias)), torch.Generator().manual_seed(0), []
    x, start = torch.randn(*shape, inputs, generator=rng), 0.1 * torch.randn(4, outputs * (inputs + 1), generator=rng)
    dy = torch.randn(*shape, outputs, generator=rng).to(DEVICE, torch.bfloat16)
    for uses_kernels in (True, False):
        rows = ClientRows(Layout.of(module), 4, DEVICE, low=torch.bfloat16)
        rows.active, rows.batch_size = 3, 4
        rows.params[:, : start.shape[1]] = start[:, : rows.params.shape[1]].to(DEVICE)
        rows.update_low()
        stacked, given = stack_module(module, rows), x.to(DEVICE, dtype).requires_grad_()
        allow_kernels(stacked, uses_kernels)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y = stacked(given)
        parameters = rows.list_parameters()
        *of_parameters, dx = torch.autograd.grad(y, [*parameters, given], dy, allow_unused=True)
        for parameter, gradient in zip(parameters, of_parameters, strict=True):
            assert (gradient is None) == (uses_kernels and outputs <= 128)
            if gradient is not None:
                parameter.grad.copy_(gradient)
        found.append([y.detach(), dx, *[parameter.grad for parameter in parameters]])
        assert not rows.gradients[rows.active :].any()
    for one, two in zip(*found, strict=True):
        assert one.dtype == two.dtype
        apart = float((one.float() - two.float()).norm() / two.float().norm())
        assert apart < 1e-2, apart
