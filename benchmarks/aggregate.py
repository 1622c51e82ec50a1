"""What FedHEAL's aggregation costs, against what it cannot beat and what it replaces, in one run on one machine.

    python benchmarks/aggregate.py              the table for 20 x 4,903,242 (the paper's ResNet-10), then the growth tables
    python benchmarks/aggregate.py --quick      small sizes, to see that it runs

Rivals: a memory copy, numpy's plain average `u @ D` (the least any aggregation must do), the straightforward torch formula
on whole arrays, our reference kernel and our fast one. Times are the best of several; ratios are what to look at.
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


def best(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


class Straightforward:
    """FedHEAL as one would write it from the paper: whole arrays, float histories, no blocks."""

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


def stepper(
    aggregator: aggregate.Aggregator, model: torch.Tensor, updates: Updates, donate: bool
) -> Callable[[], None]:
    """Rounds one after another, the state carried on."""
    state = [aggregator.init(Layout.flat(len(model)))]

    def step() -> None:
        state[0] = aggregator.apply(model, updates, state[0], donate=donate).state

    return step


def cohort(k: int, g: int) -> Updates:
    rng = np.random.default_rng(0)
    deltas = np.empty((k, g), np.float32)
    for row in deltas:
        rng.standard_normal(out=row, dtype=np.float32)
    return Updates(range(k), deltas, [100] * k)


def main_table(k: int, g: int, repeats: int, slow: bool = True) -> None:
    updates, model = cohort(k, g), torch.zeros(g)
    deltas = updates.deltas
    target, u = torch.empty_like(deltas), np.full(k, 1 / k, np.float32)
    rows: list[tuple[str, float]] = [
        ("memory copy of the updates", best(lambda: target.copy_(deltas), repeats)),
        ("numpy plain average, u @ D", best(lambda: u @ deltas.numpy(), repeats)),
    ]
    few = max(1, repeats // 4)
    rows += [
        ("fedavg()", best(stepper(aggregate.fedavg(), model, updates, True), repeats)),
        ("fedheal(), cpu kernel, donate", best(stepper(aggregate.fedheal(), model, updates, True), repeats)),
        ("fedheal(), cpu kernel", best(stepper(aggregate.fedheal(), model, updates, False), few)),
        (
            "released, cpu kernel, donate",
            best(stepper(aggregate.fedheal(variant="released"), model, updates, True), repeats),
        ),
        ("fael='exact', cpu kernel, donate", best(stepper(aggregate.fedheal(fael="exact"), model, updates, True), few)),
    ]
    if slow:
        plain = Straightforward(k, g)
        reference = stepper(aggregate.fedheal(kernel="reference"), model, updates, True)
        rows += [
            ("fedheal(), reference kernel", best(reference, 1)),
            ("straightforward torch, whole arrays", best(lambda: plain.apply(model, deltas), few)),
        ]
    average = dict(rows)["numpy plain average, u @ D"]
    fast = dict(rows)["fedheal(), cpu kernel, donate"]
    print(f"\n{k} clients x {g:,} parameters, float32 ({deltas.nbytes / 1e6:.0f} MB of updates)\n")
    print("| what | ms | x plain average | x our kernel | GB/s of updates |\n|---|---|---|---|---|")
    for name, seconds in rows:
        rate = deltas.nbytes / seconds / 1e9
        print(f"| {name} | {seconds * 1e3:.1f} | {seconds / average:.2f} | {seconds / fast:.2f} | {rate:.1f} |")


def growth_table(sizes: list[tuple[int, int]], repeats: int) -> None:
    print(
        "\n| clients | parameters | updates | fedheal() ms | x plain average | sign counts |\n|---|---|---|---|---|---|"
    )
    for k, g in sizes:
        updates, model, u = cohort(k, g), torch.zeros(g), np.full(k, 1 / k, np.float32)
        average = best(partial(np.matmul, u, updates.deltas.numpy()), repeats)
        ours = best(stepper(aggregate.fedheal(), model, updates, True), repeats)
        print(
            f"| {k} | {g:,} | {updates.deltas.nbytes / 1e9:.2f} GB | {ours * 1e3:.1f} | {ours / average:.2f} "
            f"| {k * g / 1e6:.0f} MB |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    quick = parser.parse_args().quick
    versions = (
        f"fedheal {fedheal.__version__}, torch {torch.__version__}, numba {numba.__version__}, numpy {np.__version__}"
    )
    print(f"{platform.machine()}, {torch.get_num_threads()} threads; Python {platform.python_version()}, {versions}")
    if quick:
        main_table(4, 100_000, 2)
        growth_table([(4, 10_000), (8, 10_000)], 2)
        return
    main_table(20, RESNET10, 12)
    growth_table([(20, 1_000_000), (50, 1_000_000), (100, 1_000_000), (200, 1_000_000), (500, 1_000_000)], 5)
    growth_table([(20, 100_000), (20, 1_000_000), (20, RESNET10), (20, 11_000_000), (20, 25_000_000)], 5)


if __name__ == "__main__":
    main()
