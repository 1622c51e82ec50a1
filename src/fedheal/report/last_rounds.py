"""Notes on a run's rounds: when each domain was evaluated last, how many rounds used no update, and divergence.

In a federation domains come and go, and a result has their newest values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedheal.core.errors import shorten_list
from fedheal.core.metrics import count_averaged
from fedheal.report.plain_text import escape_controls
from fedheal.runs.folder import read_rounds

MAX_LISTED = 5  # domains that a note lists


def list_round_notes(folder: Path, summary: Mapping[str, Any]) -> list[str]:
    """Return notes on divergence, rounds without an update, and domains whose result is not of the last evaluated rounds.

    There are none on rounds if those cannot be read.
    """
    notes = [_note_divergence(summary.get("calibration") or {}), *_note_rounds(folder, summary["rounds"])]
    return [note for note in notes if note]


def _note_divergence(calibration: Mapping[str, Mapping[str, float | None]]) -> str:
    # A healthy model's `nll` may be infinite, but its confidence, which `ece` is of, is always finite.
    names = [escape_controls(domain) for domain, found in calibration.items() if found.get("ece", 0.0) is None]
    if not names:
        return ""
    where = shorten_list(names, MAX_LISTED)
    return (
        f"the model's outputs are not finite on {where}, so training has diverged and the accuracy means nothing: "
        "use a smaller lr"
    )


def _note_rounds(folder: Path, last: int) -> list[str]:
    try:
        every = read_rounds(folder)
    except (OSError, ValueError):  # a table does not need them; cautions and figures name the damage
        return []
    if not every or every[-1].round < last:  # the end is missing
        return []
    records = [record for record in every if record.domains and record.round <= last]
    rounds: dict[str, list[int]] = {}
    for record in records:
        for domain in record.domains or {}:
            rounds.setdefault(domain, []).append(record.round)
    expected = count_averaged(len(records))
    averaged = {domain: count_averaged(len(numbers)) for domain, numbers in rounds.items()}
    fewer = {domain: str(number) for domain, number in averaged.items() if number < expected}
    idle = sum(record.cohort > 0 and not any(record.weights.values()) for record in every)
    return [
        f"in {idle} of {len(every)} rounds no client's update was used, so the model did not change" if idle else "",
        note_stale_accuracies({domain: numbers[-1] for domain, numbers in rounds.items()}),
        f"means of fewer than {expected} rounds: {_list_some(fewer)}" if fewer else "",
    ]


def note_stale_accuracies(last_rounds: Mapping[str, int]) -> str:
    """Return a note on who was not evaluated in the last evaluated round, and when it was; empty if all were.

    >>> note_stale_accuracies({"street": 8, "display": 14})
    'not evaluated in round 14, the last evaluated one: street (last in round 8); the accuracy is that of an earlier model'
    """
    newest = max(last_rounds.values(), default=0)
    earlier = {name: f"last in round {number}" for name, number in last_rounds.items() if number < newest}
    if not earlier:
        return ""
    is_one = len(earlier) == 1
    which = "the accuracy is that of an earlier model" if is_one else "the accuracies are those of earlier models"
    return f"not evaluated in round {newest}, the last evaluated one: {_list_some(earlier)}; {which}"


def _list_some(remarks: Mapping[str, str]) -> str:
    words = [f"{escape_controls(name)} ({remark})" for name, remark in remarks.items()]
    return shorten_list(words, MAX_LISTED)
