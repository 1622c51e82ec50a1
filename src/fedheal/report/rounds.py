"""The rounds of a run as a report reads them: whatever is there is of the right kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedheal.runs.folder import fields, read_result, read_rounds

NUMBERS = ("weights", "domains", "clients")  # by name
TOLD = ("kept", "distance", "kept_by_tensor")  # likewise, in what an aggregation reports


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """The records of `rounds.jsonl`; one that somebody has made something else of is refused by name.

    There may be more of them than the result's rounds: a federation may go on after its result.
    """
    records = read_rounds(folder)
    finished = (folder / "result.json").is_file()
    wanted = read_result(folder, fields("rounds"))["rounds"] if finished else 0
    if len(records) < wanted:
        path = folder / "rounds.jsonl"
        if not path.exists():
            raise ValueError(f"{path} is missing, and the run has {wanted} rounds")
        raise ValueError(f"{path} has {len(records)} whole lines from its start, and the run {wanted} rounds")
    for line, record in enumerate(records, 1):
        report = record.get("report")
        told = report if isinstance(report, dict) else {}
        wrong = [
            key
            for key, fits in (
                ("round", isinstance(record["round"], (int, float))),
                ("report", report is None or told is report),
                ("client_domains", _words(record.get("client_domains"))),
                *((key, _numbers(record.get(key))) for key in NUMBERS),
                *((f"report.{key}", _numbers(told.get(key))) for key in TOLD),
            )
            if not fits
        ]
        if wrong:
            raise ValueError(f"{folder / 'rounds.jsonl'}: {wrong[0]} in line {line} is not what a run writes there")
    return records


def _words(value: object) -> bool:
    """A word or none for each name, or nothing at all."""
    return value is None or (
        isinstance(value, dict) and all(word is None or isinstance(word, str) for word in value.values())
    )


def _numbers(value: object) -> bool:
    """A number or none for each name, or nothing at all."""
    return value is None or (
        isinstance(value, dict) and all(x is None or isinstance(x, (int, float)) for x in value.values())
    )
