"""Read the rounds of a run for a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedheal.runs.folder import fields, read_result, read_rounds

NUMBER_FIELDS = ("weights", "domains", "clients")
REPORT_NUMBER_FIELDS = ("kept", "distance", "kept_by_tensor")


def read_complete_rounds(folder: Path) -> list[dict[str, Any]]:
    """Return the records of `rounds.jsonl`.

    Raise ValueError if a finished run lacks some of its rounds. More rounds than in the result are fine: a federation may
    continue after its result.
    """
    records = read_rounds(folder)
    is_finished = (folder / "result.json").is_file()
    expected = read_result(folder, fields("rounds"))["rounds"] if is_finished else 0
    if len(records) < expected:
        path = folder / "rounds.jsonl"
        problem = f"has only {len(records)} complete lines" if path.exists() else "is missing"
        raise ValueError(f"{path} {problem}, but the run has {expected} rounds")
    for line, record in enumerate(records, 1):
        report = record.get("report")
        checks = {
            "report": report is None or isinstance(report, dict),
            "client_domains": _maps_to(record.get("client_domains"), str),
            **{key: _maps_to(record.get(key), (int, float)) for key in NUMBER_FIELDS},
        }
        if checks["report"] and report:
            checks |= {f"report.{key}": _maps_to(report.get(key), (int, float)) for key in REPORT_NUMBER_FIELDS}
        for key, is_valid in checks.items():
            if not is_valid:
                raise ValueError(f"{folder / 'rounds.jsonl'}: {key} in line {line} has the wrong type")
    return records


def _maps_to(value: object, kind: type | tuple[type, ...]) -> bool:
    return value is None or (isinstance(value, dict) and all(x is None or isinstance(x, kind) for x in value.values()))
