"""The Triton kernels on a CPU, in Triton's interpreter: `test_interpreted_kernels.py` runs this file in a process of its own.

What is checked are addresses, masks and sums. Whether a GPU's compiler makes the same of them, and bf16, which the interpreter
does not multiply correctly, is checked by tests/gpu.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedheal import Layout
from fedheal.aggregate.draft import CountMask
from fedheal.aggregate.kernels import cuda, reference
from fedheal.engine import _cohort_loss_cuda as loss_kernels
from fedheal.engine.cohort_loss import compute_client_losses
from fedheal.models import _box_convolution_cuda as boxes
from fedheal.models import _max_pooling_cuda as pooling
from fedheal.models import _stacked_linear_cuda as linear
from fedheal.models import _stacked_norm_cuda as norms
from fedheal.models import stacked_kernels as launches
from fedheal.models.client_rows import ClientRows
from fedheal.models.kernel_notes import get_note
from fedheal.models.stacked_layers import stack_module

HALF = torch.float16


@pytest.fixture(autouse=True)
def _disable_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)


def make_rows(module, valid, batch_size, low=None):
    """Return the rows of a stacked module with random weights, and the module."""
    rows = ClientRows(Layout.of(module), len(valid), torch.device("cpu"), low=low)
    rows.batch_size = batch_size
    rows.valid.copy_(torch.tensor(valid))
    rows.params.normal_(std=0.1)
    rows.update_low()
    return rows, stack_module(module, rows).train()


def make_random_maps(number, channels, height, width, dtype):
    return torch.randn(number, channels, height, width).to(dtype).contiguous(memory_format=torch.channels_last)


def assert_near(actual, expected, tolerance):
    expected = expected.detach().double()
    error = (actual.detach().double() - expected).norm() / expected.norm()
    assert float(error) < tolerance


class Convolution:
    """A stacked convolution with random numbers, and what it should give, in float64."""

    def __init__(self, inputs, outputs, size, stride, height, width, valid, batch_size, dtype):
        module = nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False))
        self.rows, stacked = make_rows(module, valid, batch_size, low=None if dtype == torch.float32 else dtype)
        self.layer = stacked[0]
        self.x = make_random_maps(len(valid) * batch_size, inputs, height, width, dtype)
        self.counts = self.rows.find_padding(batch_size).flatten()
        x = self.x.double().requires_grad_()
        weight = self.layer.get("weight").detach().to(dtype).double().requires_grad_()
        parts = zip(x.chunk(len(valid)), weight, strict=True)
        self.y = torch.cat([functional.conv2d(part, w, None, stride, size // 2) for part, w in parts])
        dy = make_random_maps(*self.y.shape, dtype)
        self.dy = dy * self.counts.view(-1, 1, 1, 1)
        self.dx, self.dw = torch.autograd.grad(self.y, (x, weight), self.dy.double())

    def get_gradient(self):
        return self.rows.places["0.weight"].view(self.rows.gradients)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "stride", "height", "width", "valid", "batch_size"),
    [
        (3, 8, 3, 1, 8, 8, (4, 3), 4),
        (8, 16, 3, 1, 5, 7, (4, 1), 4),
        (16, 24, 3, 2, 7, 6, (3, 0), 3),
        (12, 20, 1, 1, 4, 4, (2, 2), 2),
        (40, 48, 3, 1, 4, 4, (2, 1), 2),
    ],
)
def test_convolutions_by_tiles(dtype, inputs, outputs, size, stride, height, width, valid, batch_size, monkeypatch):
    monkeypatch.setattr(boxes, "supports_boxes", lambda *_: False)
    convolution = Convolution(inputs, outputs, size, stride, height, width, valid, batch_size, dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    y = launches.launch_convolution(convolution.layer, convolution.x)
    assert_near(y[convolution.counts], convolution.y[convolution.counts], tolerance)
    assert_near(launches.input_gradient(convolution.layer, convolution.x, convolution.dy), convolution.dx, tolerance)
    launches.write_weight_gradient(convolution.layer, convolution.x, convolution.dy)
    assert_near(convolution.get_gradient(), convolution.dw, 1e-6)
    check_moments(convolution, y)


@pytest.mark.parametrize(("chunks", "inputs", "outputs"), [(2, 8, 24), (5, 3, 8), (64, 3, 8), (150, 3, 5)])
def test_sums_of_chunks(chunks, inputs, outputs):
    rows, module = make_rows(nn.Sequential(nn.Conv2d(inputs, outputs, 3, bias=False), nn.Linear(3, 2)), (2, 1, 2), 2)
    rows.gradients.fill_(7.0)
    rows.active = 2
    sums = launches._ChunkSums(module[0], chunks)
    sums.out.normal_()
    sums.add()
    found = rows.places["0.weight"]
    length = found.stop - found.start
    torch.testing.assert_close(rows.gradients[:2, :length], sums.out.sum(dim=1), rtol=1e-5, atol=1e-5)
    assert (rows.gradients[:2, length:] == 7.0).all()
    assert (rows.gradients[2] == 7.0).all()


def test_a_weight_gradient_in_tf32_is_a_product_of_scaled_halves(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(boxes, "supports_boxes", lambda *_: False)
    convolution = Convolution(16, 16, 3, 1, 4, 4, (2, 1), 2, torch.float32)
    launches.write_weight_gradient(convolution.layer, 1e6 * convolution.x, 1e-9 * convolution.dy)
    assert_near(1e3 * convolution.get_gradient(), convolution.dw, 1e-3)


def check_moments(convolution, y):
    """Compare the statistics that follow from a convolution's moments with those of its output."""
    moments, clients, channels = get_note(y, "moments"), len(convolution.rows.params), y.shape[1]
    statistics, running = torch.empty(clients, 2, channels), torch.zeros(clients, 2 * channels)
    tracked = torch.zeros(clients, 1, dtype=torch.int64)
    norms.statistics_of_moments[(-(-channels // 16), clients)](
        moments.values, statistics, running, running[:, channels:], tracked, convolution.rows.valid, y.shape[2] * y.shape[3],
        moments.rows, channels, moments.chunks, 2 * channels, 1, 0.1, 1e-5, block=2, width=16,
    )  # fmt: skip
    size = convolution.rows.batch_size
    for i, number in enumerate(convolution.rows.valid.tolist()):
        assert int(tracked[i]) == (number > 0)
        if number:
            of_client = convolution.y[i * size : i * size + number]
            assert_near(statistics[i, 0], of_client.mean((0, 2, 3)), 1e-3)
            assert_near(statistics[i, 1], (of_client.var((0, 2, 3), unbiased=False) + 1e-5).rsqrt(), 1e-3)


@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "stride", "height", "width", "valid", "batch_size"),
    [
        (64, 64, 3, 1, 8, 8, (4, 3), 4),
        (64, 128, 3, 2, 16, 16, (4, 1), 4),
        (64, 64, 3, 1, 4, 24, (8, 5), 8),
        (128, 128, 3, 1, 4, 8, (8, 5), 8),
        (192, 64, 1, 1, 16, 16, (1, 0), 1),
        (128, 64, 1, 2, 32, 32, (1,), 1),
    ],
)
def test_convolutions_by_boxes(inputs, outputs, size, stride, height, width, valid, batch_size, monkeypatch):
    monkeypatch.setattr(boxes, "supports_boxes", lambda *_: True)
    convolution = Convolution(inputs, outputs, size, stride, height, width, valid, batch_size, HALF)
    y = launches.launch_convolution(convolution.layer, convolution.x)
    assert_near(y[convolution.counts], convolution.y[convolution.counts], 1e-3)
    assert_near(launches.input_gradient(convolution.layer, convolution.x, convolution.dy), convolution.dx, 1e-3)
    launches.write_weight_gradient(convolution.layer, convolution.x, convolution.dy)
    assert_near(convolution.get_gradient(), convolution.dw, 1e-6)
    if width == 24:  # a box has parts of several images, so its moments would be of no range of positions
        assert get_note(y, "moments") is None
    else:
        check_moments(convolution, y)
    if stride == 1:
        added = torch.randn_like(convolution.x)
        dx = boxes.input_gradient_of_boxes(convolution.layer, convolution.x, convolution.dy, added=added)
        assert_near(dx, convolution.dx + added.double(), 1e-3)


