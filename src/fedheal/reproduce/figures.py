"""Figures that belong to a recipe: a sweep, or convergence with and without FedHEAL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedheal.report import palette
from fedheal.report.figures import COLUMN, PAGE, label_rounds, make_panels, plot_band
from fedheal.report.series import build_series
from fedheal.reproduce.paper_comparison import PaperComparison, load_rows
from fedheal.reproduce.plans import RecipePlan
from fedheal.reproduce.recipes import LOCAL, STAGES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_sweep(comparison: PaperComparison) -> Figure | None:
    """Draw AVG and STD against the swept value, with the paper's numbers as crosses and uniform weights as a line."""
    from matplotlib.figure import Figure

    points = [(float(x.recipe_row.label.partition("= ")[2]), x) for x in comparison.rows if "= " in x.recipe_row.label]
    control = next((x for x in comparison.rows if x.recipe_row.label == "uniform weights"), None)
    if len(points) < 2:
        return None
    figure = Figure(figsize=(PAGE, 2.2))
    for i, (axes, column) in enumerate(zip(figure.subplots(1, 2), ("AVG", "STD"), strict=True)):
        at = np.array([x for x, _ in points])
        cells = [row.ours[column] for _, row in points]
        mean, spread = [cell.mean for cell in cells], [cell.sd or 0.0 for cell in cells]
        axes.errorbar(at, mean, yerr=spread, fmt="o-", ms=3.5, color=palette.domain_colour(i), label="ours")
        if control is not None:
            axes.axhline(control.ours[column].mean, color="#777777", ls="--", lw=0.9, label="uniform weights")
        published = [(x, row.paper[column]) for x, row in points if column in row.paper]
        if published and comparison.has_same_data:
            axes.plot(*zip(*published, strict=True), "x", color="black", ms=4, label="paper")
        axes.set_xlabel(points[0][1].recipe_row.label.partition(" =")[0])
        axes.set_ylabel(f"{column}, {'%' if column == 'AVG' else 'points'}")
        axes.legend()
    return figure


def draw_convergence(plan: RecipePlan) -> Figure | None:
    """Draw AVG by round, one panel per local method: alone, with FedHEAL, and FedAvg also with uniform weights."""
    rows = load_rows(plan)
    method_by_folder = {row.folder: row.method for row in rows}
    series = {x.method: x for x in build_series(rows)}  # a row of pooled data is a bound and has none
    methods = {row.label: method_by_folder[str(jobs[0].folder)] for row, jobs in plan.rows}
    by_label = {label: series[method] for label, method in methods.items() if method in series}
    names = [name for name in LOCAL.values() if name in by_label and name + STAGES["fedheal"] in by_label]
    if not names:
        return None
    figure, panels = make_panels(len(names), 4, PAGE if len(names) > 1 else COLUMN, 1.5, 0.4)
    lines = (
        ("", palette.method_look("fedavg").colour, "alone"),
        ("fedheal", palette.method_look("fedheal").colour, "with FedHEAL"),
        ("uniform", palette.method_look("uniform").colour, "with uniform weights"),
    )
    for axes, name in zip(panels, names, strict=True):
        for stage, colour, label in lines:
            if name + STAGES[stage] in by_label:
                plot_band(axes, by_label[name + STAGES[stage]], "AVG", colour, label)
        axes.set_title(name, fontsize=7)
        label_rounds(axes)
    panels[0].set_ylabel("AVG, %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure
