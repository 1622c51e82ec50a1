"""The run folder: writing and reading its files, nothing else.

    experiment.toml     complete, re-runnable
    rounds.jsonl        a line a round
    state/NNNNNNNN.safetensors   the newest two checkpoints: tensors, with JSON in the metadata
    model.safetensors   the final model
    result.json         written last: a run that has it is finished
    lock.tmp            empty: locked by the process that runs here
    rounds.jsonl.before-N   the records of a start that left no checkpoint

A crash loses at most the rounds since the last checkpoint, whether the process is killed or the power fails. Files
appear whole by one rename, on the disk in the order of writing (`core.atomic_files`). A resume cuts the lines beyond
its checkpoint. A checksum finds damage inside a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from fedheal.core.atomic_files import sync_path
from fedheal.core.atomic_files import write_bytes as write_bytes  # every writer of a run's files finds them here
from fedheal.core.atomic_files import write_text as write_text
from fedheal.core.nested_text import parse_json, parse_toml
from fedheal.core.state import compute_checksum
from fedheal.runs.schema import RoundRecord, check_result, dump_json, parse_round

FORMAT = "fedheal-state-4"
CHECKPOINTS_KEPT = 2
NO_RESULT = "name the folder of a finished run, or finish this one (fedheal run --resume --out FOLDER)"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, with the reason."""


class RoundsError(CheckpointError):
    """A whole checkpoint that cannot be used, since `rounds.jsonl` lacks records of its rounds."""


def check_folder(folder: Path) -> Path:
    """Return the folder. Raise ValueError if it or a folder above it is a file."""
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            reason = "is a file" if path == folder else f"cannot be made, since {path} is a file"
            raise ValueError(f"{folder} {reason}: name another folder")
    return folder


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, on the disk. Raise ValueError if that cannot be done."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        check_folder(folder).mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_path(path.parent)
    except OSError as error:
        raise ValueError(f"{folder} cannot be made ({error.strerror}): name another folder") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise ValueError if it holds something else."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content


def read_toml(path: Path) -> dict[str, Any]:
    """Return what a TOML file holds. Raise ValueError if it cannot be read."""
    try:
        return parse_toml(path.read_text(encoding="utf-8-sig"))  # some editors write a byte-order mark
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not TOML: byte {error.start} is not UTF-8; save it as UTF-8") from error
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors, whole or not at all."""
    # safetensors refuses tensors that share memory (tied parameters): each gets its own.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_bytes(path, save(copies))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raise ValueError if it is damaged."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): restore the file, or repeat the run") from error


def save_checkpoint(
    folder: Path,
    number: int,
    arrays: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
    owner: str,
    keep: int = CHECKPOINTS_KEPT,
    mode: int = 0o666,
) -> None:
    """Write the state after round `number` and remove all but the newest `keep`; `load_checkpoint` needs the same `owner`."""
    states, rounds = folder / "state", folder / "rounds.jsonl"
    states.mkdir(exist_ok=True)
    if rounds.exists():  # a checkpoint on the disk needs the records of its rounds there
        sync_path(rounds)
    sync_path(folder)  # and the names of both
    arrays = _separate({name: tensor.detach().cpu().contiguous() for name, tensor in arrays.items()})
    header = json.dumps(
        {"format": FORMAT, "owner": owner, "sum": compute_checksum(arrays, metadata), "state": metadata}
    )
    write_bytes(states / f"{number:08d}.safetensors", save(arrays, {"fedheal": header}), mode)
    for path in (*sorted(states.glob("*.safetensors"))[:-keep], *states.glob("*.tmp")):
        path.unlink(missing_ok=True)


def _separate(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the arrays, with a copy of each that shares memory with an earlier one, which safetensors refuses."""
    separate, seen = {}, set()
    for name, tensor in arrays.items():
        address = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return separate


def list_checkpoints(folder: Path) -> list[Path]:
    """Return a run's checkpoints, newest first."""
    return sorted((folder / "state").glob("*.safetensors"), reverse=True)


def load_checkpoint(path: Path, owner: str | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a checkpoint's tensors and JSON. Raise CheckpointError if it is damaged or another owner's (None: any)."""
    header = read_checkpoint_header(path)
    if owner is not None and header.get("owner") != owner:
        raise CheckpointError(f"{path} belongs to another experiment")
    try:
        arrays = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error})") from error
    metadata = header.get("state")
    if not isinstance(metadata, dict) or header.get("sum") != compute_checksum(arrays, metadata):
        raise CheckpointError(f"{path} is damaged (its checksum does not fit its contents)")
    return arrays, metadata


def read_checkpoint_header(path: Path) -> dict[str, Any]:
    """Return a checkpoint's format, owner, checksum and JSON (`state`), unchecked. Raise CheckpointError if it has none."""
    try:
        with safe_open(path, "pt") as file:
            header = parse_json((file.metadata() or {}).get("fedheal", "null"))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error})") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this version of fedheal")
    return header


