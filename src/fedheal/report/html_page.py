"""One HTML page of results that needs nothing beside itself: tables, figures, settings, light and dark, for screen and paper.

Plotly's library travels in the page, compressed; the page unpacks it after its text and tables stand, and draws a figure when
it comes into view. All numbers are in one JSON element, rounded to what a figure can show.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from fedheal.report import comparability as alike
from fedheal.report import conclusions, palette, tables
from fedheal.report.comparability import shown
from fedheal.report.rows import BOUNDS, Row, by_data, data_notes
from fedheal.report.series import Floats, Series, pareto, series, thinned
from fedheal.version import __version__

MOST_ROUNDS = 200  # points of a curve
MOST_COLUMNS = 50  # rounds of the heat map
MOST_SENTENCES = 5  # of one kind, before the rest is folded away
MOST_LETTERS = 400


@dataclass(frozen=True)
class Extra:
    """A section of one's own before the others: a title, what to know, and a table whose first row is its head."""

    title: str
    notes: Sequence[str]
    table: Sequence[Sequence[str]]


def page(rows: Sequence[Row], title: str = "", reference: str | None = None, extras: Sequence[Extra] = ()) -> str:
    """The page for these rows."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    conclusions.check_reference(rows, reference)
    groups = by_data(rows)
    sets = [_set(table, groups[table.data], reference) for table in tables.tables(rows)]
    environment = Environment(
        loader=FunctionLoader(asset), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters["breakable"] = _breakable
    runs = sum(len(row.summaries) for row in rows)
    return environment.get_template("page.html").render(
        title=title or "How evenly are the domains served?",
        runs=runs,
        sets=sets,
        extras=extras,
        version=__version__,
        css=asset("page.css"),
        script=asset("page.js"),
        plotly=_plotly(),
        numbers=_json({"sets": [one["figures"] for one in sets], "palette": _palette()}),
    )


def _breakable(name: str) -> Any:
    """A method's name that may go on in the next line before each of its parts."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([+:,])", r"<wbr>\1", str(escape(name))))


def asset(name: str) -> str:
    return resources.files("fedheal.report").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    # mtime=0: the same page from the same runs, byte for byte.
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def _json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _palette() -> dict[str, Sequence[str]]:
    return {
        "domains": palette.DOMAINS,
        "domainsDark": palette.DOMAINS_DARK,
        "methods": palette.METHODS,
        "methodsDark": palette.METHODS_DARK,
    }


def _set(table: tables.Table, rows: Sequence[Row], reference: str | None) -> dict[str, Any]:
    """All that one data set's sections show."""
    return {
        "data": table.data,
        "about": table.about,
        "cautions": conclusions.cautions(rows, reference),
        "headline": conclusions.headline(rows, reference),
        "gains": _folded(conclusions.gains(rows, reference)),
        "sentences": _folded(conclusions.sentences(rows, reference)),
        "columns": table.columns,
        "rows": [
            {
                "method": method,
                "bound": BOUNDS.get(method, ""),
                "seeds": len(table.seeds[method]),
                "cells": list(cells.values()),
            }
            for method, cells in table.cells.items()
        ],
        "notes": data_notes(summary for row in rows for summary in row.summaries),
        "copies": {"Markdown": tables.markdown(table), "LaTeX": tables.latex(table), "CSV": tables.csv_text(rows)},
        "settings": alike.settings(rows),
        "facts": _facts(rows),
        "figures": _figures(table, rows, conclusions.chosen_reference(rows, reference)),
    }


def _folded(sentences: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is shown at once, and what only those who ask for it see: the list goes on, or a sentence is long."""
    short = [sentence for sentence in sentences if len(sentence) <= MOST_LETTERS][:MOST_SENTENCES]
    return short, [sentence for sentence in sentences if sentence not in short]


def _figures(table: tables.Table, rows: Sequence[Row], reference: str) -> dict[str, Any]:
    found = series(rows)
    methods = {
        method: cells for method, cells in table.cells.items() if method not in BOUNDS
    }  # bounds are groups of runs: they have no rounds, but do have bars
    points = {method: (cells["AVG"].mean, cells["STD"].mean) for method, cells in methods.items()}
    return {
        "data": table.data,
        "domains": list(rows[0].domains),
        "reference": reference,
        "bars": [
            {
                "method": method,
                "mean": [_short(cell.mean) for cell in cells.values()],
                "sd": [_short(cell.sd or 0.0) for cell in cells.values()],
            }
            for method, cells in table.cells.items()
        ],
        "columns": list(table.columns),
        "front": pareto(points),
        "methods": [_curves(one) for one in found],
    }


def _curves(one: Series) -> dict[str, Any]:
    at = thinned(len(one.rounds), MOST_ROUNDS)
    every = thinned(len(one.all_rounds), MOST_ROUNDS)
    columns = thinned(len(one.all_rounds), MOST_COLUMNS)
    return {
        "name": one.method,
        "seeds": one.seeds,
        "rounds": _list(one.rounds[at], 0),
        "curves": {
            name: [_list(band.mean[at]), _list(band.sd[at]) if band.sd.any() else []]
            for name, band in one.curves.items()
        },
        "every": _list(one.all_rounds[every], 0),
        "weights": {domain: _list(values[every], 4) for domain, values in one.weights.items()},
        "kept": {domain: _list(values[every], 3) for domain, values in one.kept.items()},
        "layers": {
            "names": list(one.kept_by_tensor),
            "rounds": _list(one.all_rounds[columns], 0),
            "kept": [_list(values[columns], 3) for values in one.kept_by_tensor.values()],
        },
        "consistency": {domain: _list(shares, 4) for domain, shares in one.consistency.items()},
        "seconds": {phase: _short(seconds, 3) for phase, seconds in one.seconds.items()},
    }


def _list(values: Floats, digits: int = 2) -> list[float | int | None]:
    return [_short(x, digits) for x in np.asarray(values, np.float64).tolist()]


def _short(number: float, digits: int = 2) -> float | int | None:
    """As few characters as the figure needs; what is no number is null."""
    if not math.isfinite(number):
        return None
    rounded = round(number, digits)
    return int(rounded) if rounded == int(rounded) else rounded


def _facts(rows: Sequence[Row]) -> dict[str, str]:
    """Where and with what the runs were made."""
    summaries = [summary for row in rows for summary in row.summaries]
    facts: dict[str, list[Any]] = {
        "about the data": data_notes(summaries),
        "data fingerprint": [summary.get("data_fingerprint") for summary in summaries],
        "device": [summary.get("device") for summary in summaries],
        "precision": [summary.get("precision") for summary in summaries],
        "threads": [summary.get("threads") for summary in summaries],
        "test images": [
            ", ".join(f"{domain} {size}" for domain, size in summary.get("test_sizes", {}).items())
            for summary in summaries
        ],
        "versions": [
            ", ".join(f"{name} {version}" for name, version in summary.get("versions", {}).items())
            for summary in summaries
        ],
        "sent to clients": [_bytes(summary.get("bytes_sent")) for summary in summaries],
        "received from clients": [_bytes(summary.get("bytes_received")) for summary in summaries],
    }
    joined = {name: "; ".join(dict.fromkeys(shown(v) for v in values if v)) for name, values in facts.items()}
    return {name: text for name, text in joined.items() if text}


def _bytes(number: Any) -> str:
    return f"{number / 1e6:,.1f} MB a run" if number else ""
