"""Figures for a paper: one or two columns wide, eight-point type, vectors or 300 dots per inch."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedheal.analysis.domain_changes import is_supported
from fedheal.analysis.paired_tests import HIGHER_IS_BETTER
from fedheal.core.clock import PHASES
from fedheal.report import palette
from fedheal.report.comparability import check_reference, choose_reference
from fedheal.report.conclusions import ALPHA, METRICS, Findings, analyse_rows
from fedheal.report.figure_text import PLAIN_TEXT, escape_figure, find_figure_families, measure_name, shorten_name
from fedheal.report.rows import BOUNDS, Row, group_by_data
from fedheal.report.series import Series, build_series, find_pareto_front
from fedheal.report.tables import ResultTable, build_tables
from fedheal.runs.folder import make_folder, write_bytes

if TYPE_CHECKING:  # matplotlib takes a second to load
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.35, 6.9  # inches: one column of a two-column paper, and both
FORMATS: dict[str, Any] = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
    "png": {},
}  # with metadata without a date
STYLE: Any = {
    "font.size": 8, "font.family": "sans-serif", "axes.titlesize": 8, "axes.labelsize": 8, "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6, "axes.axisbelow": True,
    "axes.grid": True, "grid.color": "#E6E6E6", "grid.linewidth": 0.5,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "legend.fontsize": 7, "legend.frameon": False, "legend.handlelength": 1.4,
    "lines.linewidth": 1.2, "errorbar.capsize": 1.5, "figure.constrained_layout.use": True, "savefig.dpi": 300,
    "pdf.fonttype": 42, "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fedheal",  # the same runs give the same bytes
    **PLAIN_TEXT,
}  # fmt: skip


@dataclass(frozen=True)
class FigureData:
    """The numbers of one data set that figures show."""

    table: ResultTable
    domains: tuple[str, ...]
    series: Sequence[Series]
    reference: str
    findings: Findings


def write_figures(rows: Sequence[Row], folder: Path, reference: str | None = None) -> list[Path]:
    """Write every figure that the rows have numbers for, in every format, and return the files."""
    check_reference(rows, reference)
    groups = group_by_data(rows)
    files = []
    for table, group in zip(build_tables(rows), groups.values(), strict=True):
        chosen = choose_reference(group, reference)
        data = FigureData(
            table, tuple(group[0].domains), build_series(group), chosen, findings=analyse_rows(group, chosen)
        )
        prefix = re.sub(r"[^\w-]+", "_", table.data) + "-" if len(groups) > 1 else ""
        for name, draw in FIGURES.items():
            files += save_figure(folder / f"{prefix}{name}", partial(draw, data))
    return files


def save_figure(path: Path, draw: Callable[[], Figure | None]) -> list[Path]:
    """Write a figure under `path` with the ending of every format; do nothing if `draw` returns None."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = draw()
        if figure is None:
            return []
        families = find_figure_families(figure)
        if len(families) > 1:
            matplotlib.rcParams["font.family"] = families
            figure = draw() or figure
        escape_figure(figure, families)
        make_folder(path.parent)
        files = {form: path.with_name(f"{path.name}.{form}") for form in FORMATS}
        for form, file in files.items():
            drawn = io.BytesIO()
            figure.savefig(drawn, format=form, metadata=FORMATS[form])
            write_bytes(file, drawn.getvalue())
    return list(files.values())


def draw_domains(data: FigureData) -> Figure | None:
    """Draw accuracy by domain, one row of dots per domain and one colour per method, with one standard error."""
    methods, table = list(data.table.cells), data.table
    step = 0.8 / len(methods)
    figure, (axes,) = make_panels(1, 1, COLUMN, 0.75 + len(data.domains) * max(0.3, 0.1 * len(methods)))
    at = np.arange(len(data.domains))
    for k, method in enumerate(methods):
        look, place = palette.method_look(method), at - 0.4 + (k + 0.5) * step
        mean = [table.cells[method][domain].mean for domain in data.domains]
        error = [table.get_error(method, domain) for domain in data.domains]
        style: dict[str, Any] = {"fmt": look.marker, "ms": 3.5, "color": look.colour, "lw": 0.7, "capsize": 0}
        axes.errorbar(mean, place, xerr=error, label=method, **style)
    axes.hlines(at[:-1] + 0.5, 0, 1, transform=axes.get_yaxis_transform(), color="#E6E6E6", lw=0.5)
    axes.set_yticks(at, [shorten_name(domain) for domain in data.domains])
    axes.set_ylim(-0.5, len(at) - 0.5)
    axes.set_xlabel("accuracy, %")
    _format_rows(axes)
    _add_method_legend(figure, axes)
    return figure


