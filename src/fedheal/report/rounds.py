"""Read the rounds of a run for a report."""

from __future__ import annotations

from pathlib import Path

from fedheal.runs.folder import read_result, read_rounds
from fedheal.runs.schema import RoundRecord


def read_complete_rounds(folder: Path) -> list[RoundRecord]:
    """Return the records of `rounds.jsonl`.

    Raise ValueError if a finished run lacks some of its rounds. More rounds than in the result are fine: a federation may
    continue after its result.
    """
    records = read_rounds(folder)
    is_finished = (folder / "result.json").is_file()
    expected = read_result(folder, ["rounds"])["rounds"] if is_finished else 0
    if len(records) < expected:
        path = folder / "rounds.jsonl"
        problem = f"has only {len(records)} complete lines" if path.exists() else "is missing"
        raise ValueError(f"{path} {problem}, but the run has {expected} rounds")
    return records