def append_round(folder: Path, record: RoundRecord) -> None:
    """Add a line to `rounds.jsonl`. A crash can only leave a part of the last line."""
    line = record.to_json() + "\n"
    with (folder / "rounds.jsonl").open("a", encoding="utf-8") as file:
        file.write(line)


def read_rounds(folder: Path) -> list[RoundRecord]:
    """Return the records of a run's rounds, without a last line that a crash cut short."""
    records = []
    for number, (_, fields) in enumerate(_read_whole_lines(folder / "rounds.jsonl"), 1):
        try:
            records.append(parse_round(fields))
        except ValueError as error:
            raise ValueError(f"{folder / 'rounds.jsonl'}: line {number}: {error}") from None
    return records


def find_damaged_line(folder: Path) -> int | None:
    """Return the number of the first line of `rounds.jsonl` that is not the record of a round, or None."""
    for number, line in enumerate(_read_lines(folder / "rounds.jsonl"), 1):
        try:
            parse_round(parse_json(line))
        except ValueError:
            return number
    return None


def find_last_round(folder: Path) -> int:
    """Return the number of the last round in `rounds.jsonl`, also behind a damaged line; 0 if there is none."""
    return max(_select_records(_read_lines(folder / "rounds.jsonl")).values(), default=0)


def drop_damaged_rounds(folder: Path) -> None:
    """Remove the lines of `rounds.jsonl` that are not records of rounds, or that come out of turn."""
    path = folder / "rounds.jsonl"
    lines = _read_lines(path)
    kept = list(_select_records(lines))
    if kept != lines:
        write_text(path, "".join(line + "\n" for line in kept))


def truncate_rounds(folder: Path, rounds: int, allow_gaps: bool = False) -> None:
    """Keep the records of the first `rounds` rounds. Raise RoundsError if some are missing, unless gaps are allowed."""
    path = folder / "rounds.jsonl"
    if not allow_gaps and (problem := _find_gap(path, rounds)):
        wanted = f"the records of rounds 1 to {rounds}" if rounds > 1 else "the record of round 1"
        raise RoundsError(f"{path} does not hold {wanted} ({problem})")
    kept = [line for line, fields in _read_whole_lines(path) if fields["round"] <= rounds]
    write_text(path, "".join(line + "\n" for line in kept))


def _find_gap(path: Path, rounds: int) -> str | None:
    """Return the first thing that keeps a file from holding the first `rounds` rounds, once each and in turn, or None."""
    last = 0
    for last, (_, fields) in enumerate(_read_whole_lines(path), 1):
        number = fields["round"]
        if number != last and min(number, last) <= rounds:
            return f"line {last} is of round {number}, not {last}"
    if last >= rounds:
        return None
    if len(_read_lines(path)) > last:
        return f"line {last + 1} is not the record of a round"
    return f"it ends after round {last}" if last else "it is empty" if path.exists() else "it is missing"


def set_rounds_aside(folder: Path) -> Path:
    """Rename `rounds.jsonl`, so that a new start leaves its records alone. Return the new path."""
    paths = (folder / f"rounds.jsonl.before-{number}" for number in count(1))
    path = next(path for path in paths if not path.exists())
    (folder / "rounds.jsonl").rename(path)
    sync_path(folder)
    return path


def replace_last_round(folder: Path, record: RoundRecord) -> None:
    """Write the last round's line again, so that a crash leaves the old line or the new one."""
    path = folder / "rounds.jsonl"
    kept = [line for line, fields in _read_whole_lines(path) if fields["round"] < record.round]
    write_text(path, "".join(line + "\n" for line in [*kept, record.to_json()]))


def write_result(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write `result.json`, which must have all fields of `RunResult`."""
    check_result(summary)
    write_text(folder / "result.json", dump_json(summary, "the result", indent=2) + "\n")


def read_result(folder: Path, required: Collection[str] = ()) -> dict[str, Any]:
    """Return what `result.json` holds. Raise ValueError if it is not a result with the `required` fields of `RunResult`."""
    path = folder / "result.json"
    try:
        summary = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: {NO_RESULT}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    try:
        check_result(summary, required)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return summary


def _read_whole_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield lines and their JSON, up to the first that is not a round's record."""
    for line in _read_lines(path):
        try:
            fields = parse_json(line)
        except ValueError:
            return
        if not isinstance(fields, dict) or type(fields.get("round")) is not int:
            return
        yield line, fields


def _select_records(lines: Iterable[str]) -> dict[str, int]:
    """Return the lines that are records of rounds and come in turn, with their rounds."""
    selected: dict[str, int] = {}
    last = 0
    for line in lines:
        try:
            number = parse_round(parse_json(line)).round
        except ValueError:
            continue
        if number > last:
            selected[line] = last = number
    return selected


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
