"""Image data sets as the Hugging Face hub stores them: Parquet files with a column `image` (the encoded bytes) and one with
the label, and for several domains in one table a column `domain`. Needs pyarrow (`pip install fedheal[hub]`).

They are looked for below `hub/<owner>--<name>/` in the data root, where `fedheal data fetch` puts them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from fedheal.data.readers.folders import OF_TEN
from fedheal.data.readers.images import Unreadable
from fedheal.data.splits import Encoded, Labels, RawDomain

TEST = ("test", "val")  # how names of test images begin; all others are for training
LABELS, DOMAINS = ("label", "labels", "digit"), ("domain", "domains")
IMAGE = "image"


@dataclass(frozen=True)
class Table:
    """Where images of a domain stand: their names (`file#row`), their labels, and what the labels mean."""

    names: tuple[str, ...]
    labels: Labels
    classes: tuple[str, ...]
    words: bool = False  # labels were words in the file: it does not know of classes that it has none of


def files(folder: Path, patterns: Sequence[str]) -> tuple[Path, ...]:
    """The Parquet files of a repository that are on disk."""
    found = [path for path in sorted(folder.rglob("*.parquet")) if path.is_file()]
    return tuple(p for p in found if any(fnmatch(p.relative_to(folder).as_posix(), pattern) for pattern in patterns))


def read(name: str, paths: Sequence[Path], domain: str, classes: tuple[str, ...]) -> RawDomain:
    """A domain; where no file is for testing, of every ten images of a class-sorted list the first eight are for training."""
    tables = _numbered_alike([_table(path, domain) for path in paths])
    if len({table.classes for table in tables}) != 1:
        raise ValueError(f"the tables in {paths[0].parent} do not name the same classes")
    classes = tables[0].classes or classes
    if not classes:
        raise ValueError(f"{paths[0]} does not say what its classes are called")
    for path, table in zip(paths, tables, strict=True):
        if len(table.labels) and not 0 <= table.labels.min() <= table.labels.max() < len(classes):
            low, high = table.labels.min(), table.labels.max()
            raise ValueError(f"{path} has labels from {low} to {high} for {len(classes)} classes")
    groups = [[t for p, t in zip(paths, tables, strict=True) if _for_testing(p) is kind] for kind in (False, True)]
    parts = [_joined(group) for group in groups if group]
    fetch = _fetcher()
    if len(parts) == 1:
        order = np.argsort(parts[0].labels, kind="stable")
        parts = [
            _only(parts[0], order[np.arange(len(order)) % 10 < OF_TEN]),
            _only(parts[0], order[np.arange(len(order)) % 10 >= OF_TEN]),
        ]
    first, second = (Encoded(part.names, part.labels, fetch) for part in parts)
    return RawDomain(name, classes, first, second)


def _for_testing(path: Path) -> bool:
    """By the name of the file, or of the folder of a split."""
    return path.name.startswith(TEST) or path.parent.name.startswith(TEST)


def _table(path: Path, domain: str) -> Table:
    """Labels and row numbers, without the images."""
    parquet = _parquet()
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            label, where = (next((c for c in known if c in columns), None) for known in (LABELS, DOMAINS))
            rows = file.read(columns=[column for column in (label, where) if column])
            features = _features(file.schema_arrow.metadata)
    except Exception as error:  # pyarrow raises whatever damaged bytes make it trip over
        raise ValueError(f"{path} is not a Parquet file that can be read ({error})") from error
    if label is None or IMAGE not in columns:
        raise ValueError(f"{path} has the columns {', '.join(columns)}; image and label are needed")
    labels, classes, words = _numbers(path, label, rows[label], _named(features, label))
    kept = np.arange(len(labels))
    if domain:
        if where is None:
            raise ValueError(
                f"{path} has the columns {', '.join(columns)}; one called domain is needed to tell which images are '{domain}'"
            )
        kept = np.flatnonzero([_same(said, domain) for said in _domains(path, rows[where], _named(features, where))])
    return Table(tuple(f"{path}#{row}" for row in kept), labels[kept], classes, words)


def _numbers(path: Path, what: str, column: Any, names: tuple[str, ...]) -> tuple[Labels, tuple[str, ...], bool]:
    """A column of numbers or words as numbers, what they mean, and whether they were words."""
    values = column.to_pylist()
    if None in values:
        raise ValueError(f"{path}#{values.index(None)} has no {what}: remove the row, or give it one")
    if values and all(isinstance(value, str) for value in values):
        names = tuple(sorted(set(values)))
        number = {name: i for i, name in enumerate(names)}
        return np.array([number[value] for value in values], dtype=np.int64), names, True
    if not all(isinstance(value, int) or (isinstance(value, float) and value.is_integer()) for value in values):
        raise ValueError(f"{path} has a column {what} of the kind {column.type}; whole numbers or words are needed")
    return np.array(values, dtype=np.int64), names, False


def _domains(path: Path, column: Any, names: tuple[str, ...]) -> list[str]:
    """What each row says of its domain: a name, or a number as it stands; nothing where there is none."""
    values = column.to_pylist()
    numbers = [value for value in values if isinstance(value, int)]
    if names and numbers and not 0 <= min(numbers) <= max(numbers) < len(names):
        raise ValueError(f"{path} has domains from {min(numbers)} to {max(numbers)} for {len(names)} names")
    return ["" if v is None else names[v] if names and isinstance(v, int) else str(v) for v in values]


def _numbered_alike(tables: list[Table]) -> list[Table]:
    """Words are numbered by those of all files together: one alone may lack some classes."""
    if not any(table.words for table in tables) or not all(table.words for table in tables if table.names):
        return tables
    classes = tuple(sorted({name for table in tables for name in table.classes}))
    place = {name: i for i, name in enumerate(classes)}
    return [
        replace(
            table,
            labels=np.array([place[table.classes[label]] for label in table.labels], dtype=np.int64),
            classes=classes,
        )
        for table in tables
    ]


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ValueError("Parquet files cannot be read without pyarrow: pip install 'fedheal[hub]'") from None
    return parquet


def _same(one: str, other: str) -> bool:
    return one.lower().replace("_", " ") == other.lower().replace("_", " ")


def _features(metadata: Any) -> dict[str, Any]:
    """What the hub's library wrote into a file about its columns."""
    try:
        found = json.loads(metadata[b"huggingface"])["info"]["features"]
        return found if isinstance(found, dict) else {}
    except (TypeError, KeyError, ValueError):
        return {}


