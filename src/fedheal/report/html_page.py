"""One self-contained HTML page of results: tables, figures, settings, light and dark, for screen and paper.

Plotly's library is embedded in the page, compressed. The page unpacks it after showing its text and tables, and draws one
figure after another. All numbers are in one JSON element, rounded to what a figure can show.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from fedheal.analysis.domain_changes import is_supported
from fedheal.core.arrays import Floats
from fedheal.report import conclusions, palette, tables, variance_table
from fedheal.report.class_table import build_domain_tables
from fedheal.report.comparability import (
    check_reference,
    compare_settings,
    format_setting,
    list_cautions,
    list_seed_cautions,
)
from fedheal.report.rows import BOUNDS, FAIRNESS_COLUMNS, Row, collect_data_notes, group_by_data
from fedheal.report.series import Series, build_series, find_pareto_front, pick_evenly
from fedheal.version import __version__

MAX_ROUNDS = 200  # points of a curve
MAX_COLUMNS = 50  # rounds of the heat map
MAX_SENTENCES = 5  # of one kind, before the others are folded
MAX_LETTERS = 400  # of a sentence that is not folded


@dataclass(frozen=True)
class Section:
    """An extra section at the top of the page: a title, notes, and a table whose first row is its head."""

    title: str
    notes: Sequence[str]
    table: Sequence[Sequence[str]]


def render_page(
    rows: Sequence[Row], title: str = "", reference: str | None = None, sections: Sequence[Section] = ()
) -> str:
    """Return the HTML page for these rows."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    check_reference(rows, reference)
    groups = zip(tables.build_tables(rows), group_by_data(rows).values(), strict=True)
    sets = [_describe_data_set(table, group, reference) for table, group in groups]
    options: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FunctionLoader(_read_asset), undefined=StrictUndefined, **options)
    environment.filters["breakable"] = _make_breakable
    colours: dict[str, tuple[str, ...]] = {"domains": palette.DOMAINS, "domainsDark": palette.DOMAINS_DARK}
    colours |= {"phases": palette.PHASE_COLOURS, "phasesDark": palette.PHASE_COLOURS_DARK}
    numbers = {"sets": [data_set["figures"] for data_set in sets], "palette": colours}
    return environment.get_template("page.html").render(
        title=title or "How evenly are the domains served?",
        runs=sum(len(row.summaries) for row in rows),
        sets=sets,
        sections=sections,
        version=__version__,
        css=_read_asset("page.css"),
        script=_read_asset("page.js"),
        plotly=_compress_plotly(),
        numbers=json.dumps(numbers, separators=(",", ":"), allow_nan=False).replace(
            "<", "\\u003c"
        ),  # in a script element
    )


def _make_breakable(name: str) -> Any:
    """Return a method's name that may be wrapped before each of its parts."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([+:,])", r"<wbr>\1", str(escape(name))))


def _read_asset(name: str) -> str:
    return resources.files("fedheal.report").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _compress_plotly() -> str:
    from plotly.offline import get_plotlyjs

    # mtime=0: the same page from the same runs, byte for byte.
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def _describe_data_set(table: tables.ResultTable, rows: Sequence[Row], reference: str | None) -> dict[str, Any]:
    found = conclusions.analyse_rows(rows, reference)
    columns = (*FAIRNESS_COLUMNS, *rows[0].domains)  # a phone shows the first
    figures = _collect_figures(table, rows, found)
    return {
        "data": table.data,
        "about": table.about,
        "cautions": list_cautions(rows, reference) + list_seed_cautions(rows),
        "headline": conclusions.write_headline(found),
        "leaders": [(leader, conclusions.UNITS[leader.column]) for leader in conclusions.find_leaders(found)],
        "worst": conclusions.describe_worst(found) if found.metrics else "",
        "gains": _fold(conclusions.describe_gains(found)),
        "intervals": conclusions.explain_gains(found),
        "conclusions": _fold(conclusions.conclude_findings(found, rows)),
        "columns": columns,
        "rows": [(m, BOUNDS.get(m), [cells[column] for column in columns]) for m, cells in table.cells.items()],
        "components": _describe_components(rows, found.reference),
        "within": build_domain_tables(rows),
        "unit": table.unit,
        "seeds": {method: len(seeds) for method, seeds in table.seeds.items()},
        "several_seeds": any(len(seeds) > 1 for seeds in table.seeds.values()),
        "notes": collect_data_notes(summary for row in rows for summary in row.summaries),
        "copies": {"Markdown": tables.format_markdown(table), "LaTeX": tables.format_latex(table)}
        | {"CSV": tables.format_csv(rows)},
        "settings": compare_settings(rows),
        "facts": _list_facts(rows),
        "figures": figures,
        "drawn": _list_drawn(figures),
    }


def _describe_components(rows: Sequence[Row], reference: str) -> dict[str, Any]:
    """Return the table of variance components, if seeds are crossed, and notes on it."""
    lines = variance_table.decompose_rows(rows, reference)
    notes = variance_table.explain_components(rows, lines)
    if not lines:
        return {"notes": notes, "table": []}
    head, *body = variance_table.format_components(lines)
    titles = ["", *(line[0] for line in body)]
    table = [["" if line[0] == above else line[0], *line[1:]] for above, line in zip(titles, body, strict=False)]
    return {"title": variance_table.title_components(lines), "notes": notes, "table": [head, *table]}


def _list_drawn(figures: dict[str, Any]) -> set[str]:
    """Return the names of the figures that the runs have numbers for: the others are no part of the page."""
    methods = figures["methods"]
    has_numbers = {
        "scatter": len(methods) > 1,
        "differences": figures["differences"],
        "measure": any(m["rounds"] for m in methods),
        "weights": any(m["weights"] for m in methods),
        "layers": any(m["layers"]["names"] for m in methods),
        "consistency": any(m["consistency"] for m in methods),
        "classes": any(m["classes"] for m in methods),
        "seconds": any(any(m["seconds"].values()) for m in methods),
    }
    return {"domains", *(name for name, has_any in has_numbers.items() if has_any)}


def _fold(sentences: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split sentences into those shown at once and those folded away, since they are long or many."""
    visible = [sentence for sentence in sentences if len(sentence) <= MAX_LETTERS][:MAX_SENTENCES]
    return visible, [sentence for sentence in sentences if sentence not in visible]


def _collect_figures(table: tables.ResultTable, rows: Sequence[Row], found: conclusions.Findings) -> dict[str, Any]:
    # Bounds are groups of runs: they have dots, but no rounds.
    points = {m: (cells["AVG"].mean, cells["STD"].mean) for m, cells in table.cells.items() if m not in BOUNDS}
    domains = list(rows[0].domains)
    differences = [(c.metric.upper(), c) for c in found.metrics] + [(c.metric, c) for c in found.domains]
    return {
        "domains": domains,
        "reference": found.reference,
        "looks": {m: palette.method_look(m)._asdict() for m in table.cells},
        "rows": [
            {
                "method": m,
                "mean": {column: _round(cell.mean) for column, cell in cells.items()},
                "sd": {column: _round(cells[column].sd or 0.0) for column in FAIRNESS_COLUMNS},
                "error": {domain: _round(table.get_error(m, domain)) for domain in domains},
            }
            for m, cells in table.cells.items()
        ],
        "differences": [
            {"method": c.a, "row": row, "mean": _round(c.mean), "supported": is_supported(c, conclusions.ALPHA)}
            | ({} if c.low is None or c.high is None else {"low": _round(c.low), "high": _round(c.high)})
            for row, c in differences
        ],
        "classes": [format_setting(name) for name in rows[0].summaries[0].get("classes", [])],
        "front": find_pareto_front(points),
        "methods": [_collect_curves(series) for series in build_series(rows)],
    }


def _collect_curves(series: Series) -> dict[str, Any]:
    at = pick_evenly(len(series.rounds), MAX_ROUNDS)
    every = pick_evenly(len(series.all_rounds), MAX_ROUNDS)
    columns = pick_evenly(len(series.all_rounds), MAX_COLUMNS)
    return {
        "name": series.method,
        "rounds": _round_all(series.rounds[at], 0),
        "curves": {
            name: [_round_all(band.mean[at]), _round_all(band.error[at]) if band.error.any() else []]
            for name, band in series.curves.items()
        },
        "every": _round_all(series.all_rounds[every], 0),
        "weights": {domain: _round_all(values[every], 4) for domain, values in series.weights.items()},
        "layers": {
            "names": list(series.kept_by_tensor),
            "rounds": _round_all(series.all_rounds[columns], 0),
            "kept": [_round_all(values[columns], 3) for values in series.kept_by_tensor.values()],
        },
        "consistency": {domain: _round_all(shares, 4) for domain, shares in series.consistency.items()},
        "classes": {domain: counts.astype(int).tolist() for domain, counts in series.by_class.items()},
        "seconds": {phase: _round(seconds, 3) for phase, seconds in series.seconds.items()},
    }


def _round_all(values: Floats, digits: int = 2) -> list[float | int | None]:
    return [_round(x, digits) for x in np.asarray(values, np.float64).tolist()]


def _round(number: float, digits: int = 2) -> float | int | None:
    """Return a number with as few characters as the figure needs; None if it is not finite."""
    if not math.isfinite(number):
        return None
    rounded = round(number, digits)
    return int(rounded) if rounded == int(rounded) else rounded


def _list_facts(rows: Sequence[Row]) -> dict[str, str]:
    summaries = [summary for row in rows for summary in row.summaries]

    def join_pairs(key: str) -> Iterable[str]:
        return (", ".join(f"{name} {x}" for name, x in summary.get(key, {}).items()) for summary in summaries)

    def format_bytes(key: str) -> Iterable[str]:
        return (f"{summary[key] / 1e6:,.1f} MB a run" for summary in summaries if summary.get(key))

    facts: dict[str, Iterable[Any]] = {
        "about the data": collect_data_notes(summaries),
        "data fingerprint": (summary.get("data_fingerprint") for summary in summaries),
        **{key: [summary.get(key) for summary in summaries] for key in ("device", "precision", "threads")},
        "test images": join_pairs("test_sizes"),
        "versions": join_pairs("versions"),
        "sent to clients": format_bytes("bytes_sent"),
        "received from clients": format_bytes("bytes_received"),
    }
    texts = {name: "; ".join(dict.fromkeys(format_setting(v) for v in values if v)) for name, values in facts.items()}
    return {name: text for name, text in texts.items() if text}