def test_gradients_of_two_branches_are_added(monkeypatch):
    monkeypatch.setattr(boxes, "supports_boxes", lambda *_: True)
    valid = (4, 1)
    first = Convolution(64, 64, 3, 2, 16, 16, valid, 4, HALF)
    second = Convolution(64, 64, 1, 2, 16, 16, valid, 4, HALF)
    dx = boxes.input_gradient_of_boxes(first.layer, first.x, first.dy, second.layer, second.dy)
    assert_near(dx, first.dx + second.dx, 1e-3)


@pytest.mark.parametrize(
    ("size", "stride", "outputs", "is_supported"), [(1, 2, 64, True), (1, 2, 128, False), (3, 2, 64, False)]
)
def test_branches_that_do_not_match_are_not_added(monkeypatch, size, stride, outputs, is_supported):
    monkeypatch.setattr(boxes, "supports_boxes", lambda *_: True)
    first = Convolution(64, 64, 3, 2, 16, 16, (1,), 1, HALF)
    second = Convolution(64, outputs, size, stride, 16, 16, (1,), 1, HALF)
    assert launches.supports_fork(first.layer, second.layer, first.x) == is_supported
    assert not launches.supports_fork(first.layer, None, first.x)  # the input is larger than the output


@pytest.mark.parametrize("shortcut", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("channels", "side", "valid"), [(8, 6, (3, 1)), (24, 5, (3, 0)), (64, 4, (2, 3))])
def test_normalisation(channels, side, valid, relu, shortcut):
    module = nn.Sequential(nn.BatchNorm2d(channels), nn.Conv2d(channels, 4, 1))
    x, added, factors = (make_random_maps(3 * len(valid), channels, side, side, torch.float32) for _ in range(3))
    results = []
    for uses_kernels in (True, False):
        torch.manual_seed(1)
        rows, stacked = make_rows(module, valid, 3)
        layer, counts = stacked[0], rows.find_padding(3).view(-1, 1, 1, 1)
        layer.uses_kernels = uses_kernels
        inputs = [t.clone().requires_grad_() for t in (x, added)]
        apply = norms.normalise_and_scale if uses_kernels else type(layer).norm_relu
        y = apply(layer, inputs[0], inputs[1] if shortcut else None, relu) * counts
        leaves = [inputs[0], layer.get("weight"), layer.get("bias"), *inputs[1 : 1 + shortcut]]
        dx, *of_layer, last = torch.autograd.grad((y * factors).sum(), leaves, allow_unused=True)
        if not uses_kernels:
            weight, bias = of_layer if shortcut else (of_layer[0], last)
            layer.get("weight").grad.copy_(weight)
            layer.get("bias").grad.copy_(bias)
        results.append([y, dx, rows.gradients, rows.buffers, *([last * counts] if shortcut else [])])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_step_of_sgd():
    rows, _ = make_rows(nn.Sequential(nn.Linear(5, 3), nn.ReLU()), (2, 0), 2, low=HALF)
    rows.lr.fill_(0.1)
    rows.velocity.normal_()
    rows.gradients.normal_()
    params, velocity = rows.params.clone(), rows.velocity.clone()
    new = 0.9 * velocity[0] + rows.gradients[0] + 0.01 * params[0]
    launches.launch_sgd_step(rows, 0.9, 0.01)
    torch.testing.assert_close(rows.params[0], params[0] - 0.1 * new)
    torch.testing.assert_close(rows.velocity[0], new)
    assert torch.equal(rows.params[1], params[1])  # has no examples in this step
    assert torch.equal(rows.velocity[1], velocity[1])
    assert torch.equal(rows.low[0], rows.params[0].to(HALF))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 5, 6), (8, 4, 4)])
