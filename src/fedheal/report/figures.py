"""The page's figures for a paper: one or two columns wide, eight-point type, vectors or 300 dots an inch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedheal.report import palette, tables
from fedheal.report.conclusions import check_reference, chosen_reference
from fedheal.report.rows import BOUNDS, Row, by_data
from fedheal.report.series import PHASES, Series, pareto, series
from fedheal.runs.folder import make_folder

if TYPE_CHECKING:  # matplotlib takes a second to load: only those who draw wait for it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.35, 6.9  # inches: one column of a two-column paper, and both
FORMATS = ("svg", "pdf", "png")
STYLE: Any = {
    "font.size": 8,
    "font.family": "sans-serif",
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "lines.linewidth": 1.2,
    "errorbar.capsize": 1.5,
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "none",
    "svg.hashsalt": "fedheal",  # the same file from the same runs
    "savefig.dpi": 300,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Shown:
    """What a data set's figures are drawn from."""

    table: tables.Table
    domains: tuple[str, ...]
    series: Sequence[Series]
    reference: str

    @property
    def methods(self) -> list[str]:
        return [method for method in self.table.cells if method not in BOUNDS]


def write(rows: Sequence[Row], folder: Path, reference: str | None = None) -> list[Path]:
    """Every figure there is something to draw for, in every format; the files' names say which."""
    check_reference(rows, reference)
    groups = by_data(rows)
    written = []
    for table in tables.tables(rows):
        own = groups[table.data]
        shown = Shown(table, tuple(own[0].domains), series(own), chosen_reference(own, reference))
        prefix = re.sub(r"[^A-Za-z0-9-]+", "_", table.data) + "-" if len(groups) > 1 else ""
        for name, draw in FIGURES.items():
            written += saved(folder / f"{prefix}{name}", partial(draw, shown))
    return written


