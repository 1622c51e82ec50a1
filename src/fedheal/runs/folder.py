"""The run folder: writing and reading it, nothing else.

    experiment.toml     complete, re-runnable
    rounds.jsonl        a line a round
    state/NNNNNNNN.safetensors   the newest two states: tensors, with JSON in the metadata
    model.safetensors   the final model
    result.json         written last: a run that has it is finished
    lock.tmp            empty: who holds it is at work here

A crash at any moment loses nothing but the rounds since the last state: files appear whole by one rename, and lines
beyond the state that a resume starts from are cut off. Damage inside a state is found by a checksum.
"""

from __future__ import annotations

import json
import os
import reprlib
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

FORMAT = "fedheal-state-4"
KEPT = 2  # states
LOCK = "lock.tmp"

Kind = type | tuple[type, ...]
NUMBER = (int, float)
# The fields of result.json and what each is. Those of earlier versions have not all of them, and there may be more.
RESULT: Mapping[str, Kind] = {
    "method": str,
    "data": str,
    "seed": int,
    "rounds": int,
    "averaged": int,
    "domains": dict,
    "avg": NUMBER,
    "std": NUMBER,
    "worst": NUMBER,
    "best": NUMBER,
    "gap": NUMBER,
    "cov": NUMBER,
    "gini": NUMBER,
    "jain": NUMBER,
    "entropy": NUMBER,
    "clients": dict,
    "client_fairness": dict,
    "validation": (dict, NoneType),
    "trained": dict,
    "only": list,
    "without": list,
    "pool": bool,
    "classes": list,
    "test_sizes": dict,
    "device": str,
    "hardware": str,
    "precision": str,
    "threads": int,
    "data_fingerprint": str,
    "used_fingerprint": str,
    "data_notes": list,
    "bytes_sent": NUMBER,
    "bytes_received": NUMBER,
    "consistency": (dict, NoneType),
    "seconds": dict,
    "versions": dict,
    "own": list,
}


class BadState(ValueError):
    """A state that cannot be used, with the reason."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other run is let in meanwhile: two would mix their rounds."""
    opened = lock(folder)
    try:
        yield
    finally:
        os.close(opened)


def lock(folder: Path) -> int:
    """The open file that keeps others out of a folder until it is closed, if only by the end of the process."""
    opened = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)  # to be written to, or NFS would not lock it
    try:
        import fcntl

        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        raise ValueError(f"{folder} is in use by another run that is still alive: stop that one first") from None
    except (ImportError, OSError):
        pass  # a system or a file system without such locks
    return opened


def check_folder(folder: Path) -> Path:
    """The same, unless a file is in its place or in that of a folder above it."""
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            there = "is a file" if path == folder else f"cannot be made, since {path} is a file"
            raise ValueError(f"{folder} {there}: name another folder")
    return folder


def make_folder(folder: Path) -> None:
    """With those above it; a file in the way is refused by name."""
    check_folder(folder).mkdir(parents=True, exist_ok=True)


def write_text(path: Path, text: str) -> None:
    """The file appears whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Likewise."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file")
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(data)
        _sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Tensors as safetensors, whole or not at all."""
    # safetensors refuses tensors that share memory (tied parameters): each gets its own.
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_bytes(path, save(own, dict(metadata or {})))


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error})") from error


def save_state(
    folder: Path,
    number: int,
    arrays: Mapping[str, Tensor],
    described: Mapping[str, Any],
    owner: str,
    kept: int = KEPT,
) -> None:
    """Write the state after round `number` and drop all but the newest `kept`. `owner` says whose it is."""
    states, rounds = folder / "state", folder / "rounds.jsonl"
    states.mkdir(exist_ok=True)
    if rounds.exists():  # a state that is on the disk needs the records of its rounds there
        _sync(rounds)
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in arrays.items()}
    text = json.dumps({"format": FORMAT, "owner": owner, "sum": _sum(own, described), "state": described})
    write_bytes(states / f"{number:08d}.safetensors", save(own, {"fedheal": text}))
    for old in sorted(states.glob("*.safetensors"))[:-kept]:
        old.unlink(missing_ok=True)
    for left in states.glob("*.tmp"):
        left.unlink(missing_ok=True)


def states(folder: Path) -> list[Path]:
    """The states there are, newest first."""
    return sorted((folder / "state").glob("*.safetensors"), reverse=True)


def load_state(path: Path, owner: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A state's tensors and JSON; `BadState` says why it cannot be used."""
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get("fedheal", "null"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dictionary)
    except (SafetensorError, OSError, ValueError) as error:
        raise BadState(f"{path} is damaged ({error})") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise BadState(f"{path} is not a state of this version of fedheal")
    if header.get("owner") != owner:
        raise BadState(f"{path} belongs to another experiment")
    described = header.get("state")
    if not isinstance(described, dict) or header.get("sum") != _sum(arrays, described):
        raise BadState(f"{path} is damaged (its checksum does not fit its contents)")
    return arrays, described


def append_round(folder: Path, record: Mapping[str, Any]) -> None:
    """One line; a crash can only leave a part of the last."""
    try:
        line = json.dumps(record, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"round {record.get('round')} cannot be recorded: {_unsayable(record)}") from error
    with (folder / "rounds.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _unsayable(record: Mapping[str, Any], where: str = "") -> str:
    """What in a record JSON has no words for."""
    for key, value in record.items():
        try:
            json.dumps({key: value}, allow_nan=False)
        except (TypeError, ValueError):
            if isinstance(value, Mapping):
                return _unsayable(value, f"{where}{key}.")
            return f"{where}{key} is {value!r}, and JSON has no words for that"
    return "it is too deep"


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's rounds, without a last line that a crash cut short."""
    path = folder / "rounds.jsonl"
    return list(_whole_lines(path)) if path.exists() else []


def cut_rounds(folder: Path, rounds: int) -> None:
    """Keep the records of the first `rounds` rounds."""
    kept = [record for record in read_rounds(folder) if record["round"] <= rounds]
    if [record["round"] for record in kept] != list(range(1, rounds + 1)):
        raise BadState(
            f"{folder / 'rounds.jsonl'} lacks records of rounds before {rounds}, the round of the saved state"
        )
    write_text(folder / "rounds.jsonl", "".join(json.dumps(record) + "\n" for record in kept))


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """A `ValueError` says why it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error


def fields(*names: str) -> dict[str, Kind]:
    """Some of a result's fields, and what each is.

    >>> fields("method", "pool")
    {'method': <class 'str'>, 'pool': <class 'bool'>}
    """
    return {name: RESULT[name] for name in names}


def read_result(folder: Path, needed: Mapping[str, Kind]) -> dict[str, Any]:
    """What `result.json` says. It has what is needed, and all that it has is of the right kind, or it is refused by name."""
    path = folder / "result.json"
    try:
        found = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    for key in needed:
        if key not in found:
            raise ValueError(f"{path}: there is no {key}")
    for key, kind in {**RESULT, **needed}.items():
        if key in found and not _is_a(found[key], kind):
            raise wrong_kind(path, key, found[key])
    return found


def wrong_kind(path: Path, key: str, value: object) -> ValueError:
    """What is said of a field that is something else than it should be; shortened, since it may hold anything."""
    return ValueError(f"{path}: {key} = {reprlib.repr(value)} is of the wrong kind")


def _is_a(value: object, kind: Kind) -> bool:
    """To Python `true` is a number, to JSON it is not."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict) or type(record.get("round")) is not int:
            return
        yield record


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sum(arrays: Mapping[str, Tensor], described: Mapping[str, Any]) -> int:
    """A checksum over the JSON, and the tensors' names, shapes, dtypes and bytes."""
    value = zlib.crc32(json.dumps(described, sort_keys=True).encode())
    for name in sorted(arrays):
        tensor = arrays[name].contiguous()
        value = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), value)
        value = zlib.crc32(tensor.view(-1).view(torch.uint8).numpy().data, value) if tensor.numel() else value
    return value
