"""The rounds of a run as a report reads them: whatever is there is of the right kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedheal.runs.folder import read_result, read_rounds


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """The records of `rounds.jsonl`; one that somebody has made something else of is refused by name.

    There may be more of them than the result's rounds: a federation may go on after its result.
    """
    records = read_rounds(folder)
    finished = (folder / "result.json").is_file()
    wanted = read_result(folder, ["rounds"])["rounds"] if finished else 0
    if len(records) < wanted:
        path = folder / "rounds.jsonl"
        if not path.exists():
            raise ValueError(f"{path} is missing, and the run has {wanted} rounds")
        raise ValueError(f"{path} has {len(records)} whole lines from its start, and the run {wanted} rounds")
    return [dict(record) for record in records]