def _named(features: dict[str, Any], column: str) -> tuple[str, ...]:
    """What a column's numbers mean, if the file says it."""
    said = features.get(column)
    names = said.get("names") if isinstance(said, dict) else None
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _joined(tables: Sequence[Table]) -> Table:
    names = tuple(name for table in tables for name in table.names)
    return Table(names, np.concatenate([table.labels for table in tables]), tables[0].classes)


def _only(table: Table, positions: Labels) -> Table:
    return Table(tuple(table.names[i] for i in positions), table.labels[positions], table.classes)


def _fetcher() -> Callable[[str], bytes]:
    """Reads images by `file#row`, a row group at a time: the next image is mostly in the same one."""
    parquet = _parquet()

    @functools.lru_cache(maxsize=4)
    def starts(path: str) -> Labels:
        with parquet.ParquetFile(path) as file:
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        return np.concatenate([[0], np.cumsum(sizes)])

    @functools.lru_cache(maxsize=2)
    def group(path: str, number: int) -> Any:
        with parquet.ParquetFile(path) as file:
            return file.read_row_group(number, columns=[IMAGE])[IMAGE]

    def fetch(name: str) -> bytes:
        path, _, row = name.rpartition("#")
        try:
            begins = starts(path)
            number = int(np.searchsorted(begins, int(row), side="right")) - 1
            held = group(path, number)[int(row) - int(begins[number])].as_py()
            data = held["bytes"] if isinstance(held, dict) else held
            return bytes(data)
        except Exception as error:  # as above
            raise Unreadable(f"{name} cannot be read ({error})") from error

    return fetch
