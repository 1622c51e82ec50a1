"""Time FedHEAL's aggregation on a CPU, beside its lower bound and what it replaces.

    python benchmarks/aggregate.py              20 x 4,903,242 (the paper's ResNet-10), then tables of how times grow
    python benchmarks/aggregate.py --quick      small sizes, to see that it runs

It is compared with a memory copy, numpy's plain average `u @ D` (the least that any aggregation does), the straightforward
torch formula on whole arrays, and our reference kernel. Every time is the best of several. Compare ratios, not milliseconds.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial

import numba
import numpy as np
import torch

import fedheal
from fedheal import Layout, Updates, aggregate

RESNET10 = 4_903_242


def time_best(function: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest of several calls, after one that warms up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


class StraightforwardFedHEAL:
    """FedHEAL as one would write it after reading the paper: whole arrays, float histories, no blocks."""

    def __init__(self, k: int, g: int) -> None:
        self.increase, self.t = torch.zeros(k, g), 0
        self.p, self.dp = torch.full((k,), 1 / k, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)

    def apply(self, model: torch.Tensor, deltas: torch.Tensor, tau: float = 0.3, beta: float = 0.4) -> torch.Tensor:
        sign = (deltas >= 0).float()
        self.increase = (self.increase * self.t + sign) / (self.t + 1)
        self.t += 1
        consistency = torch.where(deltas >= 0, self.increase, 1 - self.increase)
        kept = (consistency >= tau).float()
        masked = deltas * kept
        d = (masked.double() ** 2).sum(dim=1)
        self.dp = (1 - beta) * self.dp + beta * d / d.sum()
        self.p = (self.p + self.dp) / (self.p + self.dp).sum()
        u = self.p.float()[:, None] * kept
        total = u.sum(dim=0)
        return model + torch.where(total > 0, (u * deltas).sum(dim=0) / total, torch.zeros(()))


def make_step(
    aggregator: aggregate.Aggregator, model: torch.Tensor, updates: Updates, donate: bool
) -> Callable[[], None]:
    """Return a function that aggregates one more round from the state of the last one."""
    state = [aggregator.init(Layout.flat(len(model)))]

    def step() -> None:
        state[0] = aggregator.apply(model, updates, state[0], donate=donate).state

    return step


def make_cohort(k: int, g: int) -> Updates:
    """Return random updates of k clients with g parameters."""
    generator = np.random.default_rng(0)
    deltas = np.empty((k, g), np.float32)
    for row in deltas:
        generator.standard_normal(out=row, dtype=np.float32)
    return Updates(range(k), deltas, [100] * k)


def print_main_table(k: int, g: int, repeats: int) -> None:
    """Time all aggregations at one size."""
    updates, model = make_cohort(k, g), torch.zeros(g)
    deltas = updates.deltas
    target, u = torch.empty_like(deltas), np.full(k, 1 / k, np.float32)
    rows: list[tuple[str, float]] = [
        ("memory copy of the updates", time_best(lambda: target.copy_(deltas), repeats)),
        ("numpy plain average, u @ D", time_best(lambda: u @ deltas.numpy(), repeats)),
    ]
    few = max(1, repeats // 4)  # for slow ones
    rows += [
        ("fedavg()", time_best(make_step(aggregate.fedavg(), model, updates, True), repeats)),
        ("fedheal(), cpu kernel, donate", time_best(make_step(aggregate.fedheal(), model, updates, True), repeats)),
        ("fedheal(), cpu kernel", time_best(make_step(aggregate.fedheal(), model, updates, False), few)),
        (
            "released, cpu kernel, donate",
            time_best(make_step(aggregate.fedheal(variant="released"), model, updates, True), repeats),
        ),
        (
            "fael='exact', cpu kernel, donate",
            time_best(make_step(aggregate.fedheal(fael="exact"), model, updates, True), few),
        ),
    ]
    straightforward = StraightforwardFedHEAL(k, g)
    reference = make_step(aggregate.fedheal(kernel="reference"), model, updates, True)
    rows += [
        ("fedheal(), reference kernel", time_best(reference, 1)),
        ("straightforward torch, whole arrays", time_best(lambda: straightforward.apply(model, deltas), few)),
    ]
    average = dict(rows)["numpy plain average, u @ D"]
    fast = dict(rows)["fedheal(), cpu kernel, donate"]
    print(f"\n{k} clients x {g:,} parameters, float32 ({deltas.nbytes / 1e6:.0f} MB of updates)\n")
    print("| what | ms | x plain average | x our kernel | GB/s of updates |\n|---|---|---|---|---|")
    for name, seconds in rows:
        rate = deltas.nbytes / seconds / 1e9
        print(f"| {name} | {seconds * 1e3:.1f} | {seconds / average:.2f} | {seconds / fast:.2f} | {rate:.1f} |")


def print_growth_table(sizes: list[tuple[int, int]], repeats: int) -> None:
    """Time the fast kernel at several sizes."""
    print(
        "\n| clients | parameters | updates | fedheal() ms | x plain average | sign counts |\n|---|---|---|---|---|---|"
    )
    for k, g in sizes:
        updates, model, u = make_cohort(k, g), torch.zeros(g), np.full(k, 1 / k, np.float32)
        average = time_best(partial(np.matmul, u, updates.deltas.numpy()), repeats)
        seconds = time_best(make_step(aggregate.fedheal(), model, updates, True), repeats)
        print(
            f"| {k} | {g:,} | {updates.deltas.nbytes / 1e9:.2f} GB | {seconds * 1e3:.1f} | {seconds / average:.2f} "
            f"| {k * g / 1e6:.0f} MB |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    versions = (
        f"fedheal {fedheal.__version__}, torch {torch.__version__}, numba {numba.__version__}, numpy {np.__version__}"
    )
    print(f"{platform.machine()}, {torch.get_num_threads()} threads; Python {platform.python_version()}, {versions}")
    if options.quick:
        print_main_table(4, 100_000, 2)
        print_growth_table([(4, 10_000), (8, 10_000)], 2)
        return
    print_main_table(20, RESNET10, 12)
    print_growth_table([(20, 1_000_000), (50, 1_000_000), (100, 1_000_000), (200, 1_000_000), (500, 1_000_000)], 5)
    print_growth_table([(20, 100_000), (20, 1_000_000), (20, RESNET10), (20, 11_000_000), (20, 25_000_000)], 5)


if __name__ == "__main__":
    main()
