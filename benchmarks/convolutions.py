"""Measure the TFLOP/s of ResNet-10's convolutions for stacked clients: with our kernels, and with cuDNN client by client.

    python benchmarks/convolutions.py                        # 20 clients with 64 images of 32 x 32, in bf16
    python benchmarks/convolutions.py --side 192 --batch-size 16 --clients 10

A cell shows the forward pass, the input gradient and the weight gradient. `boxes` are the kernels of
models/_box_convolution_cuda.py. `tiles` are those of models/_stacked_cuda.py, which also serve other precisions and sizes.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from unittest.mock import patch

import torch
from torch import nn

from arguments import exit_with_error, parse_positive
from fedheal.core.import_path import import_triton_kernels
from fedheal.core.layout import Layout
from fedheal.models.client_rows import ClientRows
from fedheal.models.stacked_layers import KERNELS, StackedConv2d, stack_module

# Input channels, output channels, stride, and by what factor earlier layers have shrunk the image.
LAYERS = (
    (64, 64, 1, 1), (64, 128, 2, 1), (128, 128, 1, 2), (128, 256, 2, 2), (256, 256, 1, 4), (256, 512, 2, 4),
    (512, 512, 1, 8),
)  # fmt: skip
REPEATS = 6  # calls in a graph


def time_graph(function: Callable[[], object]) -> float:
    """Return the seconds of a call: the best of three replays of a graph with several calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            function()
    graph.replay()
    best = float("inf")
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / REPEATS)
    return best


def list_passes(layer: StackedConv2d, x: torch.Tensor, dy: torch.Tensor) -> list[Callable[[], object]]:
    """Return the three passes of a layer by our kernels."""
    kernels = import_triton_kernels(KERNELS, "cuda")
    return [
        lambda: kernels.launch_convolution(layer, x),
        lambda: kernels.input_gradient(layer, x, dy),
        lambda: kernels.write_weight_gradient(layer, x, dy),
    ]


def list_cudnn_passes(layer: StackedConv2d, x: torch.Tensor, dy: torch.Tensor) -> list[Callable[[], object]]:
    """Return the three passes of a layer by cuDNN, one client after another."""
    clients, place, stride = layer.rows.active, layer.rows.places["0.weight"], [layer.stride[0]] * 2
    client_parts = list(zip(x.chunk(clients), dy.chunk(clients), place.view(layer.rows.low), strict=True))
    settings = (None, stride, [1, 1], [1, 1], False, [0, 0], 1)

    def run_backward(*mask: bool) -> None:
        for client_x, client_dy, weight in client_parts:
            torch.ops.aten.convolution_backward(client_dy, client_x, weight, *settings, mask)

    return [
        lambda: [torch.ops.aten.convolution(client_x, weight, *settings) for client_x, _, weight in client_parts],
        lambda: run_backward(True, False, False),
        lambda: run_backward(False, True, False),
    ]


def measure_layer(inputs: int, outputs: int, stride: int, side: int, clients: int, batch_size: int) -> list[str]:
    """Return the cells of a layer: the TFLOP/s of boxes, of tiles and of cuDNN."""
    device, low = torch.device("cuda"), torch.bfloat16
    module = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)).to(device)
    rows = ClientRows(Layout.of(module), clients, device, low=low)
    rows.params.normal_(std=0.02)
    rows.update_low()
    rows.batch_size = batch_size
    rows.valid.fill_(batch_size)
    layer = stack_module(module, rows).train()[0]
    shapes = (
        (clients * batch_size, inputs, side, side),
        (clients * batch_size, outputs, side // stride, side // stride),
    )
    x, dy = (torch.randn(s, device=device).to(low).contiguous(memory_format=torch.channels_last) for s in shapes)
    operations = 2 * 9 * inputs * dy.numel()
    boxes = import_triton_kernels(KERNELS, "cuda").boxes
    cells = []
    for uses_boxes, list_functions in ((True, list_passes), (False, list_passes), (True, list_cudnn_passes)):
        with nullcontext() if uses_boxes else patch.object(boxes, "supports_boxes", lambda *_: False):
            rates = [operations / time_graph(function) / 1e12 for function in list_functions(layer, x, dy)]
            cells.append(" / ".join(f"{rate:.0f}" for rate in rates))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--side", type=parse_positive, default=32)
    parser.add_argument("--batch-size", type=parse_positive, default=64)
    parser.add_argument("--clients", type=parse_positive, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        exit_with_error("no GPU is available, and this benchmark measures the kernels of one")
    torch.backends.cudnn.benchmark = True
    print(f"{date.today()} {torch.cuda.get_device_name()}, torch {torch.__version__}, ", end="")
    print(f"Python {platform.python_version()}, {options.clients} clients, {options.batch_size} images each, bf16\n")
    print("| layer | boxes | tiles | cuDNN, client by client |\n|---|---|---|---|")
    for inputs, outputs, stride, shrink_factor in LAYERS:
        side = options.side // shrink_factor
        cells = measure_layer(inputs, outputs, stride, side, options.clients, options.batch_size)
        suffix = f", stride {stride}" if stride > 1 else ""
        print(f"| {inputs} -> {outputs} @{side}{suffix} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
