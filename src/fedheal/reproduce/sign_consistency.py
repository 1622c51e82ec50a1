"""The paper's motivating figure: in how many of the first 10, first 100 and last 10 rounds updates kept their sign."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedheal.core.arrays import Floats
from fedheal.report import palette
from fedheal.report.figures import PAGE
from fedheal.runs.folder import read_result, read_rounds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 0.9  # of the rounds


@dataclass(frozen=True)
class Window:
    """Some rounds: by client and layer, how many entries pointed the same way in ceil(n/2), ..., n of the n rounds."""

    title: str
    rounds: int
    counts: Mapping[str, Mapping[str, Floats]]

    @property
    def same_direction(self) -> Floats:
        """The numbers of rounds that `counts` are for."""
        return np.arange((self.rounds + 1) // 2, self.rounds + 1, dtype=np.float64)

    def sum_layers(self, client: str) -> Floats:
        """Return a client's counts over all layers."""
        return np.asarray(np.sum(list(self.counts[client].values()), axis=0), np.float64)

    def get_consistent_share(self, client: str, layer: str | None = None) -> float:
        """Return the share of a client's entries (of a layer) with one direction in more than 90 % of the rounds."""
        total = self.sum_layers(client) if layer is None else self.counts[client][layer]
        return float(total[self.same_direction > MOST * self.rounds].sum() / max(total.sum(), 1))


def read_windows(folder: Path) -> list[Window]:
    """Return the windows that a run reported: the first block, the long one, the last block."""
    reports = [(record.round, record.report.get("directions") or {}) for record in read_rounds(folder)]
    blocks = [(number, report["block"]) for number, report in reports if "block" in report]
    longs = [(number, report["long"]) for number, report in reports if "long" in report]
    if not blocks or not longs:
        raise ValueError(f"{folder} has too few rounds for its windows")
    summary = read_result(folder, ["domains", "trained"])
    order = list(summary["domains"])  # so that colours are those of the domains in other figures
    clients = sorted(summary["trained"], key=lambda client: order.index(summary["trained"][client]))
    length, last = blocks[0][0], blocks[-1][0]
    windows = []
    for title, rounds, counts in (
        (f"first {length} rounds", length, blocks[0][1]),
        (f"first {longs[0][0]} rounds", longs[0][0], longs[0][1]),
        (f"rounds {last - length + 1} to {last}", length, blocks[-1][1]),
    ):
        present = [client for client in clients if client in counts]
        arrays = {c: {layer: np.array(n, np.float64) for layer, n in counts[c].items()} for c in present}
        windows.append(Window(title, rounds, arrays))
    return windows


def tabulate_windows(windows: Sequence[Window]) -> list[list[str]]:
    """Return a table as words: clients, then layers over all clients, against windows."""
    clients = list(windows[0].counts)
    lines = [["", "", *(f"{window.title}: > {MOST:.0%}" for window in windows)]]
    lines += [[client, "all layers", *(f"{w.get_consistent_share(client):.1%}" for w in windows)] for client in clients]
    for layer in windows[0].counts[clients[0]]:
        means = [float(np.mean([w.get_consistent_share(client, layer) for client in clients])) for w in windows]
        lines.append([layer, "mean of clients", *(f"{mean:.1%}" for mean in means)])
    return lines


def draw_windows(windows: Sequence[Window]) -> Figure:
    """Draw histograms, one panel per window and one colour per client; below, the share above 90 % by layer and client."""
    from matplotlib.figure import Figure

    clients = list(windows[0].counts)
    layers = list(windows[0].counts[clients[0]])
    figure = Figure(figsize=(PAGE, 2.2 + 0.13 * len(layers)))
    grid = figure.subplots(2, len(windows), squeeze=False, height_ratios=[1.5, 0.13 * len(layers) + 0.2])
    image = None
    for column, window in enumerate(windows):
        axes, below = grid[:, column]
        for i, client in enumerate(clients):
            rounds, entries = window.same_direction / window.rounds, window.sum_layers(client)
            shares = 100 * (entries / max(entries.sum(), 1))
            axes.step(100 * rounds, shares, where="mid", color=palette.domain_colour(i), label=client)
        axes.set_title(window.title, fontsize=7)
        axes.set_xlabel("same direction, % of rounds")
        values = np.array([[window.get_consistent_share(client, layer) for client in clients] for layer in layers])
        image = below.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="none")
        below.grid(visible=False)
        below.set_xticks(range(len(clients)), clients, rotation=35, ha="right", fontsize=6)
        below.set_yticks(range(len(layers)), layers if column == 0 else [""] * len(layers), fontsize=5.5)
    grid[0, 0].set_ylabel("% of parameters")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(clients))
    assert image is not None
    figure.colorbar(image, ax=list(grid[1]), label="> 90 % of rounds", fraction=0.03, pad=0.01)
    return figure
