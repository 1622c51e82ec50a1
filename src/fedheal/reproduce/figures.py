"""Figures that belong to a recipe: a sweep, or convergence with and without FedHEAL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedheal.report import palette
from fedheal.report.figures import COLUMN, PAGE, band, by_round
from fedheal.report.series import series
from fedheal.reproduce.paper_comparison import Beside, found
from fedheal.reproduce.plans import Planned
from fedheal.reproduce.recipes import LOCAL, STAGES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sweep(table: Beside) -> Figure | None:
    """AVG and STD against the swept value; the paper's numbers as crosses, uniform weights as a level."""
    from matplotlib.figure import Figure

    swept = [(float(line.entry.label.partition("= ")[2]), line) for line in table.lines if "= " in line.entry.label]
    level = next((line for line in table.lines if line.entry.label == "uniform weights"), None)
    if len(swept) < 2:
        return None
    name = swept[0][1].entry.label.partition(" =")[0]
    figure = Figure(figsize=(PAGE, 2.2))
    for i, (axes, column) in enumerate(zip(figure.subplots(1, 2), ("AVG", "STD"), strict=True)):
        at = np.array([x for x, _ in swept])
        mean = [line.ours[column][0] for _, line in swept]
        spread = [line.ours[column][1] or 0.0 for _, line in swept]
        axes.errorbar(at, mean, yerr=spread, fmt="o-", ms=3.5, color=palette.domain(i), label="ours")
        if level is not None:
            axes.axhline(level.ours[column][0], color="#777777", ls="--", lw=0.9, label="uniform weights")
        known = [(x, line.paper[column]) for x, line in swept if column in line.paper]
        if known and table.same_data:
            axes.plot(*zip(*known, strict=True), "x", color="black", ms=4, label="paper")
        axes.set_xlabel(name)
        axes.set_ylabel(f"{column}, {'%' if column == 'AVG' else 'points'}")
        axes.legend()
    return figure


def convergence(planned: Planned) -> Figure | None:
    """A panel a local method: AVG by round, alone and with FedHEAL; FedAvg's also with uniform weights."""
    from matplotlib.figure import Figure

    rows = found(planned)
    called = {str(row.summaries[0]["folder"]): row.method for row in rows}
    by_name = {one.method: one for one in series(rows)}
    labels = {entry.label: called[str(jobs[0].folder)] for entry, jobs in planned.rows}
    named = {label: by_name[name] for label, name in labels.items() if name in by_name}  # pooled, it is a bound
    panels = [name for name in LOCAL.values() if name in named and name + STAGES["fedheal"] in named]
    if not panels:
        return None
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(PAGE if across > 1 else COLUMN, 1.5 * down + 0.4))
    grid = figure.subplots(down, across, squeeze=False).ravel()
    shown = (("", palette.METHODS[0], "alone"), ("fedheal", palette.METHODS[1], "with FedHEAL"))
    for axes, name in zip(grid, panels, strict=False):
        for stage, colour, words in (*shown, ("uniform", palette.METHODS[9], "with uniform weights")):
            if name + STAGES[stage] in named:
                band(axes, named[name + STAGES[stage]], "AVG", colour, words)
        axes.set_title(name, fontsize=7)
        by_round(axes)
    for spare in grid[len(panels) :]:
        spare.set_visible(False)
    grid[0].set_ylabel("AVG, %")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure
