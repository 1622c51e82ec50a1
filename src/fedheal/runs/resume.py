"""Find the newest usable checkpoint of a run folder, and cut the rounds back to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedheal.core.atomic_files import sync_path
from fedheal.runs import folder as files

Checkpoint = tuple[dict[str, Tensor], dict[str, Any]]


def load_newest_checkpoint(
    folder: Path,
    owner: str,
    log: logging.Logger,
    check: Callable[[Mapping[str, Any]], None] = lambda described: None,
    allow_gaps: bool = False,
) -> Checkpoint | None:
    """Return the newest usable checkpoint's tensors and JSON, or None; drop the records of later rounds and a result of them.

    `check` is called with a checkpoint's JSON before anything is cut. A checkpoint cannot be used if earlier rounds have no
    records, unless `allow_gaps`. ValueError: there are checkpoints, and none can be used.
    """
    problems: list[str] = []
    for path in files.list_checkpoints(folder):
        try:
            arrays, described = files.load_checkpoint(path, owner)
            if type(described.get("round")) is not int:
                raise files.CheckpointError(f"{path} is damaged (it does not state its round)")
            check(described)
            _truncate(folder, described["round"], allow_gaps)
        except files.CheckpointError as problem:
            problems.append(str(problem))
            continue
        for text in problems:
            log.warning("%s; resuming from %s", text, path.name)
        return arrays, described
    if problems:
        raise ValueError(
            f"no checkpoint in {folder} can be used ({'; '.join(problems)}): remove the folder to start again"
        )
    _truncate(folder, 0, allow_gaps)
    return None


def _truncate(folder: Path, rounds: int, allow_gaps: bool) -> None:
    if any(record.round > rounds for record in files.read_rounds(folder)):
        drop_result(folder)
    files.truncate_rounds(folder, rounds, allow_gaps)


def drop_result(folder: Path) -> None:
    """Remove the result and the model of rounds that the folder will no longer end with."""
    paths = [path for name in ("result.json", "model.safetensors") if (path := folder / name).exists()]
    for path in paths:
        path.unlink()
    if paths:
        sync_path(folder)  # before the rounds change