def draw_spread(data: FigureData) -> Figure | None:
    """Draw AVG against STD; a line joins the methods that no other beats in both."""
    points = {m: (x["AVG"].mean, x["STD"].mean) for m, x in data.table.cells.items() if m not in BOUNDS}
    if len(points) < 2:
        return None
    front = find_pareto_front(points)
    figure, (axes,) = make_panels(1, 1, COLUMN, 2.4)
    axes.plot([points[m][1] for m in front], [points[m][0] for m in front], ":", color="#999999", zorder=0)
    for method in points:
        cells, look = data.table.cells[method], palette.method_look(method)
        x, y, fill = cells["STD"], cells["AVG"], look.colour if method in front else "white"
        style: dict[str, Any] = {"fmt": look.marker, "ms": 5, "mfc": fill, "color": look.colour, "lw": 0.7}
        axes.errorbar(x.mean, y.mean, xerr=x.sd, yerr=y.sd, label=method, **style)
    axes.set_xlabel("STD over domains, points")
    axes.set_ylabel("AVG, %")
    _add_method_legend(figure, axes)
    return figure


def draw_differences(data: FigureData) -> Figure | None:
    """Draw the differences of AVG and STD to the reference.

    There is a dot per seed, and the mean with its interval, filled if a test shows a difference.
    """
    found = data.findings
    methods = list(dict.fromkeys(c.a for c in found.metrics))
    if not methods:
        return None
    figure, panels = make_panels(len(METRICS), len(METRICS), PAGE, 0.85 + 0.3 * len(methods))
    for axes, metric in zip(panels, METRICS, strict=True):
        axes.axvline(0, color="#999999", lw=0.8)
        for c in (c for c in found.metrics if c.metric == metric):
            at, colour = methods.index(c.a), palette.method_look(c.a).colour
            of_method, of_reference = (
                {row.seeds: row.fairness[metric] for row in found.rows if row.method == name} for name in (c.a, c.b)
            )
            dots = [value - of_reference[seeds] for seeds, value in of_method.items() if seeds in of_reference]
            axes.plot(dots, [at + 0.22] * len(dots), "|", ms=5, color=colour, alpha=0.6)
            ends = [[0.0], [0.0]] if c.low is None or c.high is None else [[c.mean - c.low], [c.high - c.mean]]
            fill = colour if is_supported(c, ALPHA) else "white"
            axes.errorbar([c.mean], [at], xerr=ends, fmt="o", ms=5, color=colour, mfc=fill, lw=1.2)
        axes.set_yticks(range(len(methods)), methods if axes is panels[0] else [""] * len(methods))
        axes.set_ylim(-0.5, len(methods) - 0.5)
        axes.set_title(f"{metric.upper()}, {'more' if HIGHER_IS_BETTER[metric] else 'less'} is better")
        _format_rows(axes)
    figure.supxlabel(f"difference to {data.reference}, points", fontsize=STYLE["axes.labelsize"])
    return figure


def draw_rounds(data: FigureData) -> Figure | None:
    """Draw AVG and STD by round, one line per method."""
    drawable = [series for series in data.series if len(series.rounds) > 1]
    if not drawable:
        return None
    figure, panels = make_panels(2, 2, PAGE, 2.3)
    for axes, measure in zip(panels, ("AVG", "STD"), strict=True):
        for series in drawable:
            look = palette.method_look(series.method)
            dash = look.dash if look.dash in ("solid", "dashdot") else {"dot": ":"}.get(look.dash, "--")
            plot_band(axes, series, measure, look.colour, series.method, dash)
        label_rounds(axes)
        axes.set_ylabel(f"{measure}, {'%' if measure == 'AVG' else 'points'}")
    _add_method_legend(figure, axes)
    return figure