def saved(path: Path, draw: Callable[[], Figure | None]) -> list[Path]:
    """A figure in the style of this module under `path` with every format's ending; nothing where there is nothing to draw."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = draw()
        if figure is None:
            return []
        make_folder(path.parent)
        files = [path.with_name(f"{path.name}.{form}") for form in FORMATS]
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
        for file, form in zip(files, FORMATS, strict=True):
            figure.savefig(file, format=form, metadata=undated[form])
    return files


def blank(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


def domains(shown: Shown) -> Figure | None:
    """Accuracy by domain: a bar a domain, a group a method; with many methods dots on a line from worst to best."""
    methods = list(shown.table.cells)
    many = len(methods) > 6
    figure, axes = blank(PAGE if many else COLUMN, 0.7 + len(methods) * (0.17 if many else 0.34))
    at = np.arange(len(methods))
    for i, domain in enumerate(shown.domains):
        cells = [shown.table.cells[method][domain] for method in methods]
        mean, sd = [cell.mean for cell in cells], [cell.sd or 0.0 for cell in cells]
        if many:
            axes.errorbar(mean, at, xerr=sd, fmt="o", ms=4, color=palette.domain(i), lw=0.7, capsize=0, label=domain)
        else:
            height = 0.8 / len(shown.domains)
            place = at - 0.4 + (i + 0.5) * height
            error = {"lw": 0.6, "ecolor": "#444444"}
            axes.barh(place, mean, height * 0.94, xerr=sd, color=palette.domain(i), label=domain, error_kw=error)
    if many:
        ends = np.array([[shown.table.cells[m][d].mean for d in shown.domains] for m in methods])
        axes.hlines(at, ends.min(axis=1), ends.max(axis=1), color="#CCCCCC", lw=2, zorder=0)
    axes.set_yticks(at, methods)
    axes.invert_yaxis()
    axes.set_xlabel("accuracy, %")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper center", ncols=len(shown.domains))
    return figure


def spread(shown: Shown) -> Figure | None:
    """AVG against STD, with the methods that no other beats in both joined by a line."""
    points = {m: (shown.table.cells[m]["AVG"].mean, shown.table.cells[m]["STD"].mean) for m in shown.methods}
    if len(points) < 2:
        return None
    front = pareto(points)
    figure, axes = blank(COLUMN, 2.4)
    axes.plot([points[m][1] for m in front], [points[m][0] for m in front], ":", color="#999999", zorder=0)
    for i, method in enumerate(points):
        cells, filled = shown.table.cells[method], method in front
        axes.errorbar(
            cells["STD"].mean,
            cells["AVG"].mean,
            xerr=cells["STD"].sd,
            yerr=cells["AVG"].sd,
            fmt="o" if i < len(palette.METHODS) else "s",
            ms=5,
            mfc=palette.method(i) if filled else "white",
            color=palette.method(i),
            lw=0.7,
            label=method,
        )
    axes.set_xlabel("STD over domains, points")
    axes.set_ylabel("AVG, %")
    _legend(figure, axes)
    return figure


def rounds(shown: Shown) -> Figure | None:
    """AVG and STD by round, a line a method."""
    found = [one for one in shown.series if len(one.rounds) > 1]
    if not found:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(PAGE, 2.3))
    for axes, measure in zip(figure.subplots(1, 2), ("AVG", "STD"), strict=True):
        for i, one in enumerate(found):
            dash = "--" if one.method == shown.reference else "-"
            band(axes, one, measure, palette.method(i), one.method, dash)
        by_round(axes)
        axes.set_ylabel(f"{measure}, {'%' if measure == 'AVG' else 'points'}")
    _legend(figure, axes)
    return figure


def curves(shown: Shown) -> Figure | None:
    """Accuracy by round: a panel a method, a line a domain."""
    found = [one for one in shown.series if len(one.rounds) > 1]
    figure, panels = _panels(found)
    for axes, one in panels:
        for i, domain in enumerate(shown.domains):
            band(axes, one, domain, palette.domain(i), domain)
        _named(axes, one.method, "accuracy, %")
    return _shared_legend(figure, shown)


def weights(shown: Shown) -> Figure | None:
    """Share of the weight by domain and round: a panel a method."""
    found = [one for one in shown.series if one.weights and len(one.all_rounds) > 1]
    figure, panels = _panels(found)
    for axes, one in panels:
        stacked = [np.nan_to_num(one.weights.get(domain, np.zeros_like(one.all_rounds))) for domain in shown.domains]
        colours = [palette.domain(i) for i in range(len(shown.domains))]
        axes.stackplot(one.all_rounds, *stacked, colors=colours, labels=shown.domains, alpha=0.75, lw=0)
        axes.set_ylim(0, 1)
        axes.set_xlim(one.all_rounds[0], one.all_rounds[-1])
        _named(axes, one.method, "share of weight")
    return _shared_legend(figure, shown)


def kept(shown: Shown) -> Figure | None:
    """Kept share of the entries by layer and round: a panel a method that masks."""
    found = [one for one in shown.series if one.kept_by_tensor and len(one.all_rounds) > 1]
    if not found:
        return None
    least = min(float(np.nanmin(values)) for one in found for values in one.kept_by_tensor.values())
    layers = max(len(one.kept_by_tensor) for one in found)
    figure, panels = _panels(found, columns=2, height=0.7 + 0.11 * layers)
    drawn = None
    for axes, one in panels:
        grid = np.array(list(one.kept_by_tensor.values()))
        extent = (one.all_rounds[0] - 0.5, one.all_rounds[-1] + 0.5, len(grid) - 0.5, -0.5)
        drawn = axes.imshow(grid, aspect="auto", cmap="viridis", extent=extent, interpolation="none")
        drawn.set_clim(min(0.8, np.floor(least * 10) / 10), 1.0)
        axes.set_yticks(range(len(grid)), list(one.kept_by_tensor), fontsize=5.5)
        axes.grid(visible=False)
        _named(axes, one.method, "")
    if figure is not None and drawn is not None:
        figure.colorbar(drawn, ax=figure.axes, label="share kept", fraction=0.04, pad=0.02)
    return figure


def consistency(shown: Shown) -> Figure | None:
    """Parameters by how consistently their updates pointed the same way: a panel a method with such a history."""
    found = [one for one in shown.series if one.consistency]
    figure, panels = _panels(found)
    for axes, one in panels:
        bins = len(next(iter(one.consistency.values())))
        edges = np.linspace(50, 100, bins + 1)
        width = (edges[1] - edges[0]) * 0.9 / max(len(one.consistency), 1)
        for k, domain in enumerate(one.consistency):
            i = shown.domains.index(domain)
            place = edges[:-1] + (k + 0.5) * width + 0.05 * (edges[1] - edges[0])
            axes.bar(place, 100 * one.consistency[domain], width, color=palette.domain(i), label=domain)
        _named(axes, one.method, "% of parameters")
        axes.set_xlim(49, 101)
        axes.set_xlabel("same direction, % of rounds")
    return _shared_legend(figure, shown)


def time(shown: Shown) -> Figure | None:
    """Seconds a run by phase."""
    found = [one for one in shown.series if any(one.seconds.values())]
    if not found:
        return None
    figure, axes = blank(COLUMN, 0.8 + 0.17 * len(found))
    left = np.zeros(len(found))
    for i, phase in enumerate(PHASES):
        seconds = np.array([one.seconds.get(phase, 0.0) for one in found])
        axes.barh(
            [one.method for one in found], seconds, 0.65, left=left, color=palette.METHODS[(3, 1, 5)[i]], label=phase
        )
        left += seconds
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds")
    figure.legend(loc="outside upper center", ncols=len(PHASES))
    return figure


FIGURES: dict[str, Callable[[Shown], Figure | None]] = {
    "domains": domains,
    "spread": spread,
    "rounds": rounds,
    "curves": curves,
    "weights": weights,
    "kept": kept,
    "consistency": consistency,
    "time": time,
}


def _panels(
    found: Sequence[Series], columns: int = 4, height: float = 1.45
) -> tuple[Figure | None, Iterator[tuple[Axes, Series]]]:
    """A figure with a panel for each of these, as few columns as will do."""
    from matplotlib.figure import Figure

    if not found:
        return None, iter(())
    across = min(len(found), columns)
    down = -(-len(found) // across)
    width = {1: COLUMN, 2: min(PAGE, 2 * COLUMN)}.get(across, PAGE)
    figure = Figure(figsize=(width, (height if across > 1 else max(height, 2.0)) * down + 0.3))
    grid = figure.subplots(down, across, squeeze=False, sharex=False).ravel()
    for spare in grid[len(found) :]:
        spare.set_visible(False)
    return figure, zip(grid, found, strict=False)


def by_round(axes: Axes) -> None:
    """The axis of rounds, which are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def band(axes: Axes, one: Series, name: str, colour: str, label: str, dash: str = "-") -> None:
    """A line by round, and one standard deviation around it where there are several seeds."""
    found = one.curves[name]
    axes.plot(one.rounds, found.mean, dash, color=colour, label=label)
    if found.sd.any():
        axes.fill_between(one.rounds, found.mean - found.sd, found.mean + found.sd, color=colour, alpha=0.15, lw=0)


def _named(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, fontsize=7 if len(title) < 26 else 5.5)
    by_round(axes)
    first = axes.get_subplotspec()
    if first is None or first.is_first_col():
        axes.set_ylabel(label)


def _shared_legend(figure: Figure | None, shown: Shown) -> Figure | None:
    if figure is not None:
        from matplotlib.patches import Patch

        patches = [Patch(color=palette.domain(i), label=domain) for i, domain in enumerate(shown.domains)]
        figure.legend(handles=patches, loc="outside upper center", ncols=len(shown.domains), handlelength=1)
    return figure


def _legend(figure: Figure, axes: Axes) -> None:
    """Below the axes, with room of its own."""
    handles, labels = axes.get_legend_handles_labels()
    letters = 105 if figure.get_figwidth() > COLUMN else 50
    columns = max(1, letters // (max(map(len, labels)) + 6))
    figure.set_figheight(figure.get_figheight() + 0.14 * (-(-len(labels) // columns) - 1))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
