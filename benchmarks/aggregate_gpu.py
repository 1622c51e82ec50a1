"""Time FedHEAL's aggregation of 20 clients x 4,903,242 parameters on a GPU, beside the time that copying its bytes takes.

python benchmarks/aggregate_gpu.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from arguments import exit_with_error
from fedheal import Layout, Updates, aggregate, models
from fedheal.aggregate.draft import CountMask
from fedheal.aggregate.kernels import reference
from fedheal.core.layout import allocate_rows

CLIENTS = 20


def time_median(function: Callable[[], object], repeats: int = 20) -> float:
    """Return the median seconds of a call by the device's clock."""
    function()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return float(np.median(times))


def time_kernels(name: str, function: Callable[[], object], repeats: int = 20) -> float:
    """Return the mean seconds that the kernels of this name take in one call, without their launches."""
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.key.startswith(name)]
    return sum(event.self_device_time_total for event in events) / repeats / 1e6


def main() -> None:
    if not torch.cuda.is_available():
        exit_with_error("there is no GPU here; benchmarks/aggregate.py measures on a CPU")
    from fedheal.aggregate.kernels import cuda  # needs Triton, which is installed only where there is a GPU

    layout = Layout.of(models.build("resnet10", classes=10))
    sizes = layout.sizes()
    tensors, size = [length for _, length in sizes.tensors], sizes.params
    device = torch.device("cuda")
    deltas = allocate_rows(CLIENTS, size, torch.float32, device)  # in the layout of the lanes
    deltas.copy_(torch.randn(CLIENTS, size, device="cuda") * 0.01)
    params = torch.randn(size, device="cuda")
    source, target = torch.randn(CLIENTS, size, device="cuda"), torch.empty(CLIENTS, size, device="cuda")
    bandwidth = 2 * deltas.nbytes / time_median(lambda: target.copy_(source))
    counts = allocate_rows(CLIENTS, size, torch.uint8, device).zero_()
    rows = np.arange(CLIENTS)
    low, high = np.full(CLIENTS, 1), np.full(CLIENTS, 2)
    weights = np.full(CLIENTS, 1 / CLIENTS)
    mask = CountMask(counts=counts, slots=rows, at_least=low, below=high, sign=1)
    # The first pass reads the updates, and reads and writes the counts. The second pass reads the updates, the counts and the
    # old parameters, and writes the new parameters.
    bound = (2 * deltas.nbytes + 3 * counts.nbytes + 2 * params.nbytes) / bandwidth

    def run_passes(kernel: Any) -> None:
        kernel.observe(deltas, rows, tensors, mask)
        kernel.average(params, deltas, rows, weights, mask)

    aggregator = aggregate.fedheal()
    updates = Updates([str(i) for i in range(CLIENTS)], deltas, [100] * CLIENTS)
    state = aggregator.init(Layout.flat(size))
    first_pass = time_kernels("_count", lambda: cuda._scan(deltas, rows, tensors, mask, step=1))
    second_pass = time_kernels("_average", lambda: cuda.average(params, deltas, rows, weights, mask))
    counts.zero_()
    both_passes = time_median(lambda: run_passes(cuda))
    counts.zero_()
    reference_passes = time_median(lambda: run_passes(reference), 3)
    calls = []
    for _ in range(21):
        start = time.perf_counter()
        state = aggregator.apply(params, updates, state, donate=True).state
        torch.cuda.synchronize()
        calls.append(time.perf_counter() - start)
    whole_call = float(np.median(calls[1:]))  # the first call compiles kernels
    average = time_median(lambda: torch.from_numpy(weights).float().cuda() @ deltas)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {CLIENTS} x {size:,} float32\n")
    print(f"copy: {bandwidth / 1e12:.2f} TB/s, so both passes need at least {1e3 * bound:.3f} ms\n")
    print("| what | ms | of what the bytes need |\n|---|---|---|")
    for name, seconds in (
        ("plain average, u @ D", average),
        ("first pass, the kernel alone", first_pass),
        ("second pass, the kernel alone", second_pass),
        ("both kernels", first_pass + second_pass),
        ("both passes, launched by the host and with what the host learns of them", both_passes),
        ("fedheal().apply, everything included", whole_call),
        ("reference kernel, both passes", reference_passes),
    ):
        print(f"| {name} | {1e3 * seconds:.3f} | {seconds / bound:.2f} x |")


if __name__ == "__main__":
    main()