def test_pooling(channels, height, width, relu):
    x = make_random_maps(2, channels, height, width, torch.float32)
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    actual = pooling.MaxPooling.apply(first, relu)
    expected = torch.max_pool2d(second, 2)
    expected = torch.relu(expected) if relu else expected
    assert torch.equal(actual, expected)
    factors = torch.randn_like(expected)
    (dx,), (expected_dx,) = (torch.autograd.grad(y, x, factors) for y, x in ((actual, first), (expected, second)))
    assert torch.equal(dx, expected_dx)


@pytest.mark.parametrize("is_whole", [False, True])
def test_losses(is_whole):
    rows, _ = make_rows(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (3, 1, 0), 3)
    logits, labels = torch.randn(9, 5), torch.randint(0, 5, (9,))
    results = []
    for uses_kernels in (True, False):
        leaf, totals, cursor = logits.clone().requires_grad_(), torch.ones(3, dtype=torch.float64), torch.tensor([4])
        if uses_kernels:
            losses = loss_kernels.ClientLosses.apply(leaf, labels, rows, totals, cursor, is_whole)
        else:
            losses = compute_client_losses(leaf, labels, rows, totals, cursor, is_whole, uses_kernels=False)
        factors = torch.ones(3) if is_whole else torch.tensor([1.0, 2.0, 3.0])
        results.append([losses.detach(), *torch.autograd.grad(losses, leaf, factors), totals, cursor])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers(bias):
    rows, stacked = make_rows(nn.Sequential(nn.Linear(20, 6, bias=bias), nn.ReLU()), (3, 2), 3, low=HALF)
    layer, x = stacked[0], torch.randn(2, 3, 20).to(HALF)
    leaf = x.clone().requires_grad_()
    y = linear.StackedProduct.apply(leaf, layer.get("weight"), layer.get("bias"), layer)
    factors = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, leaf, factors)
    weight = layer.get("weight").detach().to(HALF).double()
    assert_near(y, x.double() @ weight.transpose(1, 2) + (layer.get("bias").double()[:, None] if bias else 0), 2e-3)
    assert_near(dx, factors.double() @ weight, 2e-3)
    gradient = rows.places["0.weight"].view(rows.gradients)
    assert_near(gradient, factors.double().transpose(1, 2) @ x.double(), 2e-3)
    if bias:
        assert_near(rows.places["0.bias"].view(rows.gradients), factors.double().sum(dim=1), 2e-3)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1024, 2 * 1024 + 5])
def test_aggregation(size, masked):
    deltas, params = torch.randn(5, size), torch.randn(size)
    rows, weights = np.array([4, 0, 2]), np.array([0.5, 0.2, 0.3])
    slots, high, low = np.array([1, 0, 3]), np.array([3, 5, 4]), np.array([2, 4, 1])
    counts, actual = torch.randint(0, 7, (4, size), dtype=torch.uint8), []
    for kernel in (reference, cuda):
        table = counts.clone()
        mask = CountMask(counts=table, slots=slots, at_least=high, below=low, sign=1) if masked else None
        norms = kernel.observe(deltas, rows, [size], mask) if masked else kernel.measure(deltas, rows, [size])
        actual.append((norms, table, *kernel.average(params, deltas, rows, weights, mask)))
    (expected, expected_counts, expected_mean, expected_unkept), (norms, table, mean, unkept) = actual
    assert torch.equal(table, expected_counts)
    assert torch.equal(mean, expected_mean)
    assert unkept == expected_unkept
    assert np.array_equal(norms.kept, expected.kept)
    np.testing.assert_allclose(norms.squares, expected.squares, rtol=1e-12)
