"""FedHEAL's aggregation on a GPU: 20 clients of 4,903,242 parameters, against the time its bytes need at the copy bandwidth.

python benchmarks/aggregate_gpu.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from arguments import exit_with_error
from fedheal import Layout, Updates, aggregate, models
from fedheal.aggregate.draft import CountMask
from fedheal.aggregate.kernels import reference
from fedheal.core.layout import allocate_rows

CLIENTS = 20


def best(work: Callable[[], object], repeats: int = 20) -> float:
    """Seconds, the median, by the device's own clock."""
    work()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return float(np.median(times))


def alone(kernel: str, work: Callable[[], object], repeats: int = 20) -> float:
    """Seconds of the kernels of this name in one call, without launching them: the mean."""
    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in seen.key_averages() if e.key.startswith(kernel)) / repeats / 1e6


def main() -> None:
    if not torch.cuda.is_available():
        exit_with_error("there is no GPU here; benchmarks/aggregate.py measures on a CPU")
    from fedheal.aggregate.kernels import cuda  # needs Triton, which is there only where there is a GPU

    layout = Layout.of(models.build("resnet10", classes=10))
    sizes = layout.sizes()
    tensors, size = [length for _, length in sizes.tensors], sizes.params
    device = torch.device("cuda")
    deltas = allocate_rows(CLIENTS, size, torch.float32, device)  # as the lanes hand them over
    deltas.copy_(torch.randn(CLIENTS, size, device="cuda") * 0.01)
    params = torch.randn(size, device="cuda")
    source, target = torch.randn(CLIENTS, size, device="cuda"), torch.empty(CLIENTS, size, device="cuda")
    copy = best(lambda: target.copy_(source))
    bandwidth = 2 * deltas.nbytes / copy
    counts = allocate_rows(CLIENTS, size, torch.uint8, device)
    rows = np.arange(CLIENTS)
    low, high = np.full(CLIENTS, 1), np.full(CLIENTS, 2)
    weights = np.full(CLIENTS, 1 / CLIENTS)
    mask = CountMask(counts=counts, slots=rows, at_least=low, below=high, sign=1)
    # Read the updates, read and write the counts; then read updates, counts and the old parameters, write the new ones.
    needed = (2 * deltas.nbytes + 3 * counts.nbytes + 2 * params.nbytes) / bandwidth

    def passes(kernel: object) -> Callable[[], object]:
        def both() -> None:
            kernel.observe(deltas, rows, tensors, mask)  # type: ignore[attr-defined]
            kernel.average(params, deltas, rows, weights, mask)  # type: ignore[attr-defined]

        return both

    heal = aggregate.fedheal()
    updates = Updates([str(i) for i in range(CLIENTS)], deltas, [100] * CLIENTS)
    state = heal.init(Layout.flat(size))

    def whole() -> None:
        nonlocal state
        state = heal.apply(params, updates, state, donate=True).state

    first = alone("_count", lambda: cuda._scan(deltas, rows, tensors, mask, step=1))
    second = alone("_average", lambda: cuda.average(params, deltas, rows, weights, mask))
    counts.zero_()
    both = best(passes(cuda))
    counts.zero_()
    plain = best(passes(reference), 3)
    start = time.perf_counter()
    for _ in range(20):
        whole()
    torch.cuda.synchronize()
    applied = (time.perf_counter() - start) / 20
    average = best(lambda: torch.from_numpy(weights).float().cuda() @ deltas)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {CLIENTS} x {size:,} float32\n")
    print(f"copy: {bandwidth / 1e12:.2f} TB/s, so both passes need at least {1e3 * needed:.3f} ms\n")
    print("| what | ms | of what the bytes need |\n|---|---|---|")
    for name, seconds in (
        ("plain average, u @ D", average),
        ("first pass, the kernel alone", first),
        ("second pass, the kernel alone", second),
        ("both kernels", first + second),
        ("both passes, launched by the host and with what the host learns of them", both),
        ("fedheal().apply, everything included", applied),
        ("reference kernel, both passes", plain),
    ):
        print(f"| {name} | {1e3 * seconds:.3f} | {seconds / needed:.2f} x |")


if __name__ == "__main__":
    main()
