"""Whether runs can be compared: which method is the reference, and in what runs differ besides method and seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedheal.aggregate.server_optimizer import SERVERS
from fedheal.core.errors import format_count, shorten_list, suggest
from fedheal.core.rng import SEED_FIELDS, SOURCES
from fedheal.report.rows import (
    BOUND_METHOD,
    BOUND_SETTINGS,
    BOUNDS,
    UNSEEN,
    Row,
    collect_data_notes,
    name_data_sets,
    read_settings,
)
from fedheal.report.seed_levels import list_fixed_sources, list_seeds, share_levels
from fedheal.runs.folder import find_damaged_line
from fedheal.runs.schema import FREE

ROW_SETTINGS = frozenset({"name", "seed", *SEED_FIELDS, "method"})  # reports show them already
IRRELEVANT = FREE | {"budget", "wait_seconds", "roll_call"}  # settings that change no result
MAX_LISTED = 5  # values or runs that a sentence lists


@dataclass(frozen=True)
class Settings:
    """Settings of several runs: those that all share, the values of those that differ, and the methods in full."""

    common: Mapping[str, str]
    differing: Mapping[str, Sequence[str]]
    methods: Sequence[str]


@dataclass(frozen=True)
class Discrepancies:
    """What makes rows of one data set hard to compare."""

    settings: Mapping[str, Sequence[str]]  # differing settings that affect results, with their values
    methods: Mapping[str, Sequence[str]]  # names that stand for several methods, with the methods in full
    other_data: Sequence[Row]  # rows on other data than the reference's run with the same seed


def check_reference(rows: Sequence[Row], reference: str | None) -> None:
    """Raise ValueError if no row is of the reference method."""
    methods = list_methods(rows)
    if reference is not None and reference not in methods:
        names = {name.removeprefix(f"{BOUND_METHOD}+"): name for name in methods} | {name: name for name in methods}
        raise ValueError(f"reference = {reference}{suggest(reference, names)}: use one of {', '.join(methods)}")


def choose_reference(rows: Sequence[Row], reference: str | None = None) -> str:
    """Return the method that the others are compared with: the given one, else FedAvg, else the first, else none."""
    methods = list_methods(rows)
    return next((name for name in (reference, "fedavg", *methods) if name in methods), "")


def list_methods(rows: Sequence[Row]) -> list[str]:
    """Return the names of the methods, without bounds, in the order of the rows."""
    return list(dict.fromkeys(row.method for row in rows if row.method not in BOUNDS))


def compare_settings(rows: Sequence[Row]) -> Settings:
    """Sort the settings of runs into common and differing ones. What a federation does not state is no difference."""
    runs = [(row, *read_settings(summary)) for row in rows for summary in row.summaries]
    keys = dict.fromkeys(key for _, settings, _ in runs for key in settings)
    values = {key: _list_values(key, runs) for key in keys}
    common = {key: texts[0] for key, texts in values.items() if len(texts) == 1}
    differing = {key: texts for key, texts in values.items() if len(texts) > 1 and key not in ROW_SETTINGS}
    return Settings(common, differing, sorted({str(settings.get("method", "")) for _, settings, _ in runs}))


def _list_values(key: str, runs: Sequence[tuple[Row, Mapping[str, Any], bool]]) -> list[str]:
    runs = [run for run in runs if not (key in BOUND_SETTINGS and run[0].method in BOUNDS)]
    runs = [run for run in runs if not (key == "without" and run[0].evaluation == UNSEEN)]
    if key.startswith("server_"):
        runs = [run for run in runs if not _names_server(str(run[1].get("method")))]
    values = [settings.get(key) for _, settings, is_complete in runs if is_complete or key in settings]
    return list(dict.fromkeys(map(format_setting, values)))


def _names_server(method: str) -> bool:
    """Return whether a method's name has a server optimiser, whose settings are then the method's own."""
    return any(part.partition(":")[0] in SERVERS for part in method.split("+"))


def find_discrepancies(rows: Sequence[Row], reference: str) -> Discrepancies:
    """Return in what the rows of one data set differ besides method and seed."""
    ambiguous = {}  # since a default or a user's own code changed between runs
    for name in list_methods(rows):
        runs = [(s, *read_settings(s)) for row in rows if row.method == name for s in row.summaries]
        methods = list(dict.fromkeys(str(x["method"]) for _, x, is_complete in runs if is_complete and "method" in x))
        own_code = {json.dumps(summary["own"]) for summary, *_ in runs if "own" in summary}
        if len(methods) > 1 or len(own_code) > 1:
            ambiguous[name] = methods
    differing = {key: x for key, x in compare_settings(rows).differing.items() if key not in IRRELEVANT}
    comparable = select_comparable(rows, reference)
    other_data = [row for row in rows if row.method not in BOUNDS and row not in comparable]
    return Discrepancies(differing, ambiguous, other_data)


def list_cautions(rows: Sequence[Row], reference: str | None = None) -> list[str]:
    """Return sentences on what limits a comparison of these rows: settings, methods, data, damaged files, or the reference."""
    used_reference = choose_reference(rows, reference)
    discrepancies = find_discrepancies(rows, used_reference)
    cautions = []
    if discrepancies.settings:
        fields = ", ".join(
            f"{key} ({shorten_list(values, MAX_LISTED)})" for key, values in discrepancies.settings.items()
        )
        cautions.append(
            f"Settings that differ between runs: {fields}. Differences between rows are not due to the methods alone."
        )
    for name, methods in discrepancies.methods.items():
        detail = (
            f": {shorten_list(methods, MAX_LISTED)}"
            if len(methods) > 1
            else ", although the parameters in its name are equal"
        )
        cautions.append(
            f"The runs of {name} are not all of the same method{detail}. They are not seeds of one experiment."
        )
    if discrepancies.other_data:
        runs = [f"{row.method} with seed {row.seed} ({row.folder})" for row in discrepancies.other_data]
        cautions.append(
            f"Not on the same data as the run of {used_reference} with the same seed, and therefore not compared with it: "
            f"{shorten_list(runs, MAX_LISTED)}."
        )
    cautions += list_fixed_sources(rows) + _list_unfinished(rows)
    if rows and len(rows[0].domains) == 1:
        cautions.append("There is one domain, so STD and worst say nothing.")
    for summary in (summary for row in rows for summary in row.summaries):
        folder = Path(str(summary.get("folder", "")))
        if damaged := find_damaged_line(folder):
            cautions.append(
                f"{folder / 'rounds.jsonl'} is damaged in line {damaged}. Tables do not need that file, but figures do."
            )
    if reference not in (None, used_reference):
        there = used_reference or "no method"
        table = rows[0].name_table(name_data_sets([rows[0].data])[rows[0].data])
        cautions.append(f"There is no run of {reference} on {table}: {there} is the reference there.")
    return cautions


def _list_unfinished(rows: Sequence[Row]) -> list[str]:
    """Return a sentence on the runs beside these that are not finished."""
    summaries = [summary for row in rows for summary in row.summaries]
    names = list(dict.fromkeys(name for summary in summaries for name in summary.get("unfinished", ())))
    if not names:
        return []
    verb = "is" if len(names) == 1 else "are"
    return [f"{format_count(len(names), 'run')} {verb} unfinished: {shorten_list(names, MAX_LISTED)}."]


def list_seed_cautions(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for reports that test differences, if methods have different seeds; bounds may have any."""
    seeds = list_seeds(rows)
    if len({frozenset(found) for found in seeds.values()}) <= 1:
        return []
    listed = shorten_list([f"{method} has {len(found)}" for method, found in seeds.items()], MAX_LISTED)
    counts = f" ({listed})" if len({len(found) for found in seeds.values()}) > 1 else ""
    tests = "" if share_levels(rows) else "; tests use the seeds that both have"
    return [f"Methods have different seeds{counts}, so their means are not comparable{tests}."]


