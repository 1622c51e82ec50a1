"""Image data sets as the Hugging Face hub stores them: Parquet files with a column `image` (the encoded bytes) and one with
the label, and for several domains in one table a column `domain`. Needs pyarrow (`pip install fedheal[hub]`).

They are looked for below `hub/<owner>--<name>/` in the data root, where `fedheal data fetch` puts them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from fedheal.data.folders import OF_TEN
from fedheal.data.images import Unreadable
from fedheal.data.raw import Encoded, Labels, RawDomain

TEST = ("test", "val")  # how names of test images begin; all others are for training
LABELS, DOMAINS = ("label", "labels", "digit"), ("domain", "domains")
IMAGE = "image"


@dataclass(frozen=True)
class Table:
    """Where images of a domain stand: their names (`file#row`), their labels, and what the labels mean."""

    names: tuple[str, ...]
    labels: Labels
    classes: tuple[str, ...]


def files(folder: Path, patterns: Sequence[str]) -> tuple[Path, ...]:
    """The Parquet files of a repository that are on disk."""
    found = [path for path in sorted(folder.rglob("*.parquet")) if path.is_file()]
    return tuple(p for p in found if any(fnmatch(p.relative_to(folder).as_posix(), pattern) for pattern in patterns))


def read(name: str, paths: Sequence[Path], domain: str, classes: tuple[str, ...]) -> RawDomain:
    """A domain; where no file is for testing, of every ten images of a class-sorted list the first eight are for training."""
    train = [path for path in paths if not _for_testing(path)]
    test = [path for path in paths if _for_testing(path)]
    parts = [_joined([_table(path, domain) for path in group], group) for group in (train, test) if group]
    if len({part.classes for part in parts}) != 1:
        raise ValueError(f"the tables in {paths[0].parent} name other classes for training than for testing")
    if not parts[0].classes and not classes:
        raise ValueError(f"{paths[0]} does not say what its classes are called")
    fetch = _fetcher()
    if len(parts) == 1:
        order = np.argsort(parts[0].labels, kind="stable")
        parts = [
            _only(parts[0], order[np.arange(len(order)) % 10 < OF_TEN]),
            _only(parts[0], order[np.arange(len(order)) % 10 >= OF_TEN]),
        ]
    first, second = (Encoded(part.names, part.labels, fetch) for part in parts)
    return RawDomain(name, parts[0].classes or classes, first, second)


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
    classes = tuple(features.get(label, {}).get("names", ()))
    values = rows[label].to_pylist()
    if values and isinstance(values[0], str):
        classes = tuple(sorted(set(values)))
        values = [classes.index(value) for value in values]
    labels = np.array(values, dtype=np.int64)
    if len(labels) and (labels.min() < 0 or (classes and labels.max() >= len(classes))):
        raise ValueError(f"{path} has labels from {labels.min()} to {labels.max()} for {len(classes)} classes")
    kept = np.arange(len(labels))
    if domain and where:
        kinds = features.get(where, {}).get("names")
        said = [kinds[v] if kinds else v for v in rows[where].to_pylist()]
        kept = np.flatnonzero([_same(str(v), domain) for v in said])
    return Table(tuple(f"{path}#{row}" for row in kept), labels[kept], classes)


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


def _joined(tables: Sequence[Table], paths: Sequence[Path]) -> Table:
    if len({table.classes for table in tables}) != 1:
        raise ValueError(f"the tables in {paths[0].parent} do not name the same classes")
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
