"""Whether runs may stand beside each other: what sets them apart beside their methods and seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedheal.report.rows import BOUNDS, OF_BOUNDS, Row, data_notes, described
from fedheal.runs.schema import FREE

APART = frozenset({"name", "seed", "method"})  # settings that a table names already
HOW = FREE | {"budget", "wait_seconds", "roll_call"}  # settings that change no result
MOST = 5  # values or runs that a sentence names


@dataclass(frozen=True)
class Settings:
    """The fields of experiments: those all share, the values of those that differ, and the methods in full."""

    shared: Mapping[str, str]
    differ: Mapping[str, Sequence[str]]
    methods: Sequence[str]


def settings(rows: Sequence[Row]) -> Settings:
    """What the runs' folders say of them. A federation says little of its clients, and does not differ in the rest."""
    runs = [(row, *described(summary)) for row in rows for summary in row.summaries]
    shared, differ = {}, {}
    for key in dict.fromkeys(key for _, one, _ in runs for key in one):
        asked = [
            one
            for row, one, complete in runs
            if (complete or key in one) and not (key in OF_BOUNDS and row.method in BOUNDS)
        ]
        values = list(dict.fromkeys(shown(one.get(key)) for one in asked))
        if len(values) == 1:
            shared[key] = values[0]
        elif values and key not in APART:
            differ[key] = values
    return Settings(shared, differ, sorted({str(one.get("method", "")) for _, one, _ in runs}))


def same_data(one: Row, other: Row) -> bool:
    """Whether two rows of one data set and seed were trained and judged on the same images, as far as they say it."""
    for key in ("used_fingerprint", "data_fingerprint"):  # runs of earlier versions have only the second
        prints = [str(row.summaries[0].get(key) or "") for row in (one, other)]
        if all(prints):
            return prints[0] == prints[1]
    return True  # a federation's data are nobody's to look at


def cautions(rows: Sequence[Row], reference: str) -> list[str]:
    """What whoever compares these rows must know: settings that differ, methods that do under one name, and other data."""
    said = []
    differ = {key: values for key, values in settings(rows).differ.items() if key not in HOW}
    if differ:
        fields = ", ".join(f"{key} ({_some(values)})" for key, values in differ.items())
        said.append(f"Not the same in all runs: {fields}. Differences between rows are not those of methods alone.")
    for method, kinds in _changed(rows).items():
        words = f": {_some(kinds)}" if len(kinds) > 1 else ", though the parameters in its name are the same"
        said.append(f"The runs of {method} are not of one and the same method{words}. They are not seeds of one thing.")
    others = [row for row in rows if row.method not in BOUNDS and not _comparable(row, rows, reference)]
    if others:
        named = [f"{row.method} with seed {row.seed} ({row.summaries[0].get('folder', '?')})" for row in others]
        said.append(
            f"Not on the data of {reference}'s run with the same seed, and therefore not compared with it: {_some(named)}."
        )
    return said


def notes(rows: Sequence[Row], reference: str) -> list[list[str]]:
    """The same and what is special about its data, for each row alone: what is read by programs is read row by row."""
    differ = [key for key in settings(rows).differ if key not in HOW]
    changed = _changed(rows)
    found = []
    for row in rows:
        runs = [described(summary) for summary in row.summaries]
        said = data_notes(row.summaries)
        for key in differ:
            values = dict.fromkeys(shown(one.get(key)) for one, complete in runs if complete or key in one)
            if values and not (key in OF_BOUNDS and row.method in BOUNDS):
                said.append(f"{key} = {_some(list(values))}, which is not the same in all runs")
        if row.method in changed:
            said.append(f"not all runs of {row.method} are of one and the same method")
        if row.method not in BOUNDS and not _comparable(row, rows, reference):
            said.append(f"not on the data of {reference}'s run with the same seed")
        found.append(said)
    return found


def _changed(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Of names that stand for more than one method, the methods in full: a default or the code of one's own may change."""
    found = {}
    for name in dict.fromkeys(row.method for row in rows if row.method not in BOUNDS):
        runs = [(summary, *described(summary)) for row in rows if row.method == name for summary in row.summaries]
        full = list(dict.fromkeys(str(one["method"]) for _, one, complete in runs if complete and "method" in one))
        held = {json.dumps(summary["own"]) for summary, *_ in runs if "own" in summary}
        if len(full) > 1 or len(held) > 1:
            found[name] = full
    return found


def comparable(rows: Sequence[Row], reference: str) -> list[Row]:
    """The rows without those that were on other data than the reference's of the same seed."""
    return [row for row in rows if _comparable(row, rows, reference)]


def _comparable(row: Row, rows: Sequence[Row], reference: str) -> bool:
    return all(same_data(row, other) for other in rows if (other.method, other.seed) == (reference, row.seed))


def shown(value: Any) -> str:
    """A setting's value, for people."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return (", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)) or "none"


def _some(words: Sequence[str]) -> str:
    more = f" and {len(words) - MOST} more" if len(words) > MOST else ""
    return ", ".join(words[:MOST]) + more