def annotate_rows(rows: Sequence[Row], reference: str) -> list[list[str]]:
    """Return, for each row, what is special about its data and in what it is hard to compare with the others."""
    discrepancies = find_discrepancies(rows, reference)
    annotations = []
    for row in rows:
        runs = [(row, *read_settings(summary)) for summary in row.summaries]
        notes = collect_data_notes(row.summaries)
        values = {key: _list_values(key, runs) for key in discrepancies.settings}
        notes += [
            f"{key} = {shorten_list(v, MAX_LISTED)}, which is not the same in all runs"
            for key, v in values.items()
            if v
        ]
        if row.method in discrepancies.methods:
            notes.append(f"not all runs of {row.method} are of the same method")
        if row in discrepancies.other_data:
            notes.append(f"not on the same data as the run of {reference} with the same seed")
        annotations.append(notes)
    return annotations


def select_comparable(rows: Sequence[Row], reference: str) -> list[Row]:
    """Return the rows without those on other data than the reference's run with the same seed."""
    references = [row for row in rows if row.method == reference]
    split = SOURCES.index("split")
    return [
        row
        for row in rows
        if all(have_same_data(row, other) for other in references if other.seeds[split] == row.seeds[split])
    ]


def have_same_data(row: Row, other: Row) -> bool:
    """Return whether two rows were trained and evaluated on the same images, as far as their fingerprints tell."""
    for key in ("used_fingerprint", "data_fingerprint"):  # runs of earlier versions have only the second
        fingerprints = [str(r.summaries[0].get(key) or "") for r in (row, other)]
        if all(fingerprints):
            return fingerprints[0] == fingerprints[1]
    return True  # a federation's data cannot be inspected


def format_setting(value: Any) -> str:
    """Return the text of a setting's value."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return (", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)) or "none"
