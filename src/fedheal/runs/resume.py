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
RESULT_FILES = ("result.json", "model.safetensors")  # of a finished run


def load_newest_checkpoint(
    folder: Path,
    owner: str,
    log: logging.Logger,
    check: Callable[[Mapping[str, Any]], None] = lambda described: None,
    allow_gaps: bool = False,
    max_unsaved: int | None = None,
) -> Checkpoint | None:
    """Return the newest usable checkpoint's tensors and JSON, or None; drop the records of later rounds and a result of them.

    If there is no checkpoint, keep the records beside those of the new start, and warn.

    Args:
        folder: The run folder.
        owner: The owner of its checkpoints.
        log: Where checkpoints that cannot be used, and records that lack one, are named.
        check: Called with a checkpoint's JSON before anything is cut.
        allow_gaps: Whether a checkpoint can be used although records of earlier rounds are missing. Damaged ones are dropped.
        max_unsaved: How many rounds a run may have before its first checkpoint; None: any number.

    Raises:
        ValueError: There are checkpoints and none can be used, or there must have been one and it is gone. Nothing was cut.
    """
    problems: list[str] = []
    lacking: files.RoundsError | None = None
    for path in files.list_checkpoints(folder):
        try:
            arrays, described = files.load_checkpoint(path, owner)
            if type(described.get("round")) is not int:
                raise files.CheckpointError(f"{path} is damaged (it does not state its round)")
            check(described)
            _truncate(folder, described["round"], allow_gaps)
        except files.CheckpointError as problem:
            lacking = lacking or (problem if isinstance(problem, files.RoundsError) else None)
            problems.append(str(problem))
            continue
        for text in problems:
            log.warning("%s; resuming from %s", text, path.name)
        return arrays, described
    if lacking is not None:
        remedy = "repair it or restore it from a backup, or move the folder away to start again"
        raise ValueError(f"{lacking}: {remedy}; state/ has a whole checkpoint")
    if problems:
        raise ValueError(f"no checkpoint in {folder} can be used ({'; '.join(problems)}): {_advise_restoring(folder)}")
    results = [name for name in RESULT_FILES if (folder / name).exists()]
    last = files.find_last_round(folder)
    if results or (max_unsaved is not None and last > max_unsaved):
        found = " and ".join([*([f"records up to round {last}"] if last else []), *results])
        raise ValueError(f"{folder} has {found}, but no checkpoint in state/: {_advise_restoring(folder)}")
    if last:
        kept = files.set_rounds_aside(folder)
        found = f"{folder} has records up to round {last}, but no checkpoint"
        log.warning("%s: the run starts again with round 1, and keeps them as %s", found, kept.name)
    else:
        _truncate(folder, 0, allow_gaps)
    return None


def _advise_restoring(folder: Path) -> str:
    """Say what to do about a folder whose checkpoints are gone, and which of its files can still be used."""
    saved = max((int(path.stem) for path in files.list_checkpoints(folder) if path.stem.isdecimal()), default=1)
    has_all_rounds = files.find_last_round(folder) >= saved and files.find_damaged_line(folder) is None
    whole = ["rounds.jsonl"] if has_all_rounds else []
    whole += ["model.safetensors"] if _has_whole_model(folder) else []
    state = f"; {' and '.join(whole)} {'are' if len(whole) > 1 else 'is'} still whole" if whole else ""
    return f"restore state/ from a backup, or move the folder away to start again{state}"


def _has_whole_model(folder: Path) -> bool:
    try:
        return bool(files.load_tensors(folder / "model.safetensors"))
    except (ValueError, OSError):
        return False


def _truncate(folder: Path, rounds: int, allow_gaps: bool) -> None:
    if allow_gaps:
        files.drop_damaged_rounds(folder)
    if any(record.round > rounds for record in files.read_rounds(folder)):
        drop_result(folder)
    files.truncate_rounds(folder, rounds, allow_gaps)


def drop_result(folder: Path) -> None:
    """Remove the result and the model of rounds that the folder will no longer end with."""
    paths = [path for name in RESULT_FILES if (path := folder / name).exists()]
    for path in paths:
        path.unlink()
    if paths:
        sync_path(folder)  # before the rounds change