def draw_curves(data: FigureData) -> Figure | None:
    """Draw accuracy by round: one panel per method, one line per domain."""
    drawable = [series for series in data.series if len(series.rounds) > 1]
    figure, panels = _make_method_panels(drawable)
    for axes, series in panels:
        for i, domain in enumerate(data.domains):
            plot_band(axes, series, domain, palette.domain_colour(i), domain)
        _label_panel(axes, series.method, "accuracy, %")
    return _add_domain_legend(figure, data)


def draw_weights(data: FigureData) -> Figure | None:
    """Draw the share of the weight by domain and round, one panel per method."""
    drawable = [series for series in data.series if series.weights and len(series.all_rounds) > 1]
    figure, panels = _make_method_panels(drawable)
    colours = [palette.domain_colour(i) for i in range(len(data.domains))]
    for axes, series in panels:
        rounds = series.all_rounds
        stack = [np.nan_to_num(series.weights.get(domain, np.zeros_like(rounds))) for domain in data.domains]
        axes.stackplot(rounds, *stack, colors=colours, labels=data.domains, alpha=0.75, lw=0)
        axes.set_ylim(0, 1)
        axes.set_xlim(rounds[0], rounds[-1])
        _label_panel(axes, series.method, "share of weight")
    return _add_domain_legend(figure, data)


def draw_kept(data: FigureData) -> Figure | None:
    """Draw the kept fraction of the updates by layer and round, one panel per method that masks."""
    drawable = [series for series in data.series if series.kept_by_tensor and len(series.all_rounds) > 1]
    if not drawable:
        return None
    lowest = min(float(np.nanmin(values)) for series in drawable for values in series.kept_by_tensor.values())
    layers = max(len(series.kept_by_tensor) for series in drawable)
    figure, panels = _make_method_panels(drawable, columns=2, height=0.7 + 0.11 * layers)
    image = None
    for axes, series in panels:
        grid = np.array(list(series.kept_by_tensor.values()))
        extent = (series.all_rounds[0] - 0.5, series.all_rounds[-1] + 0.5, len(grid) - 0.5, -0.5)
        image = axes.imshow(grid, aspect="auto", cmap="viridis", extent=extent, interpolation="none")
        image.set_clim(min(0.8, np.floor(lowest * 10) / 10), 1.0)
        axes.set_yticks(range(len(grid)), list(series.kept_by_tensor), fontsize=5.5)
        axes.grid(visible=False)
        _label_panel(axes, series.method, "")
    if figure is not None and image is not None:
        figure.colorbar(image, ax=figure.axes, label="share kept", fraction=0.04, pad=0.02)
    return figure


def draw_consistency(data: FigureData) -> Figure | None:
    """Draw histograms of parameters by the consistency of their updates, one panel per method that records it."""
    figure, panels = _make_method_panels([series for series in data.series if series.consistency])
    for axes, series in panels:
        bins = len(next(iter(series.consistency.values())))
        edges = np.linspace(50, 100, bins + 1)
        width = (edges[1] - edges[0]) * 0.9 / max(len(series.consistency), 1)
        for k, domain in enumerate(series.consistency):
            place = edges[:-1] + (k + 0.5) * width + 0.05 * (edges[1] - edges[0])
            colour = palette.domain_colour(data.domains.index(domain))
            axes.bar(place, 100 * series.consistency[domain], width, color=colour, label=domain)
        _label_panel(axes, series.method, "% of parameters")
        axes.set_xlim(49, 101)
        axes.set_xlabel("same direction, % of rounds")
    return _add_domain_legend(figure, data)


