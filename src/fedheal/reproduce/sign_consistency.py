"""The paper's motivating figure: how many rounds out of 10, of 100 and of the last 10 parameters moved the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedheal.report import palette
from fedheal.report.figures import PAGE
from fedheal.report.html_page import Extra
from fedheal.runs.folder import read_json, read_rounds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
MOST = 0.9  # of the rounds


@dataclass(frozen=True)
class Window:
    """Some rounds: by client and layer, how many entries pointed the same way in ceil(n/2), ..., n of the n rounds."""

    words: str
    rounds: int
    counts: Mapping[str, Mapping[str, Floats]]

    def mostly(self, client: str, layer: str | None = None) -> float:
        """The share of a client's entries (of a layer) that kept their direction in more than 90 % of the rounds, or in all
        where 90 % of them and one more is all."""
        counts = self.counts[client]
        summed = counts[layer] if layer is not None else np.sum(list(counts.values()), axis=0)
        many = np.arange((self.rounds + 1) // 2, self.rounds + 1) > MOST * self.rounds
        return float(summed[many].sum() / max(summed.sum(), 1))

    def shares(self, client: str) -> tuple[Floats, Floats]:
        """Share of rounds with the same direction, and the share of entries with it."""
        summed = np.sum(list(self.counts[client].values()), axis=0)
        return np.arange((self.rounds + 1) // 2, self.rounds + 1) / self.rounds, summed / max(summed.sum(), 1)


def windows(folder: Path) -> list[Window]:
    """The windows a run reported: the first block, the long one, the last block."""
    told = [(record.round, record.report.get("directions") or {}) for record in read_rounds(folder)]
    blocks = [(number, report["block"]) for number, report in told if "block" in report]
    long = [(number, report["long"]) for number, report in told if "long" in report]
    if not blocks or not long:
        raise ValueError(f"{folder} has too few rounds for its windows")
    summary = read_json(folder / "result.json")
    order = list(summary["domains"])  # so that colours are those of the domains in other figures
    clients = sorted(summary["trained"], key=lambda client: order.index(summary["trained"][client]))
    length, ended = blocks[0][0], blocks[-1][0]
    return [
        Window(f"first {length} rounds", length, _arrays(blocks[0][1], clients)),
        Window(f"first {long[0][0]} rounds", long[0][0], _arrays(long[0][1], clients)),
        Window(f"rounds {ended - length + 1} to {ended}", length, _arrays(blocks[-1][1], clients)),
    ]


def _arrays(told: Mapping[str, Mapping[str, Sequence[int]]], clients: Sequence[str]) -> dict[str, dict[str, Floats]]:
    return {c: {layer: np.array(n, np.float64) for layer, n in told[c].items()} for c in clients if c in told}


def cells(found: Sequence[Window]) -> list[list[str]]:
    """A table: clients, then layers over all clients, against windows."""
    clients = list(found[0].counts)
    layers = list(found[0].counts[clients[0]])
    made = [["", "", *(f"{window.words}: > {MOST:.0%}" for window in found)]]
    made += [[client, "all layers", *(f"{w.mostly(client):.1%}" for w in found)] for client in clients]
    for layer in layers:
        mean = [float(np.mean([w.mostly(client, layer) for client in clients])) for w in found]
        made.append([layer, "mean of clients", *(f"{x:.1%}" for x in mean)])
    return made


def extra(label: str, found: Sequence[Window], notes: Sequence[str]) -> Extra:
    said = "Share of parameters whose updates pointed the same way in more than 90 % of the rounds."
    return Extra(f"Directions, {label}", [said, *notes], cells(found))


def picture(found: Sequence[Window]) -> Figure:
    """Histograms, a panel a window and a colour a client; below, the share above 90 % by layer and client."""
    from matplotlib.figure import Figure

    clients = list(found[0].counts)
    layers = list(found[0].counts[clients[0]])
    figure = Figure(figsize=(PAGE, 2.2 + 0.13 * len(layers)))
    grid = figure.subplots(2, len(found), squeeze=False, height_ratios=[1.5, 0.13 * len(layers) + 0.2])
    drawn = None
    for column, window in enumerate(found):
        axes = grid[0, column]
        for i, client in enumerate(clients):
            share, entries = window.shares(client)
            axes.step(100 * share, 100 * entries, where="mid", color=palette.domain(i), label=client)
        axes.set_title(window.words, fontsize=7)
        axes.set_xlabel("same direction, % of rounds")
        below = grid[1, column]
        values = np.array([[window.mostly(client, layer) for client in clients] for layer in layers])
        drawn = below.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="none")
        below.grid(visible=False)
        below.set_xticks(range(len(clients)), clients, rotation=35, ha="right", fontsize=6)
        below.set_yticks(range(len(layers)), layers if column == 0 else [""] * len(layers), fontsize=5.5)
    grid[0, 0].set_ylabel("% of parameters")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(clients))
    assert drawn is not None
    figure.colorbar(drawn, ax=list(grid[1]), label="> 90 % of rounds", fraction=0.03, pad=0.01)
    return figure