def draw_time(data: FigureData) -> Figure | None:
    """Draw the seconds per run by phase."""
    drawable = [series for series in data.series if any(series.seconds.values())]
    if not drawable:
        return None
    figure, (axes,) = make_panels(1, 1, COLUMN, 0.8 + 0.17 * len(drawable))
    methods = [series.method for series in drawable]
    left = np.zeros(len(drawable))
    for phase, colour in zip(PHASES, palette.PHASE_COLOURS, strict=True):
        seconds = np.array([series.seconds.get(phase, 0.0) for series in drawable])
        axes.barh(range(len(methods)), seconds, 0.65, left=left, color=colour, label=phase)
        left += seconds
    axes.set_yticks(range(len(methods)), methods)
    axes.set_xlabel("seconds")
    _format_rows(axes)
    figure.legend(loc="outside upper center", ncols=len(PHASES))
    return figure


FIGURES: dict[str, Callable[[FigureData], Figure | None]] = {
    "domains": draw_domains, "spread": draw_spread, "differences": draw_differences, "rounds": draw_rounds,
    "curves": draw_curves, "weights": draw_weights, "kept": draw_kept, "consistency": draw_consistency, "time": draw_time,
}  # fmt: skip


def make_panels(
    count: int, columns: int, width: float, row_height: float, margin: float = 0
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels in at most `columns` columns."""
    from matplotlib.figure import Figure

    across = min(count, columns)
    down = -(-count // across)
    figure = Figure(figsize=(width, row_height * down + margin))
    grid = list(figure.subplots(down, across, squeeze=False).ravel())
    for spare in grid[count:]:
        spare.set_visible(False)
    return figure, grid[:count]


def _make_method_panels(
    drawable: Sequence[Series], columns: int = 4, height: float = 1.45
) -> tuple[Figure | None, Iterator[tuple[Axes, Series]]]:
    """Return a figure with a panel for each series, and the pairs of panel and series."""
    if not drawable:
        return None, iter(())
    across = min(len(drawable), columns)
    width = {1: COLUMN, 2: min(PAGE, 2 * COLUMN)}.get(across, PAGE)
    figure, panels = make_panels(len(drawable), columns, width, height if across > 1 else max(height, 2.0), 0.3)
    return figure, zip(panels, drawable, strict=True)


def label_rounds(axes: Axes) -> None:
    """Label the axis of rounds, with ticks at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def plot_band(axes: Axes, series: Series, name: str, colour: str, label: str, dash: str = "-") -> None:
    """Draw a line by round, and one standard error around it (seeds and test images)."""
    band = series.curves[name]
    axes.plot(series.rounds, band.mean, linestyle=dash, color=colour, label=label)
    axes.fill_between(series.rounds, band.mean - band.error, band.mean + band.error, color=colour, alpha=0.15, lw=0)


def _format_rows(axes: Axes) -> None:
    """Format a figure with one row per method, the first on top."""
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def _label_panel(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, fontsize=7 if len(title) < 26 else 5.5)
    label_rounds(axes)
    place = axes.get_subplotspec()
    if place is None or place.is_first_col():
        axes.set_ylabel(label)


def _add_domain_legend(figure: Figure | None, data: FigureData) -> Figure | None:
    if figure is not None:
        from matplotlib.patches import Patch

        patches = [Patch(color=palette.domain_colour(i)) for i in range(len(data.domains))]
        add_legend(figure, patches, [shorten_name(domain) for domain in data.domains], "upper", handlelength=1)
    return figure


def _add_method_legend(figure: Figure, axes: Axes) -> None:
    """Add a legend of the methods below the axes."""
    add_legend(figure, *axes.get_legend_handles_labels())


def add_legend(
    figure: Figure,
    handles: Sequence[Artist],
    labels: Sequence[str],
    side: Literal["lower", "upper"] = "lower",
    **look: Any,
) -> None:
    """Add a legend outside the axes in as many columns as fit, and make the figure higher by its lines."""
    letters = 105 if figure.get_figwidth() > COLUMN else 50
    columns = max(1, min(len(labels), letters // (max(map(measure_name, labels)) + 6)))
    figure.set_figheight(figure.get_figheight() + 0.14 * (-(-len(labels) // columns) - 1))
    # Labels are given here, since matplotlib leaves out an artist whose own label begins with "_".
    place: Any = f"outside {side} center"
    figure.legend(handles, labels, loc=place, ncols=columns, **look)
